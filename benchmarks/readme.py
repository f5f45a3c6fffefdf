"""Write the README's figures from the result files, and its report from the command.

    python benchmarks/readme.py           # the figures
    python benchmarks/readme.py --report  # the report of this machine too

What lies between ``<!-- results -->`` and ``<!-- /results -->`` is replaced. A test compares the
two, so that no figure in the README lacks its file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
SHAPES = (
    (1, 100_000), (1, 32_768), (1, 8_192), (1, 1_024), (8, 32_768), (64, 4_096), (128, 1_024),
    (256, 100),
)  # fmt: skip


def newest(pattern: str) -> dict[str, Any] | None:
    """The newest result file that matches, with its name under ``"file"``."""
    paths = sorted((HERE / "results").glob(f"*-{pattern}.json"))
    if not paths:
        return None
    return {**json.loads(paths[-1].read_text()), "file": paths[-1].name}


def results() -> str:
    """The README's section, Markdown."""
    parts = [
        _decode(), _short(), _more(), _portable(), _plain_torch(), _gpu_overheads(), _cpu(),
        _overheads(),
    ]  # fmt: skip
    return "\n\n".join(part for part in parts if part)


def _source(record: dict[str, Any]) -> str:
    e = record["environment"]
    return f"[{record['file']}](benchmarks/results/{record['file']}), torch {e['torch']}"


def _decode() -> str:
    record = newest("nvidia-h200-decode")
    if record is None:
        return ""
    rows = [r for r in record["rows"] if r["dtype"] == "fp16" and r["query_len"] == 1]
    shapes = [s for s in SHAPES if any((r["batch"], r["context"]) == s for r in rows)]
    head = ["backend", "layout", *(f"{b} × {c:,}" for b, c in shapes)]
    lines = [head, ["---"] * len(head)]
    for backend, layout in dict.fromkeys((r["backend"], r["layout"]) for r in rows):
        cells = {
            (r["batch"], r["context"]): f"{r['us_median']:,.0f} ({r['percent_of_read']:.0f} %)"
            for r in rows
            if (r["backend"], r["layout"]) == (backend, layout)
        }
        lines.append([f"`{backend}`", layout, *(cells.get(s, "") for s in shapes)])
    limits = record["ceilings"]
    return (
        f"A decode step at 24/4/256 in fp16, blocks of 16, shuffled, on an "
        f"{record['environment']['device']}: µs by graph replay with a cold L2, in brackets the "
        f"share of the read ceiling of that run ({limits['read_tbps']:.2f} TB/s; a graph of one "
        f"trivial kernel takes {limits['empty_graph_us']:.1f} µs).\n\n"
        + _table(lines)
        + f"\n\n{_source(record)}."
    )


def _short() -> str:
    """Contexts in which microseconds count, with a decimal."""
    record = newest("nvidia-h200-decode-short")
    if record is None:
        return ""
    rows = [r for r in record["rows"] if r["kv_dtype"] == "fp16"]
    shapes = list(dict.fromkeys((r["batch"], r["context"]) for r in rows))
    head = ["layout", *(f"{b} × {c:,}" for b, c in shapes)]
    lines = [head, ["---"] * len(head)]
    for layout in dict.fromkeys(r["layout"] for r in rows):
        lines.append([layout, *(f"{r['us_median']:.1f}" for r in rows if r["layout"] == layout)])
    return (
        "Short contexts on `cuda`, whose parts are merged in the same launch since the table above "
        f"was measured (µs; a trivial kernel {record['ceilings']['empty_graph_us']:.1f}):\n\n"
        + _table(lines)
        + f"\n\n{_source(record)}."
    )


def _more() -> str:
    """Other sizes and types, a row a problem."""
    record = newest("nvidia-h200-decode-more")
    if record is None:
        return ""
    lines = [["heads", "work", "cache", "layout", "backend", "µs", ""], ["---"] * 7]
    for r in record["rows"]:
        queries = f", {r['query_len']:,} query tokens each" if r["query_len"] > 1 else ""
        share = f"{r['percent_of_read']:.0f} % of the read ceiling"
        if r.get("tflops"):
            share = f"{r['percent_of_matrix']:.0f} % of the bf16 matrix rate"
        lines.append([
            f"{r['num_heads']}/{r['num_kv_heads']}/{r['head_dim']}",
            f"{r['batch']} × {r['context']:,}{queries}",
            r["kv_dtype"],
            r["layout"],
            f"`{r['backend']}`" + (f", {r['variant']}" if r.get("variant") else ""),
            f"{r['us_median']:,.0f}",
            share,
        ])  # fmt: skip
    return (
        "Other sizes, types and kinds of work on the same kind of device "
        f"({record['ceilings']['read_tbps']:.2f} TB/s in that run):\n\n"
        + _table(lines)
        + f"\n\n{_source(record)}. Which of the two the chain picks is said "
        "[above](#which-backend-and-why)."
    )


