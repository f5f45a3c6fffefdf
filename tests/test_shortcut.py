"""A warm call found by the shortcut: what its key tells apart stays apart, the rest is found."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from _backends import FakeBackend, inputs
from _backends import fresh_chain as fresh_chain
from torch import Tensor

import pagedattn
from pagedattn import admission, chain, shortcut
from pagedattn.backends.protocol import Call
from pagedattn.given import Arguments

pytestmark = [
    pytest.mark.usefixtures("told"),
    pytest.mark.skipif(shortcut.check_of is None, reason="this torch has no check of tensors"),
]
FIELDS = Arguments._fields
TENSORS = (
    "query", "key_cache", "value_cache", "block_tables", "seq_lens", "out", "query_start_loc",
    "alibi_slopes", "sinks", "k_scale", "v_scale",
)  # fmt: skip
Given = dict[str, Any]


@dataclass
class Told(FakeBackend):
    """A backend whose result says which call it was."""

    def run(self, call: Call) -> None:
        call.out.fill_(call.scale)


class Seven(FakeBackend):
    def run(self, call: Call) -> None:
        call.out.fill_(7)


@pytest.fixture
def told(fresh_chain: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_VERIFY", "off")  # its results are not attention
    pagedattn.register_backend(Told("told"))


def plain() -> Given:
    """The arguments of a call without options, none of them shared with another."""
    query, cache, _, table, lengths = inputs()
    tensors = (query, cache, cache.clone(), table, lengths)
    options = {"return_lse": False, "kv_layout": "NHD", "batch_invariant": False, "backend": "told"}
    return dict.fromkeys(FIELDS) | dict(zip(TENSORS, tensors, strict=False)) | options


def full() -> Given:
    """The same with every option, the scales as tensors."""
    starts = torch.tensor([0, 1], dtype=torch.int32)
    options = {
        "out": torch.empty(1, 4, 32), "query_start_loc": starts, "alibi_slopes": torch.ones(4),
        "sinks": torch.ones(4), "k_scale": torch.ones(2), "v_scale": torch.ones(2), "scale": 1.0,
        "window": 1000, "softcap": 2.0, "num_splits": 1000, "max_seq_len": 20, "max_query_len": 1,
    }  # fmt: skip
    return plain() | options


def numbers() -> Given:
    return full() | {"k_scale": 1.0, "v_scale": 1.0}


KINDS: dict[str, Callable[[], Given]] = {"plain": plain, "full": full, "numbers": numbers}


def found(given: Given) -> admission.Admitted | None:
    return shortcut.find(tuple(given.values()), given["backend"])


def warm(given: Given) -> admission.Admitted:
    pagedattn.paged_attention(**given)
    admitted = found(given)
    assert admitted is not None
    return admitted


def fresh(value: Any) -> Any:
    """What is equal to `value`, as another object where it can be."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, float | int) and not isinstance(value, bool):
        return type(value)(repr(value))
    return "".join(list(value)) if isinstance(value, str) else value


def _padded(t: Tensor, step: int) -> Tensor:
    """The same shape with other strides."""
    return torch.zeros(*t.shape, step, dtype=t.dtype)[..., 0]


def _odd_stride(t: Tensor) -> Tensor:
    """Another stride, if there is one, of a dimension of size 1 alone."""
    if 1 not in t.shape:
        return _padded(t, 3)
    strides = [7 * s if n == 1 else s for n, s in zip(t.shape, t.stride(), strict=True)]
    return torch.zeros(t.numel() + 1, dtype=t.dtype).as_strided(t.shape, strides)


class Other(Tensor):
    pass


ALIKE: dict[str, Callable[[Tensor], Any]] = {
    "none": lambda t: None,
    "no tensor": lambda t: 1.0,
    "the class": lambda t: Tensor,
    "shape": lambda t: torch.cat([t, t]),
    "rank": lambda t: t[None],
    "strides": lambda t: _padded(t, 2),
    "stride of a size of 1": _odd_stride,
    "dtype": lambda t: t.to(torch.float64),
    "device": lambda t: t.to("meta"),
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "subclass": lambda t: t.as_subclass(Other),
    "requires grad": lambda t: t.to(torch.float32).requires_grad_(),
    "sparse": lambda t: t.to_sparse(),
    "conjugate": lambda t: torch._neg_view(t),
}
TENSOR_CASES = [(k, n) for k, make in KINDS.items() for n in TENSORS
                if isinstance(make()[n], Tensor)]  # fmt: skip


