"""Printing for people: within the width, colours only on a terminal, no trailing spaces."""

from __future__ import annotations

import contextlib
import textwrap
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

_WIDEST = 100  # longer lines are hard to read, however wide the terminal


def make_console() -> Console:
    """A console on standard output; 80 columns and plain where that is not a terminal."""
    return Console(highlight=False, markup=False, emoji=False)


def print_text(console: Console, *parts: str | tuple[str, str]) -> None:
    """Print one line as it is: strings, and (string, style) pairs. Nothing is wrapped."""
    console.print(Text.assemble(*parts), soft_wrap=True)


def print_field(console: Console, label: str, text: str, *, indent: int, style: str = "") -> None:
    """Print ``label   text``, the text wrapped beside the label from column `indent` on.

    What holds no space (a path, an address) is never broken.
    """
    width = max(indent + 20, min(console.width, _WIDEST) - 1)
    lines = [
        line
        for paragraph in text.split("\n")
        for line in textwrap.wrap(
            paragraph, width - indent, break_long_words=False, break_on_hyphens=False
        )
    ]
    for i, line in enumerate(lines or [""]):
        head = (label if i == 0 else "").ljust(indent)
        print_text(console, (head, "bold" if i == 0 else ""), (line, style))


class Steps:
    """Progress bars for steps that turn out slow: each appears after a second, on a terminal."""

    def __init__(self, console: Console) -> None:
        self.console = console

    @contextlib.contextmanager
    def step(self, description: str, total: int) -> Iterator[Callable[[int], None]]:
        """A step of `total` parts; yields the function to call after some parts are done."""
        bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(),
            console=self.console, transient=True, disable=not self.console.is_terminal,
        )  # fmt: skip
        task = bar.add_task(description, total=total)
        began = time.perf_counter()

        def advance(parts: int) -> None:
            bar.advance(task, parts)
            if time.perf_counter() - began > 1:
                bar.start()

        try:
            yield advance
        finally:
            bar.stop()
