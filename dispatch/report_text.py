"""The capability report as a person reads it: 80 columns, no colours when piped."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

STATES = ("present", "loadable", "verified", "selected")
_WORDS = {True: "[green]yes[/]", False: "[red]no[/]", None: "?"}


def show(report: dict[str, Any], console: Console | None = None) -> None:
    """Print a report made by `capability_report`."""
    console = console or Console(highlight=False, soft_wrap=False)
    _show_host(report, console)
    _show_backends(report, console)
    _show_chain(report["chain"], console)
    for name, value in report["environment"].items():
        console.print(f"{name}={escape(value)}")
    for note in report["notes"]:
        console.print(f"[yellow]note[/] {escape(note)}")


def _show_host(report: dict[str, Any], console: Console) -> None:
    host = report["host"]
    table = Table.grid(padding=(0, 2))
    if host:
        torch, triton, compiler = host["torch"], host["triton"], host["compiler"]
        build = f"CUDA {torch['cuda']}" if torch["cuda"] else "no CUDA"
        table.add_row("host", escape(f"{host['system']}, Python {host['python']}"))
        table.add_row("torch", escape(f"{torch['installed_version'] or torch['version']}, {build}"))
        table.add_row("triton", escape(_triton(triton)))
        table.add_row("compiler", escape(_compiler(compiler)))
    for device in report["devices"]:
        table.add_row(f"device {device['index']}", escape(_device(device)))
    if not report["devices"]:
        table.add_row("devices", "no GPU found" if host.get("vendor") == "cpu" else "not known yet")
    console.print(table)
    console.print()


def _triton(triton: dict[str, Any]) -> str:
    if triton["version"] is None:
        return "not installed"
    return f"{triton['version']}, for {', '.join(triton['backends']) or 'no known target'}"


def _compiler(compiler: dict[str, Any]) -> str:
    if compiler["path"] is None:
        return "none found"
    return f"{compiler['kind']} at {compiler['path']}"


def _device(device: dict[str, Any]) -> str:
    parts = [device["name"]]
    if device["capability"]:
        parts.append("capability {}.{}".format(*device["capability"]))
    if device["multiprocessors"]:
        parts.append(f"{device['multiprocessors']} multiprocessors")
    if device["memory_bytes"]:
        parts.append(f"{device['memory_bytes'] / 2**30:.0f} GiB")
    if device["warp_size"]:
        parts.append(f"warps of {device['warp_size']}")
    return ", ".join(parts)


def _show_backends(report: dict[str, Any], console: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("backend", *STATES, "why not"):
        table.add_column(heading, overflow="fold")
    for row in report["backends"]:
        why = "\n".join(row["reasons"]) if not row["selected"] else ""
        if row["remedy"]:
            why += f"\nto change that: {row['remedy']}"
        table.add_row(row["name"], *(_WORDS[row[s]] for s in STATES), escape(why))
    console.print(table)
    if any(row[state] is None for row in report["backends"] for state in STATES):
        console.print("? = not tried yet; `pagedattn report --bind` tries")
    console.print()


def _show_chain(chain: dict[str, Any], console: Console) -> None:
    requested = chain["requested"]
    asked = requested if isinstance(requested, str) else ", ".join(requested or ["?"])
    console.print(f"requested  {escape(asked)} ({escape(str(chain['origin']))})")
    console.print(f"resolved   {chain['resolved'] or '[red]nothing can serve[/]'}")
    for bound in chain["bindings"]:
        p = bound["problem"]
        console.print(
            f"bound      {bound['backend']}: {p['device']} {p['dtype']} {p['kv_layout']} "
            f"{p['num_heads']}/{p['num_kv_heads']}/{p['head_dim']} block {p['block_size']}, "
            f"{bound['calls']} calls"
        )