@pytest.mark.parametrize("how", list(ALIKE))
@pytest.mark.parametrize(("kind", "name"), TENSOR_CASES)
def test_each_tensor_is_told_from_one_that_differs(kind: str, name: str, how: str) -> None:
    given = KINDS[kind]()
    warm(given)
    assert found({**given, name: ALIKE[how](given[name])}) is None


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("name", [n for n in FIELDS if n not in ("max_seq_len", "max_query_len")])
def test_each_option_is_told_from_another_value(kind: str, name: str) -> None:
    given = KINDS[kind]()
    warm(given)
    value = given[name]
    others: list[Any] = [None, "NHD", "HND", "reference", True, 0, 1, 1.0, 1.5, 1000, 1000.0, True]
    others += [3.0, torch.ones(4), torch.ones(2), torch.ones(1), ("told",), [], "auto", object()]
    for other in others:
        same = other is value or (type(other) is type(value) and not isinstance(value, Tensor)
                                  and other == value)  # fmt: skip
        if not same and not (isinstance(value, Tensor) and _like(value, other)):
            assert found({**given, name: other}) is None, f"{name}: {other!r} for {value!r}"


def _like(one: Tensor, other: Any) -> bool:
    return isinstance(other, Tensor) and (one.shape, one.dtype) == (other.shape, other.dtype)


@pytest.mark.parametrize("kind", list(KINDS))
def test_equal_arguments_are_found_whatever_the_objects(kind: str) -> None:
    given = KINDS[kind]()
    admitted = warm(given)
    assert found({name: fresh(value) for name, value in given.items()}) is admitted
    assert found({**given, "max_seq_len": 3, "max_query_len": 7}) is admitted


def test_what_requires_grad_is_found_only_with_autograd_off() -> None:
    given = full()
    given["sinks"] = torch.nn.Parameter(given["sinks"])
    with torch.no_grad():
        admitted = warm(given)
        assert found(given) is admitted
    assert found(given) is None
    with pytest.raises(ValueError, match="sinks requires grad"):
        pagedattn.paged_attention(**given)


def test_inference_mode_finds_by_key_at_first_and_is_learned() -> None:
    given = plain()
    warm(given)
    with torch.inference_mode():
        assert found(given) is None
        for _ in range(2):
            assert pagedattn.paged_attention(**given).is_inference()
        assert found(given) is not None
    assert not pagedattn.paged_attention(**given).is_inference()


def test_fake_tensors_are_not_taken_for_real_ones() -> None:
    fake = pytest.importorskip("torch._subclasses.fake_tensor")
    given = plain()
    warm(given)
    with fake.FakeTensorMode() as mode:
        faked = {k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in given.items()}
        assert found(faked) is None
    assert found(faked) is None


def test_a_tensor_given_twice_is_served_by_its_key() -> None:
    given = plain()
    given["value_cache"] = given["key_cache"]
    for _ in range(3):
        assert pagedattn.paged_attention(**given)[0, 0, 0] == pytest.approx(32**-0.5)
    assert found(given) is None


def test_what_was_asked_for_in_another_way_is_another_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = plain()
    del given["backend"]
    pagedattn.register_backend(Seven("other"))
    for _ in range(3):
        monkeypatch.setenv("PAGEDATTN_BACKEND", "told")
        assert pagedattn.paged_attention(**given)[0, 0, 0] != 7
        monkeypatch.setenv("PAGEDATTN_BACKEND", "other")
        assert pagedattn.paged_attention(**given)[0, 0, 0] == 7
        with pagedattn.use_backend("told"):
            assert pagedattn.paged_attention(**given)[0, 0, 0] != 7


def test_a_list_of_names_may_change_between_calls() -> None:
    given = plain()
    given["backend"] = names = ["told"]
    pagedattn.paged_attention(**given)
    names[0] = "nobody"
    with pytest.raises(pagedattn.UnknownBackend):
        pagedattn.paged_attention(**given)


