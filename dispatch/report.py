"""The capability report as data. It cannot crash: what could not be learned is said in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

import pagedattn
from pagedattn import chain, device_loss, policy, settings, verdicts
from pagedattn.backends.facts import Facts
from pagedattn.backends.protocol import Problem
from pagedattn.probe import facts as probe_facts
from pagedattn.record import Binding, Candidate
from pagedattn.request import Request
from pagedattn.wording import describe

_OURS = ("cuda", "triton", "torch")
_NO_CHAIN: dict[str, Any] = {"requested": None, "resolved": None, "origin": None, "order": [],
                             "problem": None}  # fmt: skip


def capability_report() -> dict[str, Any]:
    """What this machine offers, what would be bound for the reference problem, and why.

    Touches no device and tries nothing: states that only a first call or `bind` can tell are
    None until then.

    Returns
    -------
    dict
        ``host`` (versions and tools), ``devices``, ``backends`` (a dict each: ``name``, the
        four states ``present``, ``loadable``, ``verified``, ``selected``, ``reasons``,
        ``remedy``), ``chain`` (``requested``, ``resolved``, ``origin``, ``bindings`` with call
        counts), ``environment`` and ``notes`` (what could not be learned). Fit for JSON.
    """
    notes: list[str] = []
    facts = _guarded("the machine", probe_facts, notes)
    host = _guarded("the host", lambda: _host(facts), notes) if facts else None
    devices = _guarded("the devices", lambda: [asdict(d) for d in facts.devices], notes)
    listed = _guarded("the chain", lambda: _chain(facts, notes), notes) if facts else None
    rows, summary = listed or ([_unknown(name) for name in _OURS], _NO_CHAIN)
    bound = _guarded("the bindings", lambda: [_bound(b) for b in chain.bindings()], notes)
    notes += facts.notes if facts else ()
    notes += _guarded("the settings", _remarks, notes) or ()
    report: dict[str, Any] = {
        "host": {"pagedattn": pagedattn.__version__, **(host or {})},
        "devices": devices or [],
        "backends": rows,
        "chain": {**summary, "bindings": bound or []},
        "environment": _environment(),
        "notes": list(dict.fromkeys(notes)),
    }
    plain: dict[str, Any] = _as_json_has_it(report)
    return plain


def reference_problem(facts: Facts) -> Problem:
    """The decode step that the report speaks of: 24/4/256, blocks of 16, packed."""
    dtype = torch.float16 if facts.has_gpu else torch.float32
    device = "cuda:0" if facts.has_gpu else "cpu"
    return Problem(device, dtype, dtype, num_heads=24, num_kv_heads=4, head_dim=256, block_size=16)


def _guarded(section: str, learn: Callable[[], Any], notes: list[str]) -> Any:
    try:
        return learn()
    except Exception as error:  # a report that crashes is no report: the error is its content
        notes.append(f"{section} could not be learned: {type(error).__name__}: {error}")
        return None


def _as_json_has_it(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _as_json_has_it(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json_has_it(v) for v in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _host(facts: Facts) -> dict[str, Any]:
    host = {**asdict(facts), "has_gpu": facts.has_gpu}
    del host["devices"], host["notes"]
    return host


def _environment() -> dict[str, str]:
    return {n: v for n, v in sorted(os.environ.items()) if n.startswith(settings.PREFIX)}


def _remarks() -> list[str]:
    """What about the settings, and about this process, a reader of the report should know."""
    remarks = settings.unknown_variables() + settings.invalid_values()
    if os.environ.get("PAGEDATTN_VERIFY", "").strip().lower() == "off":
        remarks.append("PAGEDATTN_VERIFY=off: backends are bound without being proved right")
    if verdicts.not_kept:
        remarks.append(verdicts.not_kept)
    remarks += [str(error).replace("\n", " ") for error in device_loss.lost.values()]
    return remarks


def _chain(facts: Facts, notes: list[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    problem = reference_problem(facts)
    request = _guarded("the chain asked for", lambda: Request.current(None), notes)
    wanted = request.names if request else None
    order = wanted or policy.order(facts.vendor, problem.device_type)
    rows = []
    selected: str | None = None
    for name in dict.fromkeys([*order, *_OURS]):
        candidate = _guarded(name, partial(_candidate, name, problem, facts), notes)
        row = _row(candidate) if candidate else _unknown(name)
        if not row["reasons"] and name in order and request and selected is None:
            row["selected"], selected = True, name
        elif not row["reasons"]:
            row["reasons"] = [_passed_over(name, order, selected)]
        row["policy"] = policy.reason(name, facts.vendor, problem.device_type)
        rows.append(row)
    summary = {
        "requested": list(wanted) if wanted else "auto" if request else None,
        "resolved": selected,
        "origin": request.origin if request else None,
        "order": list(order),
        "problem": f"{problem.device}, {describe(problem)}",
    }
    return rows, summary


def _passed_over(name: str, order: Sequence[str], selected: str | None) -> str:
    if name not in order:
        return "it is not in the chain asked for"
    return f"{selected} comes before it" if selected else "the chain asked for is not known"


def _candidate(name: str, problem: Problem, facts: Facts) -> Candidate:
    """What a binding found out about it, else what can be said without trying."""
    of_problem = [b for b in chain.bindings() if b.problem == problem]
    tried = [c for b in of_problem for c in b.candidates] + list(chain.failures(problem))
    for candidate in reversed(tried):
        if candidate.name == name and candidate.loadable is not None:
            return candidate
    return chain.examine(name, problem, facts)


def _row(candidate: Candidate) -> dict[str, Any]:
    return {
        "name": candidate.name,
        "present": candidate.present,
        "loadable": candidate.loadable if candidate.present else False,
        "verified": candidate.verified if candidate.present else False,
        "selected": False,
        "reasons": list(candidate.reasons),
        "remedy": candidate.remedy,
    }


def _unknown(name: str) -> dict[str, Any]:
    states = dict.fromkeys(("present", "loadable", "verified"))
    reasons = ["nothing could be learned about it; the notes say why"]
    return {"name": name, **states, "selected": False, "reasons": reasons, "remedy": None}


def _bound(binding: Binding) -> dict[str, Any]:
    return {
        "backend": binding.backend,
        "requested": list(binding.requested) if binding.requested else "auto",
        "parts": {part: name for part, name in binding.parts.items() if part != "all"},
        "few_queries": binding.few_queries,
        "calls": binding.calls,
        "described": f"{binding.problem.device}, {describe(binding.problem)}",
        "problem": _plain(binding.problem),
        "passed_over": {c.name: list(c.reasons) for c in binding.candidates if not c.selected},
    }


def _plain(problem: Problem) -> dict[str, Any]:
    return {
        k: str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v
        for k, v in asdict(problem).items()
    }
