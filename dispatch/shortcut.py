"""A warm call's way round the key of its shapes.

Reading the shapes, strides, types and devices of six tensors in Python, and hashing them, takes a
third of a warm call. torch has a check of many tensors at once, made for what it compiles, which
takes a quarter of that. So the last few arguments that were admitted are kept as such a check and
the options beside it: where both fit, the key need not be made.

The check belongs to torch's private interface. Where it is missing, or was seen not to tell apart
what the key does, nothing is kept and every call goes by its key.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pagedattn.given import tensor_places

if TYPE_CHECKING:
    from pagedattn.admission import Admitted

log = logging.getLogger("pagedattn")

#: Whether tensors are like those that the check was made of.
Check = Callable[..., bool]


class Shortcut(NamedTuple):
    """Arguments that were admitted, without the tensors."""

    options: tuple[Any, ...]  # see `_options`
    tensors: Callable[[Sequence[Any]], tuple[Any, ...]]  # those among arguments like these
    check: Check
    needs_no_grad: bool  # some tensor requires grad, so they were admitted with autograd off
    admitted: Admitted


class Slow:
    """How often arguments were found by their key, and the shortcut made of them."""

    __slots__ = ("shortcut", "times")

    def __init__(self) -> None:
        self.times = 0
        self.shortcut: Shortcut | None = None


# A model's layers have a few kinds of calls; with more, looking here would cost more than it saves.
_MOST = 4
_recent: list[Shortcut] = []  # the latest first


def find(a: Sequence[Any], spec: Any) -> Admitted | None:
    """What was admitted earlier for arguments with the same key, if it is among the latest."""
    (
        _, _, _, _, _, scale, out, return_lse, layout, starts, window, softcap, alibi, sinks,
        k_scale, v_scale, _, _, splits, invariant, _,
    ) = a  # fmt: skip
    for options, tensors, check, needs_no_grad, admitted in _recent:
        (
            scale_, out_, return_lse_, layout_, starts_, window_, softcap_, alibi_, sinks_,
            k_scale_, v_scale_, splits_, invariant_, spec_,
        ) = options  # fmt: skip
        # identity is quickest, and tells True, 1 and 1.0 apart; what is equal may be another object
        if (
            out.__class__ is out_
            and starts.__class__ is starts_
            and (k_scale is k_scale_ or k_scale.__class__ is k_scale_ or _same(k_scale, k_scale_))
            and (v_scale is v_scale_ or v_scale.__class__ is v_scale_ or _same(v_scale, v_scale_))
            and (window is window_ or _same(window, window_))
            and (scale is scale_ or _same(scale, scale_))
            and (softcap is softcap_ or _same(softcap, softcap_))
            and (splits is splits_ or _same(splits, splits_))
            and (layout is layout_ or _same(layout, layout_))
            and (spec is spec_ or _same(spec, spec_))
            and return_lse is return_lse_
            and invariant is invariant_
            and alibi.__class__ is alibi_
            and sinks.__class__ is sinks_
            and check(*tensors(a))
            and not (needs_no_grad and torch.is_grad_enabled())
        ):
            return admitted
    return None


_PLAIN = (float, int, str)  # not bool: its two objects are told by identity


def _same(one: Any, other: Any) -> bool:
    return one.__class__ is other.__class__ and one.__class__ in _PLAIN and one == other


def _options(a: Sequence[Any], spec: Any) -> tuple[Any, ...]:
    """Of the arguments all but the lengths' bounds; of a tensor its class."""
    (
        _, _, _, _, _, scale, out, return_lse, layout, starts, window, softcap, alibi, sinks,
        k_scale, v_scale, _, _, splits, invariant, _,
    ) = a  # fmt: skip
    scales = [s.__class__ if isinstance(s, Tensor) else s for s in (k_scale, v_scale)]
    return (
        scale, out.__class__, return_lse, layout, starts.__class__, window, softcap,
        alibi.__class__, sinks.__class__, *scales, splits, invariant, spec,
    )  # fmt: skip


def recent() -> list[Shortcut]:
    """What `remember` adds to. A reset leaves it for another: so it is asked for before what is to
    be remembered, and nothing that was found before a reset is remembered after it."""
    return _recent


def remember(
    recent: list[Shortcut], a: Sequence[Any], spec: Any, slow: Slow, admitted: Admitted
) -> None:
    """Keep a shortcut to what was found by its key.

    It is made the first, second, fourth, eighth … time: it fails in another mode of torch than it
    was made in, and where many kinds of calls push one another out, making it must not be what
    they do.
    """
    slow.times += 1
    if slow.times & (slow.times - 1) == 0:
        slow.shortcut = _shortcut(a, spec, admitted)
    if slow.shortcut is not None:
        others = [one for one in recent if one.admitted is not admitted]
        recent[:] = (slow.shortcut, *others[: _MOST - 1])


def forget() -> None:
    global _recent
    _recent = []


def _shortcut(a: Sequence[Any], spec: Any, admitted: Admitted) -> Shortcut | None:
    places = tensor_places(a)
    tensors = [a[i] for i in places]
    # what a subclass says of itself in Python is not what the check reads
    if check_of is None or any(t.__class__ not in (Tensor, torch.nn.Parameter) for t in tensors):
        return None
    needs_no_grad = any(t.requires_grad for t in tensors)
    options = _options(a, spec)
    return Shortcut(options, itemgetter(*places), check_of(*tensors), needs_no_grad, admitted)


def _of_torch(*tensors: Tensor) -> Check:
    guards = torch._C._dynamo.guards.TensorGuards(
        *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
    )
    check: Check = guards.check
    return check


def _tells_apart(check_of: Callable[..., Check]) -> bool:
    """Whether the check tells all apart that validation looks at, and nothing else."""
    t = torch.zeros(2, 1, 4, dtype=torch.float32, device="cpu")  # whatever the defaults are
    number = torch.zeros(1, dtype=torch.int32, device="cpu")
    check = check_of(t, number)
    others = [
        t[:1], t[:, 0], t.as_strided(t.shape, (4, 1, 1)), t.as_strided(t.shape, (4, 2, 1)),
        t.half(), t.to("meta"), torch.nn.Parameter(t, requires_grad=False),
        t.clone().requires_grad_(), None, 1, Tensor,
    ]  # fmt: skip
    return check(t.clone(), number.clone()) and not any(check(other, number) for other in others)


def _usable(check_of: Callable[..., Check]) -> Callable[..., Check] | None:
    try:
        with torch.inference_mode(False):
            return check_of if _tells_apart(check_of) else None
    except Exception as error:  # an interface that nobody promised may fail in any way
        log.debug("torch's check of tensors cannot be used: %r", error)
        return None


#: Makes the check of some tensors; None where calls go by their keys.
check_of = _usable(_of_torch)