def _portable() -> str:
    record = newest("nvidia-h200-decode-portable")
    if record is None:
        return ""
    shares = {
        (r["batch"], r["context"], r["layout"]): f"{r['percent_of_read']:.0f} %"
        for r in record["rows"]
    }
    return (
        "The portable kernel of `cuda`, which GPUs other than those of sm_80 and sm_90 get, "
        f"reaches {shares[64, 4_096, 'packed']} of the read ceiling there at 64 × 4,096 and "
        f"{shares[1, 100_000, 'packed']} at 1 × 100,000 in the packed layout, and "
        f"{shares[64, 4_096, 'NHD']} and {shares[1, 100_000, 'NHD']} in NHD ({_source(record)})."
    )


def _plain_torch() -> str:
    record = newest("nvidia-h200-torch-decode")
    if record is None:
        return ""
    times = {
        (r["batch"], r["context"]): r["us_median"]
        for r in record["rows"]
        if r["layout"] == "packed"
    }
    return (
        f"Plain torch (`torch`, packed) there takes {times[1, 100_000] / 1e3:.2f} ms for "
        f"1 × 100,000 and {times[64, 4_096] / 1e3:.2f} ms for 64 × 4,096 ({_source(record)})."
    )


def _gpu_overheads() -> str:
    record = newest("nvidia-h200-overhead")
    rows = [r for r in record["rows"] if r.get("graph") is False] if record else []
    if not rows or record is None:
        return ""

    def of(backend: str, what: str) -> str:
        found = next(
            r for r in rows
            if r["backend"] == backend and r["layout"] == "NHD" and r["context"] == 16
            and r["variant"] == f"eager, out given: {what}"
        )  # fmt: skip
        return f"{found['us_median']:.0f}"

    return (
        f"The host spends {of('triton', 'the call')} µs on an eager call of `triton` over 16 "
        "tokens (NHD, `out` given; a shared host, whose own speed varies), "
        f"{of('triton', 'ours')} of it beside Triton's launcher, and "
        f"{of('cuda', 'the call')} µs on one of `cuda`, {of('cuda', 'beyond it')} beyond an empty "
        f"launch ({_source(record)})."
    )


def _cpu() -> str:
    record = newest("amd-epyc-torch-path")
    if record is None:
        return ""
    rows = [r for r in record["rows"] if r.get("ratio_to_contiguous")]
    layouts = list(dict.fromkeys(r["layout"] for r in rows))
    lines = [["tokens", "dtype", *layouts], ["---"] * (2 + len(layouts))]
    for batch, context, dtype in dict.fromkeys(
        (r["batch"], r["context"], r["dtype"]) for r in rows
    ):
        cells = [
            f"{r['ratio_to_contiguous']:.2f}×"
            for layout in layouts
            for r in rows
            if (r["batch"], r["context"], r["dtype"], r["layout"])
            == (batch, context, dtype, layout)
        ]
        lines.append([f"{batch} × {context:,}", dtype, *cells])
    extra = max(r["extra_bytes"] for r in record["rows"] if r.get("extra_bytes"))
    return (
        "`torch` on a CPU, as a multiple of the time that torch's own attention takes over keys "
        "and values that already lie contiguous (medians of pairs); a call over 100,000 tokens "
        f"takes {extra / 2**20:.0f} MiB beyond its arguments.\n\n"
        + _table(lines)
        + f"\n\n{_source(record)}, {record['environment']['host']}."
    )


def _overheads() -> str:
    call, load = newest("amd-epyc-overhead"), newest("amd-epyc-import-time")
    if call is None or load is None:
        return ""
    warm = next(r for r in call["rows"] if r["variant"] == "call")["us_median"]
    start = next(r for r in load["rows"] if r["variant"] == "import")["us_median"]
    return (
        f"On the same CPU a warm call spends {warm:.0f} µs before the backend's own work "
        f"({_source(call)}), and the import takes {start / 1e3:.0f} ms beyond torch's "
        f"({_source(load)})."
    )


def _table(lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def with_section(text: str, name: str, content: str) -> str:
    """`text` with what lies between the comments `name` replaced."""
    pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
    return re.sub(pattern, lambda m: f"{m[1]}{content}\n{m[2]}", text, flags=re.DOTALL)


def report() -> str:
    """``pagedattn report`` as a newcomer without a GPU sees it."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PAGEDATTN_")}
    done = subprocess.run(
        [sys.executable, "-m", "pagedattn", "report"],
        env={**environ, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "80"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return f"```\n{done.stdout.strip()}\n```"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", action="store_true", help="this machine's report too")
    text = with_section(README.read_text(), "results", results())
    if parser.parse_args().report:
        text = with_section(text, "report", report())
    README.write_text(text)


if __name__ == "__main__":
    main()
