"""The capability report as data. It cannot crash: what could not be learned is said in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from pagedattn import chain, policy, settings
from pagedattn.backends.facts import Facts
from pagedattn.backends.protocol import Problem
from pagedattn.probe import facts as probe_facts


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
    facts = _guarded("probe", probe_facts, notes)
    report: dict[str, Any] = {
        "host": _guarded("host", lambda: _host(facts), notes) if facts else {},
        "devices": [asdict(d) for d in facts.devices] if facts else [],
        "backends": [],
        "chain": {"requested": None, "resolved": None, "origin": None, "bindings": []},
        "environment": _environment(),
        "notes": notes,
    }
    if facts:
        problem = reference_problem(facts)
        report["backends"], report["chain"] = _chain(problem, facts, notes)
        notes += facts.notes
    notes += settings.unknown_variables()
    return report


def reference_problem(facts: Facts) -> Problem:
    """The decode step that the report speaks of: 24/4/256, blocks of 16, packed."""
    on_gpu = facts.vendor != "cpu"
    dtype = torch.float16 if on_gpu else torch.float32
    device = "cuda:0" if on_gpu else "cpu"
    return Problem(device, dtype, dtype, num_heads=24, num_kv_heads=4, head_dim=256, block_size=16)


def _guarded(section: str, learn: Callable[[], Any], notes: list[str]) -> Any:
    try:
        return learn()
    except Exception as error:  # a report that crashes is no report: the error is its content
        notes.append(f"{section} could not be learned: {type(error).__name__}: {error}")
        return None


def _host(facts: Facts) -> dict[str, Any]:
    host = asdict(facts)
    del host["devices"], host["notes"]
    return host


def _environment() -> dict[str, str]:
    return {n: v for n, v in sorted(os.environ.items()) if n.startswith(settings.PREFIX)}


def _chain(
    problem: Problem, facts: Facts, notes: list[str]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    request = _guarded("the requested chain", lambda: chain.Request.current(None), notes)
    wanted = request.names if request else None
    order = wanted or policy.order(facts.vendor, problem.device_type)
    known = [e.name for e in policy.ORDER[facts.vendor]]
    rows = []
    selected: str | None = None
    for name in dict.fromkeys([*order, *known, "cuda", "triton", "torch"]):
        candidate = _guarded(name, partial(_candidate, name, problem, facts), notes)
        if candidate is None:
            continue
        row = _row(candidate)
        row["selected"] = bool(
            request and name in order and selected is None and not candidate.reasons
        )
        if row["selected"]:
            selected = name
        elif not row["reasons"]:
            row["reasons"] = [f"{selected} comes before it in the chain" if name in order
                              else "it is not in the chain asked for"]  # fmt: skip
        rows.append(row)
    summary = {
        "requested": list(wanted) if wanted else "auto",
        "resolved": selected,
        "origin": request.origin if request else None,
        "order": list(order),
        "bindings": [
            {"backend": b.backend, "calls": b.calls, "problem": _plain(b.problem)}
            for b in chain.bindings()
        ],
    }
    return rows, summary


def _candidate(name: str, problem: Problem, facts: Facts) -> chain.Candidate:
    """What a binding found out about it, else what can be said without trying."""
    for binding in reversed(chain.bindings()):
        for candidate in binding.candidates:
            if candidate.name == name and candidate.loadable is not None:
                return candidate
    return chain.examine(name, problem, facts)


def _row(candidate: chain.Candidate) -> dict[str, Any]:
    return {
        "name": candidate.name,
        "present": candidate.present,
        "loadable": candidate.loadable if candidate.present else False,
        "verified": candidate.verified if candidate.present else False,
        "reasons": list(candidate.reasons),
        "remedy": candidate.remedy,
    }


def _plain(problem: Problem) -> dict[str, Any]:
    return {
        k: str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v
        for k, v in asdict(problem).items()
    }
