"""Every public name is documented and fully annotated."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import pagedattn

NAMES = sorted(pagedattn.__all__)


def public_functions(name: str) -> list[tuple[str, Callable[..., Any]]]:
    """The object itself, or the methods that its class body defines and that are public."""
    thing = getattr(pagedattn, name)
    if inspect.isclass(thing):
        members = vars(thing).items()
        return [
            (f"{name}.{m}", f)
            for m, f in members
            if inspect.isfunction(f) and not m.startswith("_")
        ]
    return [(name, thing)] if callable(thing) else []


def test_all_is_sorted_and_exists() -> None:
    assert list(pagedattn.__all__) == NAMES
    assert len(NAMES) == len(set(NAMES))
    assert {"paged_attention", "write_kv", "merge_states", "capability_report"} <= set(NAMES)
    for name in NAMES:
        assert hasattr(pagedattn, name)


@pytest.mark.parametrize("name", NAMES)
def test_documented(name: str) -> None:
    thing = getattr(pagedattn, name)
    if inspect.isclass(thing) or callable(thing):
        text = thing.__doc__  # not inspect's, which takes a base class's
        assert text, f"{name} has no docstring"
        # what @dataclass writes by itself says nothing
        assert not text.startswith(f"{name}(")
    for label, function in public_functions(name):
        assert inspect.getdoc(function), f"{label} has no docstring"


@pytest.mark.parametrize("name", NAMES)
def test_annotated(name: str) -> None:
    for label, function in public_functions(name):
        signature = inspect.signature(function)
        parameters = [p for n, p in signature.parameters.items() if n != "self"]
        bare = [p.name for p in parameters if p.annotation is inspect.Parameter.empty]
        assert bare == [], f"{label}: without annotation"
        assert signature.return_annotation is not inspect.Signature.empty, label
