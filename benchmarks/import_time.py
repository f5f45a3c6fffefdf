"""How long ``import pagedattn`` takes beyond torch's own import, and the probe after it.

    python benchmarks/import_time.py [--repeats N] [--out FOLDER]

Each measurement is a process of its own, in which torch is imported first. Writes a result
file and prints it. The contract for the import is 30 ms.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LIMIT_MS = 30.0

CHILD = """
import json, time, torch
start = time.perf_counter()
import pagedattn
imported = time.perf_counter()
from pagedattn.probe import facts
known = facts()
print(json.dumps([1e3 * (imported - start), 1e3 * (time.perf_counter() - imported),
                  torch.__version__, [device.name for device in known.devices]]))
"""


def measure(repeats: int) -> dict[str, Any]:
    """The result file's contents; the first process only fills the bytecode cache."""
    runs = [_child() for _ in range(repeats + 1)][1:]
    return {
        "schema": 1,
        "commit": _commit(),
        "environment": {
            "device": ", ".join(runs[0][3]) or "cpu",
            "torch": runs[0][2],
            "python": platform.python_version(),
            "host": f"{platform.machine()}, {platform.system()}",
        },
        "rows": [
            {"variant": variant, **_summary([run[column] for run in runs])}
            for column, variant in enumerate(("import", "probe"))
        ],
        "limit_ms": {"import": LIMIT_MS},
    }


def _child() -> list[Any]:
    # an installed package has its bytecode beside it, so that it may be written is the fair case
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD], env=environ, capture_output=True, text=True, check=True
    )
    result: list[Any] = json.loads(done.stdout)
    return result


def _summary(values: list[float]) -> dict[str, float]:
    return {
        "ms_median": round(statistics.median(values), 3),
        "ms_min": round(min(values), 3),
        "ms_max": round(max(values), 3),
        "runs": len(values),
    }


def _commit() -> str | None:
    done = subprocess.run(
        ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=12"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or None


def main() -> int:
    parser = argparse.ArgumentParser(description="Time `import pagedattn` beyond torch's own.")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    result = measure(arguments.repeats)
    device = result["environment"]["device"].replace(" ", "-").replace(",", "")
    name = f"{datetime.date.today().isoformat()}-{device}-import-time.json"
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / name).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result["rows"], indent=2))
    return 0 if result["rows"][0]["ms_median"] <= LIMIT_MS else 1


if __name__ == "__main__":
    sys.exit(main())
