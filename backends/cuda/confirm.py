"""Whether the compiler that was found runs and knows the device: this starts processes.

For the build and for a thorough report. The probe itself starts none.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pagedattn.backends.facts import CompilerFacts, Facts

_ILUVATAR_TARGET = re.compile(r"^\s*bi\b", re.MULTILINE)
_NVCC_RELEASE = re.compile(r"release (\d+\.\d+)")

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def confirm_compiler(
    facts: Facts,
    run: Run = subprocess.run,
    *,
    timeout: float = 20.0,
    environ: Mapping[str, str] | None = None,
) -> CompilerFacts:
    """Start the compiler of `facts` and say whether it is one.

    Parameters
    ----------
    run : callable
        As `subprocess.run`.
    timeout : float
        Seconds for each of the one or two processes.
    environ : mapping, optional
        The environment to start it in; this process's if not given.

    Returns
    -------
    CompilerFacts
        With `confirmed` True and `version`, or `confirmed` False and the reason in `rejected`.
        Unchanged if there is no compiler to confirm.
    """
    compiler = facts.compiler
    if compiler.path is None:
        return compiler
    options: dict[str, Any] = {
        "timeout": timeout,
        "env": environment(compiler, os.environ if environ is None else environ),
        "capture_output": True,
        "text": True,
        "errors": "replace",
        "stdin": subprocess.DEVNULL,
    }
    try:
        reason, version = _ask(compiler, run, options)
    except (OSError, subprocess.SubprocessError) as error:
        reason, version = f"{type(error).__name__}: {error}", None
    if reason is None:
        return replace(compiler, confirmed=True, version=version)
    line = f"{compiler.path}: {reason}"
    return replace(compiler, confirmed=False, rejected=(*compiler.rejected, line))


def _ask(
    compiler: CompilerFacts, run: Run, options: dict[str, Any]
) -> tuple[str | None, str | None]:
    """The reason why it is no compiler for the device (None if it is), and its version."""
    told = run([compiler.path, "--version"], **options)
    lines = told.stdout.strip().splitlines()
    if told.returncode != 0 or not lines:
        return f"--version failed (exit {told.returncode}): {_first_line(told.stderr)}", None
    if compiler.kind == "nvcc":
        release = _NVCC_RELEASE.search(told.stdout)
        return (None, release.group(1)) if release else ("--version names no release", None)
    targets = run([compiler.path, "--print-targets"], **options)
    if targets.returncode != 0 or not _ILUVATAR_TARGET.search(targets.stdout):
        return "--print-targets does not list bi, so it builds nothing for CoreX", None
    return None, lines[0]


def environment(compiler: CompilerFacts, environ: Mapping[str, str]) -> dict[str, str]:
    """CoreX's compiler needs the tree's libraries on the loader's path."""
    result = dict(environ)
    if compiler.kind != "nvcc" and compiler.root:
        ours = [f"{compiler.root}/lib", f"{compiler.root}/lib64"]
        old = result.get("LD_LIBRARY_PATH")
        result["LD_LIBRARY_PATH"] = ":".join([*ours, old] if old else ours)
    return result


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "it printed nothing")
