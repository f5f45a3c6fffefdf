"""``pagedattn verify``: hard small problems on every usable backend, PASS or FAIL for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import torch
from rich.console import Console

from pagedattn import chain, device_loss, policy, registry, verdicts, verify
from pagedattn.backends.errors import DeviceError
from pagedattn.backends.facts import Facts
from pagedattn.backends.protocol import QUANTISED_KV_DTYPES, Backend, Problem
from pagedattn.binding import default_device, usable_device
from pagedattn.console import Steps, make_console, print_field, print_text
from pagedattn.probe import facts as probe_facts
from pagedattn.request import Request
from pagedattn.wording import describe

_INDENT = 24  # PASS, the error and the log-sum-exp's


def run(backend: str | None, device: str | None, *, again: bool = False) -> int:
    """Run and print; returns 0 if nothing failed and something passed."""
    console = make_console()
    where = str(usable_device(device) if device else default_device())
    facts = probe_facts()
    request = Request.current(backend)
    usable = _usable(request, where, facts, console)
    if again:
        print_text(console, f"{verdicts.forget()} kept verdicts forgotten")
    counts: Counter[str] = Counter()
    for candidate in usable:
        counts += _verify_one(candidate, where, facts, console)
    return 0 if counts["PASS"] and not counts["FAIL"] else 1


def _usable(request: Request, where: str, facts: Facts, console: Console) -> list[Backend]:
    """The backends that are present; says why the others are not."""
    problem = next(problems(where))
    names = request.names or policy.order(facts.vendor, problem.device_type)
    usable, absent = [], []
    for name in names:
        candidate = chain.examine(name, problem, facts)
        if candidate.present:
            usable.append(registry.get(name))
            continue
        absent.append(candidate)
        print_text(console, (f"{name} is not usable here", "yellow"))
        for reason in candidate.reasons:
            print_field(console, "", reason, indent=2, style="dim")
    if not usable:
        raise chain.unavailable(problem, request, facts, absent)
    return usable


def problems(device: str) -> Iterator[Problem]:
    """The grid: every layout and type, each feature alone, and all of them at once."""
    base = Problem(device, torch.float32, torch.float32, 24, 4, 256, 16, return_lse=True)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for layout in ("packed", "NHD", "HND"):
            yield replace(base, dtype=dtype, kv_dtype=dtype, kv_layout=layout)
    half = replace(base, dtype=torch.float16, kv_dtype=torch.float16)
    for feature in ("varlen_query", "window", "softcap", "alibi", "sinks", "batch_invariant"):
        yield replace(half, **{feature: True})  # type: ignore[arg-type]
    yield replace(half, varlen_query=True, few_queries=4)
    yield replace(half, varlen_query=True, window=True, softcap=True, alibi=True, sinks=True)
    for head_dim, heads, kv_heads, block_size in (
        (64, 9, 3, 16), (80, 8, 1, 8), (96, 7, 7, 32), (128, 32, 8, 16), (512, 4, 2, 64),
    ):  # fmt: skip
        yield replace(
            half, head_dim=head_dim, num_heads=heads, num_kv_heads=kv_heads, block_size=block_size
        )
    for kv_dtype in sorted(QUANTISED_KV_DTYPES, key=str):
        for scales in ("float", "per_head"):
            yield replace(half, kv_dtype=kv_dtype, kv_scales=scales)


def _verify_one(backend: Backend, device: str, facts: Facts, console: Console) -> Counter[str]:
    """Print a line for each problem; returns how many passed, failed and were skipped."""
    print_text(console, (f"{backend.name} on {device}", "bold"))
    print_text(console, ("      error    lse      against fp64, each with its log-sum-exp", "dim"))
    counts: Counter[str] = Counter()
    grid = list(problems(device))
    with Steps(console).step(backend.name, len(grid)) as advance:
        for problem in grid:
            counts[_verify_problem(backend, problem, facts, console)] += 1
            advance(1)
    told = ", ".join(f"{counts[word]} {said}" for word, said in
                     (("PASS", "passed"), ("FAIL", "failed"), ("SKIP", "skipped")))  # fmt: skip
    print_text(console, (f"{backend.name}: {told}", "red" if counts["FAIL"] else "green"))
    return counts


def _verify_problem(backend: Backend, problem: Problem, facts: Facts, console: Console) -> str:
    what = describe(replace(problem, return_lse=False))
    unsupported = backend.not_supported_reasons(problem)
    if unsupported:
        print_field(console, "SKIP", what, indent=_INDENT, style="yellow")
        print_field(console, "", "; ".join(unsupported), indent=_INDENT, style="dim")
        return "SKIP"
    verdict = _judge(backend, problem, facts)
    numbers = "".join(
        ("" if e is None else f"{e:.1e}").ljust(9) for e in (verdict.error, verdict.lse_error)
    )
    word = "PASS" if verdict.outcome == "ok" else "FAIL"
    print_field(console, f"{word}  {numbers}", what, indent=_INDENT)
    if word == "FAIL":
        print_field(console, "", verdict.detail, indent=_INDENT, style="red")
    return word


def _judge(backend: Backend, problem: Problem, facts: Facts) -> verify.Verdict:
    mark = verdicts.fingerprint(backend, problem, facts)
    kept = verdicts.read(mark)
    if kept is not None and kept["outcome"] in ("signal", "timeout"):
        # what killed a process or hung a device is not repeated unasked
        detail = f"{kept['detail']} (verdict of {kept['when']}; --again tries again)"
        return verify.Verdict(kept["outcome"], detail)
    try:
        runner = backend.load(problem)
    except DeviceError:
        raise
    except Exception as error:  # whatever it is, it is this problem's verdict
        device_loss.raise_if_sticky(error, backend.name, problem.device)
        return verify.Verdict("error", f"it could not be loaded: {type(error).__name__}: {error}")
    return verify.prove(backend, runner, problem, facts, mark)
