"""``pagedattn verify``: hard small problems on every usable backend, PASS or FAIL for each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import track

from pagedattn import chain, policy, registry, verdicts, verify
from pagedattn.backends.errors import BackendUnavailable, DeviceError
from pagedattn.backends.protocol import QUANTISED_KV_DTYPES, Backend, Problem
from pagedattn.binding import default_device
from pagedattn.probe import facts as probe_facts


def run(backend: str | None, device: str | None, *, again: bool = False) -> int:
    """Run and print; returns 0 if nothing failed and something passed."""
    console = Console(highlight=False)
    if again:
        console.print(f"{verdicts.forget()} kept verdicts forgotten")
    where = str(torch.device(device) if device else default_device())
    names = chain.parse(backend) if backend else None
    facts = probe_facts()
    usable = []
    for name in names or policy.order(facts.vendor, where.partition(":")[0]):
        candidate = registry.get(name)
        absent = candidate.not_present_reasons(facts)
        for reason in absent:
            console.print(f"{name}: not usable here: {escape(reason)}")
        if not absent:
            usable.append(candidate)
    if not usable:
        raise BackendUnavailable("no backend is usable here, so nothing was verified")
    failures = sum([_verify_one(candidate, where, console) for candidate in usable])
    return 1 if failures else 0


def problems(device: str) -> Iterator[Problem]:
    """The grid: every layout and type, each feature alone, and all of them at once."""
    base = Problem(device, torch.float32, torch.float32, 24, 4, 256, 16, return_lse=True)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for layout in ("packed", "NHD", "HND"):
            yield replace(base, dtype=dtype, kv_dtype=dtype, kv_layout=layout)
    half = replace(base, dtype=torch.float16, kv_dtype=torch.float16)
    for feature in ("varlen_query", "window", "softcap", "alibi", "sinks", "batch_invariant"):
        yield replace(half, **{feature: True})  # type: ignore[arg-type]
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


def _verify_one(backend: Backend, device: str, console: Console) -> int:
    """Print a line for each problem; returns how many failed."""
    failed = 0
    grid = list(problems(device))
    for problem in track(grid, backend.name, console=console, transient=True,
                         disable=not console.is_terminal):  # fmt: skip
        unsupported = backend.not_supported_reasons(problem)
        if unsupported:
            word, detail = "SKIP", "; ".join(unsupported)
        else:
            outcome, detail = _judge(backend, problem)
            word = "PASS" if outcome == "ok" else "FAIL"
        failed += word == "FAIL"
        colour = {"PASS": "green", "FAIL": "red", "SKIP": "yellow"}[word]
        console.print(f"[{colour}]{word}[/] {backend.name} {_describe(problem)}: {escape(detail)}")
    return failed


def _judge(backend: Backend, problem: Problem) -> tuple[str, str]:
    facts = probe_facts()
    if facts.vendor == "corex":  # a first launch there may hang the card
        from pagedattn import verify_child

        return verify_child.run(backend, problem)
    try:
        return verify.judge(backend.load(problem), problem)
    except DeviceError:
        raise
    except Exception as error:  # whatever it is, it is this problem's verdict
        chain.raise_if_sticky(error, backend.name)
        return "error", f"{type(error).__name__}: {error}"


def _describe(p: Problem) -> str:
    names = ("varlen_query", "window", "softcap", "alibi", "sinks", "batch_invariant")
    features = [name for name in names if getattr(p, name)]
    dtype, kv_dtype = (str(d).removeprefix("torch.") for d in (p.dtype, p.kv_dtype))
    types = dtype if dtype == kv_dtype else f"{dtype} over {kv_dtype}, {p.kv_scales} scales"
    sizes = f"{p.num_heads}/{p.num_kv_heads}/{p.head_dim} block {p.block_size}"
    return " ".join([p.kv_layout, types, sizes, *features])
