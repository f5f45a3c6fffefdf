"""The commands: ``pagedattn report``, ``demo``, ``verify`` and ``build``."""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import sys
from collections.abc import Sequence

import torch

from pagedattn import __version__, build_command, demo, report_text, verify_command
from pagedattn.backends.errors import (
    BackendUnavailable,
    BuildError,
    ConfigurationError,
    PagedAttnError,
    VerificationError,
)
from pagedattn.backends.layouts import LAYOUTS
from pagedattn.binding import bind
from pagedattn.report import capability_report

log = logging.getLogger("pagedattn")

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code (0 done, 1 failed, 2 wrong usage)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # an ASCII locale has no × and no µ
            stream.reconfigure(errors="replace")
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read us has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (PagedAttnError, ValueError, TypeError, OSError, MemoryError, RuntimeError) as error:
        log.debug("the command failed", exc_info=True)
        print(f"pagedattn: {str(error) or type(error).__name__}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagedattn", description="Attention over a paged KV cache, on whatever is here."
    )
    parser.add_argument("--version", action="version", version=f"pagedattn {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    report = commands.add_parser("report", help="say what this machine offers and what is bound")
    report.add_argument("--json", action="store_true", help="as JSON")
    report.add_argument(
        "--bind", action="store_true", help="try and verify on the GPU too (a CPU always is)"
    )
    report.set_defaults(run=_report)

    show = commands.add_parser("demo", help="one decode step over a long context, checked")
    show.add_argument("--context", type=_positive, default=8192, help="tokens (default 8192)")
    show.add_argument("--batch", type=_positive, default=1, help="sequences (default 1)")
    show.add_argument("--layout", choices=LAYOUTS, default="packed")
    show.add_argument("--dtype", choices=DTYPES, help="default fp16 on a GPU, fp32 on a CPU")
    _add_where(show)
    show.set_defaults(run=_demo)

    check = commands.add_parser("verify", help="run hard small problems on every usable backend")
    check.add_argument("--again", action="store_true", help="forget the kept verdicts first")
    _add_where(check)
    check.set_defaults(run=_verify)

    build = commands.add_parser("build", help="compile the CUDA kernels before the first call")
    build_command.add_options(build)
    build.set_defaults(run=build_command.run)
    return parser


def _add_where(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", help="a backend's name (default: what the chain picks)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 (default: a GPU if there is one)")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _report(arguments: argparse.Namespace) -> int:
    report = capability_report()
    # With no GPU there is nothing that trying could hurt, so the states need not stay open.
    if arguments.bind or not report["host"].get("has_gpu", True):
        failed = _try_to_bind()
        report = capability_report()
        report["notes"] += [told for told in failed if told not in report["notes"]]
    if arguments.json:
        print(json.dumps(report, indent=2, default=str))
    else:
        report_text.show(report)
    return 0


def _try_to_bind() -> list[str]:
    """What went wrong, in a sentence, unless the report says it already."""
    try:
        bind()
    except (BackendUnavailable, BuildError, VerificationError, ConfigurationError):
        return []  # each backend's row says why, and the notes name a wrong setting
    except Exception as error:  # the report always prints: this goes into it
        return [f"binding failed: {type(error).__name__}: {error}"]
    return []


def _demo(arguments: argparse.Namespace) -> int:
    return demo.run(
        context=arguments.context,
        batch=arguments.batch,
        kv_layout=arguments.layout,
        dtype=DTYPES[arguments.dtype] if arguments.dtype else None,
        backend=arguments.backend,
        device=arguments.device,
    )


def _verify(arguments: argparse.Namespace) -> int:
    return verify_command.run(arguments.backend, arguments.device, again=arguments.again)
