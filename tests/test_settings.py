"""The environment variables: unknown ones are told, wrong values are named, none is ignored."""

from __future__ import annotations

import logging
import os
from unittest import mock

import pytest
from _backends import fresh_chain as fresh_chain
from _backends import run_python

from pagedattn import settings
from pagedattn.backends.errors import ConfigurationError

pytestmark = pytest.mark.usefixtures("fresh_chain")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("PAGEDATTN_BAKEND", "PAGEDATTN_BACKEND"),
        ("PAGEDATTN_CACHEDIR", "PAGEDATTN_CACHE_DIR"),
        ("PAGEDATTN_backend", "PAGEDATTN_BACKEND"),
        ("PAGEDATTN_VERIFI", "PAGEDATTN_VERIFY"),
    ],
)
def test_case_28_an_unknown_variable_is_told_with_the_nearest(name: str, meant: str) -> None:
    (sentence,) = settings.unknown_variables({name: "1", "PATH": "/bin"})
    assert sentence.startswith(f"{name} is not a variable of pagedattn")
    assert f"did you mean {meant}?" in sentence


def test_case_28_no_nearest_where_nothing_is_near() -> None:
    (sentence,) = settings.unknown_variables({"PAGEDATTN_QQXX": "1"})
    assert "did you mean" not in sentence


def test_known_variables_are_not_told() -> None:
    assert settings.unknown_variables(dict.fromkeys(settings.VARIABLES, "1")) == []


def test_case_28_an_import_warns_once_of_each_setting_without_effect() -> None:
    code = "import pagedattn; from pagedattn import api; print(pagedattn.chain.bindings())"
    wrong = {"PAGEDATTN_BAKEND": "torch", "PAGEDATTN_LOG": "loud", "PAGEDATTN_EAGER": "perhaps"}
    done = run_python(code, **wrong)
    assert (done.returncode, done.stdout) == (0, "()\n"), done.stderr
    for said in (
        "PagedAttnWarning: PAGEDATTN_BAKEND is not a variable of pagedattn",
        "PagedAttnWarning: PAGEDATTN_LOG='loud' means nothing; valid are debug, info",
        "PagedAttnWarning: PAGEDATTN_EAGER='perhaps' means nothing",
    ):
        assert done.stderr.count(said) == 1, done.stderr


def test_choice_takes_the_default_where_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.choice("PAGEDATTN_VERIFY") == "auto"
    monkeypatch.setenv("PAGEDATTN_VERIFY", " Child ")
    assert settings.choice("PAGEDATTN_VERIFY") == "child"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("PAGEDATTN_VERIFY", "of", "did you mean off?"),
        ("PAGEDATTN_BUILD", "sometimes", "auto, never"),
        ("PAGEDATTN_LOG", "verbose", "debug, info, warning, error"),
    ],
)
def test_a_wrong_value_is_named_with_the_valid_ones(
    name: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=name) as caught:
        settings.choice(name)
    assert said in str(caught.value)
    assert settings.invalid_values() == [str(caught.value)]


@pytest.mark.parametrize(("value", "on"), [("1", True), ("ON", True), ("0", False), ("", False)])
def test_switch(value: str, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_CHECK", value)
    assert settings.switch("PAGEDATTN_CHECK") is on


def test_switch_refuses_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_CHECK", "2")
    with pytest.raises(ConfigurationError, match="valid are 1 and 0"):
        settings.switch("PAGEDATTN_CHECK")
    assert len(settings.invalid_values()) == 1


def test_a_reader_sees_every_change(monkeypatch: pytest.MonkeyPatch) -> None:
    read = settings.reader("PAGEDATTN_BACKEND")
    assert read() is None
    monkeypatch.setenv("PAGEDATTN_BACKEND", "tôrch")
    assert read() == "tôrch"
    with mock.patch.dict(os.environ, {"PAGEDATTN_BACKEND": "cuda"}):
        assert read() == "cuda"
    monkeypatch.delenv("PAGEDATTN_BACKEND")
    assert read() is None
    # a Python that has no such table
    monkeypatch.setattr(os, "environ", {"PAGEDATTN_BACKEND": "torch"})
    assert settings.reader("PAGEDATTN_BACKEND")() == "torch"


def test_logging_stays_alone_where_the_variable_is_unset() -> None:
    before = list(logging.getLogger("pagedattn").handlers)
    settings.configure_logging()
    assert logging.getLogger("pagedattn").handlers == before


def test_eager_binds_at_import_and_log_says_so() -> None:
    code = "import pagedattn; print([b.backend for b in pagedattn.chain.bindings()])"
    wanted = {"PAGEDATTN_EAGER": "1", "PAGEDATTN_BACKEND": "reference", "PAGEDATTN_LOG": "info"}
    done = run_python(code, **wanted)
    assert done.stdout == "['reference']\n", done.stderr
    assert "pagedattn INFO reference serves cpu (PAGEDATTN_BACKEND=reference)" in done.stderr


def test_eager_that_cannot_bind_fails_the_import_in_clear_words() -> None:
    done = run_python("import pagedattn", PAGEDATTN_EAGER="1", PAGEDATTN_BACKEND="cuda")
    assert done.returncode == 1
    last = done.stderr[done.stderr.rindex("pagedattn.backends.errors.BackendUnavailable") :]
    assert "PAGEDATTN_EAGER=1 asks for a binding at import, and there is none" in last
    assert "cuda: " in last
    assert "PAGEDATTN_BACKEND=cuda" in last


@pytest.mark.parametrize(
    "command",
    [["/usr/bin/pagedattn", "report"], ["C:/Scripts/pagedattn.exe"], ["-m", "pagedattn", "demo"]],
)
def test_eager_does_not_bind_under_our_own_commands(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDATTN_EAGER", "1")
    assert settings.eager()
    monkeypatch.setattr("sys.argv", command)
    monkeypatch.setattr("sys.orig_argv", ["python", *command])
    assert not settings.eager()
