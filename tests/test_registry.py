"""Backends by name: ours, an entry point's and a registered one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from _backends import FakeBackend, small_problem
from _backends import fresh_chain as fresh_chain

from pagedattn import bind, chain, register_backend, registry
from pagedattn.backends.errors import BackendUnavailable, UnknownBackend

pytestmark = pytest.mark.usefixtures("fresh_chain")


def test_case_28_an_unknown_name_is_told_with_the_nearest() -> None:
    with pytest.raises(UnknownBackend, match=r"did you mean triton\?") as caught:
        registry.get("trition")
    assert "cuda, triton, torch, reference" in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_a_registered_backend_can_be_asked_for_and_is_not_in_the_chain() -> None:
    register_backend(FakeBackend("acme"))
    assert chain.binding_for(small_problem(), "acme").backend == "acme"
    problem = small_problem(num_heads=2)
    tried = chain.binding_for(problem, "reference,acme").candidates
    assert [c.name for c in tried] == ["reference", "acme"]
    with pytest.raises(UnknownBackend, match=r"did you mean acme\?"):
        registry.require_known("acne")


def test_registering_again_replaces_and_drops_bindings() -> None:
    register_backend(FakeBackend("acme"))
    before = chain.binding_for(small_problem(), "acme")
    register_backend(FakeBackend("acme", unsupported=("not today",)))
    assert chain.bindings() == ()
    with pytest.raises(BackendUnavailable, match="not today"):
        chain.binding_for(small_problem(), "acme")
    assert before.backend == "acme"


@pytest.mark.parametrize("name", ["cuda", "torch", "reference"])
def test_our_names_cannot_be_taken(name: str) -> None:
    with pytest.raises(ValueError, match="belongs to pagedattn"):
        register_backend(FakeBackend(name))


@pytest.mark.parametrize("name", ["", "two words", "a,b", "Acme", "auto", "1st"])
def test_a_name_must_be_a_plain_word(name: str) -> None:
    with pytest.raises(ValueError, match="plain word"):
        register_backend(FakeBackend(name))


def test_a_backend_that_lacks_members_is_refused() -> None:
    class Half:
        name = "half"

    with pytest.raises(TypeError, match=r"lacks not_present_reasons, .*, load, remedy"):
        register_backend(Half())  # type: ignore[arg-type]


def _install(site: Path, module: str, source: str, points: str) -> None:
    (site / f"{module}.py").write_text(source)
    info = site / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[pagedattn.backends]\n{points}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on `sys.path` to install distributions in."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


_CLASS = """
from pagedattn.backends.reference import ReferenceBackend
class Acme(ReferenceBackend):
    name = "acme"
ready = Acme()
"""


@pytest.mark.parametrize("value", ["Acme", "ready"])
def test_an_entry_point_is_a_name(value: str, site: Path) -> None:
    module = f"acme_{value.lower()}"
    _install(site, module, _CLASS, f"acme = {module}:{value}")
    assert "acme" in registry.names()
    assert module not in sys.modules  # nothing of it is imported before it is asked for
    assert bind("cpu", backend="acme", head_dim=32).backend == "acme"
    assert "acme" not in [
        c.name for c in chain.binding_for(small_problem(), "reference").candidates
    ]


def test_an_entry_point_cannot_take_our_name(site: Path) -> None:
    _install(site, "thief", _CLASS.replace('"acme"', '"torch"'), "torch = thief:Acme")
    assert registry.names().count("torch") == 1
    assert "thief" not in sys.modules


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import no_such_module_here", "ModuleNotFoundError: No module named"),
        ("Acme = 3", "TypeError: int is no backend: it lacks name"),
        (_CLASS.replace('"acme"', '"other"'), "calls itself 'other'"),
        ("raise SystemError('driver missing')", "SystemError: driver missing"),
    ],
)
def test_a_broken_entry_point_is_a_reason_and_not_a_crash(
    source: str, said: str, site: Path
) -> None:
    _install(site, f"broken{abs(hash(source))}", source, f"acme = broken{abs(hash(source))}:Acme")
    with pytest.raises(BackendUnavailable, match="the entry point acme = broken") as caught:
        chain.binding_for(small_problem(), "acme")
    assert said in str(caught.value)
    binding = chain.binding_for(small_problem(), "acme,reference")  # the list goes on
    assert binding.backend == "reference"
    assert said in binding.candidates[0].reasons[0]


def test_case_31_a_builtin_that_cannot_be_imported_is_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(registry._BUILTIN, "triton", ("pagedattn.no_such_module", "X"))
    registry._instances.pop("triton", None)
    binding = chain.binding_for(small_problem(), "triton,reference")
    assert binding.backend == "reference"
    assert "No module named 'pagedattn.no_such_module'" in binding.candidates[0].reasons[0]