def test_a_reset_forgets_it() -> None:
    given = plain()
    warm(given)
    chain.reset()
    assert found(given) is None
    assert shortcut._recent == []


def test_what_was_found_before_a_reset_is_not_remembered_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = plain()
    find = admission._key

    def interrupted(*arguments: Any) -> Any:
        key = find(*arguments)
        chain.reset()  # by another thread
        return key

    with monkeypatch.context() as patch:
        patch.setattr(admission, "_key", interrupted)
        pagedattn.paged_attention(**given)
    assert found(given) is None
    warm(given)


def test_what_was_bound_before_a_reset_serves_no_call_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = plain()
    admit = admission.admit

    def interrupted(a: Arguments) -> Any:
        admitted = admit(a)
        pagedattn.register_backend(Seven("told"))  # by another thread
        return admitted

    with monkeypatch.context() as patch:
        patch.setattr(admission, "admit", interrupted)
        pagedattn.paged_attention(**given)
    for _ in range(3):
        assert pagedattn.paged_attention(**given)[0, 0, 0] == 7
    assert len(chain.bindings()) == 1


@pytest.mark.parametrize("name", ["max_seq_len", "max_query_len"])
def test_a_bound_that_is_a_tensor_leaves_nothing_behind(name: str) -> None:
    given = plain()
    given["out"] = torch.empty_like(given["query"])
    for _ in range(2):
        with pytest.raises(TypeError, match=f"{name} must be an integer"):
            pagedattn.paged_attention(**given | {name: torch.tensor(1)})
        pagedattn.paged_attention(**given)
        pagedattn.paged_attention(**given | {name: 1000})


def test_it_keeps_no_tensor_alive() -> None:
    given = full()
    warm(given)
    seen = [weakref.ref(given[name]) for name in TENSORS]
    del given
    gc.collect()
    assert [one() for one in seen] == [None] * len(seen)


def test_many_kinds_of_calls_stay_right_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    make = shortcut.check_of

    def counted(*tensors: Tensor) -> Any:
        made.append(len(tensors))
        assert make is not None
        return make(*tensors)

    monkeypatch.setattr(shortcut, "check_of", counted)
    given = plain()
    for turn in range(64):
        for kind in range(1, 8):
            result = pagedattn.paged_attention(**{**given, "scale": float(kind)})
            assert result[0, 0, 0] == kind
            assert len(shortcut._recent) <= shortcut._MOST
        if turn == 0:
            assert len(made) == 7
    assert len(made) <= 7 * 7, "a check costs more than the key that it saves"


def test_threads_each_get_their_own() -> None:
    given = plain()
    wrong: list[str] = []

    def serve(scales: Sequence[float]) -> None:
        for turn in range(150):
            scale = scales[turn % len(scales)]
            result = pagedattn.paged_attention(**{**given, "scale": scale})
            if not bool((result == scale).all()):
                wrong.append(f"{scale}: {result[0, 0, 0]}")
            if turn % 50 == 49:
                chain.reset()

    threads = [threading.Thread(target=serve, args=([1.0 * n, 8.0, 9.0],)) for n in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize(
    ("name", "check_of"),
    [
        ("raises", lambda *tensors: 1 / 0),
        ("passes all", lambda *tensors: lambda *others: True),
        ("passes none", lambda *tensors: lambda *others: False),
        ("raises later", lambda *tensors: lambda *others: others[0].shape == tensors[0].shape),
    ],
)
def test_a_check_that_behaves_otherwise_is_not_used(name: str, check_of: Any) -> None:
    assert shortcut._usable(check_of) is None


def test_where_torch_has_no_check_calls_go_by_their_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    monkeypatch.setattr(shortcut, "check_of", shortcut._usable(shortcut._of_torch))
    assert shortcut.check_of is None
    given = plain()
    for scale in (1.0, 2.0, 1.0, 2.0):
        assert pagedattn.paged_attention(**{**given, "scale": scale})[0, 0, 0] == scale
    assert shortcut._recent == []
