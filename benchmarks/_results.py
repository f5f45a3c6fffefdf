"""Result files: one form, written by the scripts that measured and never by hand."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
ROW = (
    "backend", "variant", "layout", "dtype", "kv_dtype", "num_heads", "num_kv_heads", "head_dim",
    "block_size", "batch", "context", "query_len", "features", "l2", "graph", "us_median",
    "us_min", "us_max", "tbps", "percent_of_read", "rel_err", "rel_err_torch",
)  # fmt: skip


def environment(device: str = "cpu") -> dict[str, Any]:
    """What the figures depend on beside the code."""
    return {
        "device": device_name(device),
        "driver": _driver() if device.startswith("cuda") else None,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "host": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
    }


def device_name(device: str) -> str:
    """A device's name as people say it."""
    if device.startswith("cuda"):
        return str(torch.cuda.get_device_name(device))
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"model name\s*:\s*(.+)", text)
    return found.group(1) if found else platform.machine()


def write(
    what: str,
    rows: list[dict[str, Any]],
    *,
    device: str = "cpu",
    ceilings: dict[str, float] | None = None,
    folder: Path | None = None,
    extra: dict[str, Any] | None = None,
) -> Path:
    """Write ``<date>-<device>-<what>.json`` and return its path.

    Rows hold what applies of `ROW`; the rest is null. `extra` is for figures that are no row.
    """
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    slug = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    record = {
        "schema": 1,
        "commit": commit(),
        "environment": environment(device),
        "ceilings": ceilings or {},
        **(extra or {}),
        "rows": [{**dict.fromkeys(ROW), **row} for row in rows],
    }
    path = folder / f"{today}-{slug}-{what}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def commit() -> str:
    """The commit that was measured, with ``+`` where the tree had changes.

    ``BENCHMARK_COMMIT`` says it where the tree was copied without its history.
    """
    if told := os.environ.get("BENCHMARK_COMMIT"):
        return told
    try:
        here = Path(__file__).parent
        head = _git("rev-parse", "--short=12", "HEAD", cwd=here)
        return head + ("+" if _git("status", "--porcelain", "-uno", cwd=here) else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(["git", *arguments], cwd=cwd, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True)
        return done.stdout.split("\n")[0].strip() or None
