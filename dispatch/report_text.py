"""The capability report as a person reads it: 80 columns, no colours when piped."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from pagedattn.console import make_console, print_field, print_text
from pagedattn.wording import describe_parts

STATES = ("present", "loadable", "verified", "selected")
_WORDS = {True: ("yes", "green"), False: ("no", "red"), None: ("?", "yellow")}
_INDENT = 11
_COLUMN = 10


def show(report: dict[str, Any], console: Console | None = None) -> None:
    """Print a report made by `capability_report`."""
    console = console or make_console()
    _show_host(report, console)
    _show_backends(report["backends"], console)
    _show_chain(report["chain"], console)
    if report["environment"] or report["notes"]:
        print_text(console)
    for name, value in report["environment"].items():
        print_field(console, "set", f"{name}={value}", indent=_INDENT)
    for note in report["notes"]:
        print_field(console, "note", note, indent=_INDENT, style="yellow")


def _show_host(report: dict[str, Any], console: Console) -> None:
    host = report["host"]
    print_text(console, (f"pagedattn {host['pagedattn']}", "bold"))
    fields = _software(host) if "torch" in host else []
    fields += [(f"device {d['index']}", _device(d)) for d in report["devices"]]
    if not report["devices"]:
        none = "not known yet" if host.get("has_gpu") else "no GPU found"
        fields.append(("devices", none))
    for label, text in fields:
        print_field(console, label, text, indent=_INDENT)
    print_text(console)


def _software(host: dict[str, Any]) -> list[tuple[str, str]]:
    torch = host["torch"]
    build = f"CUDA {torch['cuda']}" if torch["cuda"] else "no CUDA"
    fields = [
        ("host", f"{host['system']}, Python {host['python']}"),
        ("torch", f"{torch['installed_version'] or torch['version']}, {build}"),
    ]
    if host["corex_version"] or host["corex_root"]:
        at = f" at {host['corex_root']}" if host["corex_root"] else ""
        fields.append(("CoreX", f"{host['corex_version'] or 'of unknown version'}{at}"))
    if host["driver"]:
        serves = f", serves CUDA {host['driver_cuda']}" if host["driver_cuda"] else ""
        fields.append(("driver", host["driver"] + serves))
    return [*fields, ("triton", _triton(host["triton"])), ("compiler", _compiler(host["compiler"]))]


def _triton(triton: dict[str, Any]) -> str:
    if triton["version"] is None:
        return "not installed"
    targets = ", ".join(triton["backends"])
    interpreted = ", interpreted (TRITON_INTERPRET)" if triton["interpret"] else ""
    return f"{triton['version']}{f', for {targets}' if targets else ''}{interpreted}"


def _compiler(compiler: dict[str, Any]) -> str:
    if compiler["path"] is None:
        return "\n".join(["none found", *compiler["rejected"]])
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


def _show_backends(rows: list[dict[str, Any]], console: Console) -> None:
    heads = "".join(s.ljust(_COLUMN) for s in STATES).rstrip()
    print_text(console, ("backend".ljust(_INDENT) + heads, "bold"))
    for row in rows:
        _show_backend(row, console)
    if any(row[state] is None for row in rows for state in STATES):
        print_field(console, "", "? = not tried yet; `pagedattn report --bind` tries it",
                    indent=_INDENT)  # fmt: skip
    print_text(console)


def _show_backend(row: dict[str, Any], console: Console) -> None:
    parts: list[tuple[str, str]] = [(row["name"].ljust(_INDENT), "bold")]
    for state in STATES:
        word, style = _WORDS[row[state]]
        parts.append((word.ljust(_COLUMN if state != STATES[-1] else 0), style))
    print_text(console, *parts)
    reasons = row["reasons"] if not row["selected"] else [row.get("policy")]
    for reason in filter(None, reasons):
        print_field(console, "", reason, indent=_INDENT, style="dim")
    if row["remedy"]:  # one line, however long, since it is there to be pasted
        print_text(console, " " * _INDENT, ("to change that: ", "dim"), row["remedy"])


def _show_chain(chain: dict[str, Any], console: Console) -> None:
    requested = chain["requested"]
    asked = "not known" if requested is None else requested
    if isinstance(asked, list):
        asked = f"{', '.join(asked)} ({chain['origin']})"
    elif asked == "auto":
        asked = f"auto: {', '.join(chain['order'])}"
    resolved = chain["resolved"]
    nothing = "not known" if requested is None else "nothing can serve"
    print_field(console, "requested", asked, indent=_INDENT)
    print_field(console, "resolved", resolved or nothing, indent=_INDENT,
                style="green" if resolved else "red")  # fmt: skip
    if chain["problem"]:
        print_field(console, "for", chain["problem"], indent=_INDENT)
    for bound in chain["bindings"]:
        calls = f"{bound['calls']} call{'' if bound['calls'] == 1 else 's'}"
        text = f"{bound['backend']} ({calls}): {bound['described']}"
        if bound["parts"]:
            text += f"; {describe_parts(bound['parts'], bound['few_queries'])}"
        print_field(console, "bound", text, indent=_INDENT)
