"""How long ``import pagedattn`` takes beyond torch's own import, and the probe after it.

    python benchmarks/import_time.py [--repeats N] [--out FOLDER]

Each measurement is a process of its own, in which torch is imported first. Writes a result
file and exits with 1 where the import takes more than the contract's 30 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import _results

LIMIT_MS = 30.0

CHILD = """
import json, time, torch
start = time.perf_counter()
import pagedattn
imported = time.perf_counter()
from pagedattn.probe import facts
facts()
print(json.dumps([1e6 * (imported - start), 1e6 * (time.perf_counter() - imported)]))
"""


def measure(repeats: int) -> list[dict[str, Any]]:
    """A row for the import and one for the probe; the first process only fills the bytecode
    cache."""
    runs = [_child() for _ in range(repeats + 1)][1:]
    return [
        {
            "variant": variant,
            "us_median": round(statistics.median(run[column] for run in runs)),
            "us_min": round(min(run[column] for run in runs)),
            "us_max": round(max(run[column] for run in runs)),
        }
        for column, variant in enumerate(("import", "probe"))
    ]


def _child() -> list[float]:
    # an installed package has its bytecode beside it, so that it may be written is the fair case
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD], env=environ, capture_output=True, text=True, check=True
    )
    result: list[float] = json.loads(done.stdout)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, help="folder of the result file")
    arguments = parser.parse_args()
    rows = measure(arguments.repeats)
    for row in rows:
        print(f"{row['variant']}: {row['us_median'] / 1e3:.1f} ms (median)")
    print(_results.write("import-time", rows, folder=arguments.out, extra={"limit_ms": LIMIT_MS}))
    return 0 if rows[0]["us_median"] <= 1e3 * LIMIT_MS else 1


if __name__ == "__main__":
    sys.exit(main())
