"""Faults of resolving and compiling: once for each value, or a graph that breaks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _judge import assert_right
from _places import Place, every_place
from _scene import Paged, Result, Scene, make_scene, run
from torch import Tensor

import pagedattn
from pagedattn import chain

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
needs_compile = pytest.mark.skipif(
    TORCH < (2, 4),
    reason="torch.compile of 2.1 to 2.3 cannot hold an operator that writes its arguments here",
)


@pytest.fixture(autouse=True)
def _traceable(nan_in_new_memory: pytest.MonkeyPatch) -> None:
    nan_in_new_memory.undo()


@every_place
def test_case_22_lengths_batches_and_caches_resolve_nothing_anew(place: Place) -> None:
    """One binding for all lengths, batch sizes, table widths and cache sizes, hints included."""
    chain.reset()
    for length in (1, 16, 17):
        for batch in (1, 16, 17):
            scene = make_scene([length] * batch)
            for spare in (1, 16, 17):
                paged = scene.page(spare=spare, columns=2 + spare, device=place.device)
                run(scene, place, paged=paged, max_seq_len=length)
    assert len(chain.bindings()) == 1
    assert chain.bindings()[0].calls == 27


@every_place
def test_case_22_values_of_numbers_resolve_nothing_anew(place: Place) -> None:
    chain.reset()
    for i in range(1, 4):
        scene = make_scene(
            [20], window=i, softcap=float(i), scale=1.0 / i, k_scale=0.5 * i, v_scale=1.0 + i
        )
        run(scene, place, num_splits=i)
    assert len(chain.bindings()) == 1


def _compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    torch._dynamo.reset()
    compiled: Callable[..., Any] = torch.compile(function, fullgraph=True, backend=backend)
    return compiled


def _call(place: Place, paged: Paged, **options: Any) -> Callable[[Tensor], Any]:
    given: dict[str, Any] = {**vars(paged), "backend": place.backend, **options}

    def layer(query: Tensor) -> Any:
        return pagedattn.paged_attention(query * 1.0, **given)

    return layer


@needs_compile
@every_place
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("query_lens", [None, [3, 5]], ids=["decode", "chunks"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles
def test_case_23_compile_holds_the_call_in_one_graph(
    place: Place, compiler: str, query_lens: list[int] | None
) -> None:
    scene = make_scene(
        [17, 40],
        query_lens=query_lens,
        window=20,
        sinks=torch.randn(6),
        k_scale=0.5,
        v_scale=torch.tensor([2.0, 3.0]),
    )
    paged = scene.page("packed", device=place.device)
    options: dict[str, Any] = {
        name: t.to(place.device) if isinstance(t, Tensor) else t
        for name, t in scene.features.items()
    }
    if query_lens is not None:
        options["query_start_loc"] = torch.tensor(scene.starts, dtype=torch.int32).to(place.device)
    layer = _compiled(_call(place, paged, return_lse=True, **options), compiler)
    out, lse = layer(scene.query.to(place.device))
    assert_right(Result(out.cpu(), lse.cpu()), scene)


@needs_compile
@every_place
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_case_23_compile_may_write_into_out_and_into_the_cache(place: Place) -> None:
    """A step as an engine has it: write the new token, then attend to it."""
    scene = make_scene([17, 40])
    paged = scene.page("NHD", device=place.device)
    for t in (paged.key_cache, paged.value_cache):
        for row, length in enumerate(scene.lengths):
            block = int(paged.block_tables[row, (length - 1) // 16])
            t[block, (length - 1) % 16] = math.nan
    slots = torch.tensor(
        [
            int(paged.block_tables[row, (length - 1) // 16]) * 16 + (length - 1) % 16
            for row, length in enumerate(scene.lengths)
        ],
        device=place.device,
    )

    def step(query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> Tensor:
        pagedattn.write_kv(key, value, paged.key_cache, paged.value_cache, slots, kv_layout="NHD")
        return pagedattn.paged_attention(
            query,
            paged.key_cache,
            paged.value_cache,
            paged.block_tables,
            paged.seq_lens,
            kv_layout="NHD",
            out=out,
            backend=place.backend,
        )

    out = torch.full_like(scene.query, math.nan, device=place.device)
    newest = [torch.stack([t[-1] for t in side]) for side in (scene.keys, scene.values)]
    key, value = (t.to(place.device) for t in newest)
    result = _compiled(step, "aot_eager")(scene.query.to(place.device), key, value, out)
    lse = run(scene, place, paged=paged).lse
    assert torch.equal(result, out)
    assert_right(Result(out.cpu(), lse), scene)


@needs_compile
@every_place
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_case_22_compile_stays_at_few_graphs_over_lengths_and_batches(place: Place) -> None:
    """Lengths are data; a changing batch becomes one dynamic graph."""
    graphs = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def layer(query: Tensor, k: Tensor, v: Tensor, tables: Tensor, lens: Tensor) -> Tensor:
        return pagedattn.paged_attention(
            query, k, v, tables, lens, kv_layout="NHD", backend=place.backend
        )

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=count, dynamic=True)
    for batch in (2, 16, 17):
        for length in (1, 16, 17, 33):
            scene: Scene = make_scene([length] * batch)
            paged = scene.page(columns=4, device=place.device)
            given = list(vars(paged).values())[:4]
            compiled(scene.query.to(place.device), *given)
    assert len(graphs) <= 2


@needs_compile
@every_place
@pytest.mark.parametrize("lse", [False, True], ids=["", "lse"])
def test_case_23_opcheck_of_attention(place: Place, lse: bool) -> None:
    scene = make_scene([17, 40], dtype=torch.float16)
    paged = scene.page("packed", device=place.device)
    query = scene.query.to(place.device)
    out = torch.zeros_like(query)
    sums = torch.zeros(query.shape[:2], device=place.device) if lse else None
    _opcheck(
        torch.ops.pagedattn.attend.default,
        (
            query, paged.key_cache, paged.value_cache, paged.block_tables, paged.seq_lens, None,
            out, sums, "packed", None, 7, None, None, None, 0.5, None, None,
            torch.ones(2, device=place.device), 40, None, None, False, place.backend,
        ),
    )  # fmt: skip


@needs_compile
def test_case_23_opcheck_of_the_write() -> None:
    paged = make_scene([17, 40]).page("packed", poison=0.0)
    new = torch.randn(3, 2, 64), torch.randn(3, 2, 64)
    slots = torch.tensor([20, -1, 3])
    _opcheck(
        torch.ops.pagedattn.write_kv.default,
        (*new, paged.key_cache, paged.value_cache, slots, "packed", None, None, 0.5, None),
    )


def _opcheck(operator: Any, arguments: tuple[Any, ...]) -> None:
    with warnings.catch_warnings():  # torch's own, from its tracing
        warnings.simplefilter("ignore")
        results = torch.library.opcheck(operator, arguments)
    assert set(results.values()) == {"SUCCESS"}
