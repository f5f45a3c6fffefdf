"""The CUDA backend's place in the chain: what it needs, what it can do, and when it compiles."""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import threading
from functools import partial

from pagedattn.backends.cuda import binary_cache, compile, source
from pagedattn.backends.cuda import toolchain as toolchains
from pagedattn.backends.cuda.abi import ABI
from pagedattn.backends.cuda.binary_cache import Binary
from pagedattn.backends.cuda.partition import SHARING_ROWS, TILE_ROWS
from pagedattn.backends.cuda.spec import (
    Spec,
    check,
    spec_of,
    unsupported_reasons,
    untuned_reason,
)
from pagedattn.backends.cuda.toolchain import Toolchain
from pagedattn.backends.errors import BackendUnavailable, BuildError
from pagedattn.backends.facts import Facts
from pagedattn.backends.platform_rules import device_of
from pagedattn.backends.protocol import BuildJob, BuildOptions, Built, Problem, Runner, Writer

log = logging.getLogger("pagedattn")

_COMMAND = "pagedattn build"


class CudaBackend:
    """Compiled kernels: built by ``pagedattn build``, on CoreX at first use too.

    It keeps the facts it was last asked about, since `load` is given the problem alone and a
    child process that proves it is given the object.
    """

    name = "cuda"

    def __init__(self) -> None:
        self._facts: Facts | None = None

    def not_present_reasons(self, facts: Facts) -> list[str]:
        self._facts = facts
        reasons = [] if facts.has_gpu else ["no GPU was found"]
        if not (source.folder() / source.ENTRY).is_file():
            reasons.append("this version of pagedattn holds no CUDA kernel")
        if any(built.current for built in self.built()):
            return reasons
        if facts.compiler.path is None:
            reasons += ["no CUDA compiler was found", *facts.compiler.rejected]
        elif _never():
            reasons.append("PAGEDATTN_BUILD=never, and nothing is built yet")
        elif not _builds_at_first_use(facts):
            reasons.append(f"nothing is built yet, and here only `{_COMMAND}` compiles")
        return reasons

    def not_supported_reasons(self, problem: Problem) -> list[str]:
        reasons = unsupported_reasons(spec_of(problem))
        if problem.device_type != "cuda":
            reasons.append(f"the tensors are on a {problem.device_type.upper()}")
        if problem.query_part == "long":
            reasons.append("it is made for decode: it takes a few query tokens at a time")
        return reasons

    def step_back_reason(self, problem: Problem, facts: Facts) -> str | None:
        """On NVIDIA's devices Triton serves better what the tuned kernel does not, or reads keys
        and values for more than once. On CoreX nothing but torch would."""
        if facts.vendor != "nvidia":
            return None
        reason = _untuned_reason(problem, facts)
        if reason is None and problem.varlen_query:
            return "more rows than share a read would read keys and values again"
        return reason

    def few_queries(self, problem: Problem, facts: Facts) -> int:
        """As many as share one read of keys and values, where the tuned kernel serves `problem`.

        Tiles of rows that share it were measured on sm_90 alone. Where a token's elements lie side
        by side they pay for heads up to 128: four tokens at 24/4/256 take as long as on Triton or
        up to 5 % longer, and 16 % longer in one sequence of 1,024 tokens.
        """
        if not problem.varlen_query or problem.query_part != "all":
            return 0
        if _untuned_reason(problem, facts) is not None:
            return 0
        arch = toolchains.arch_of(facts, device_of(facts, problem.device))
        pays = problem.kv_layout == "packed" or problem.head_dim <= 128
        shared = pays and arch is not None and toolchains.tuned_for(arch) == "90"
        return (SHARING_ROWS if shared else TILE_ROWS) // problem.group

    def remedy(self, facts: Facts) -> str | None:
        if facts.has_gpu and facts.compiler.path is not None and not _builds_at_first_use(facts):
            return _COMMAND
        return None

    def load(self, problem: Problem) -> Runner:
        facts = self._known_facts()
        spec = spec_of(problem)
        check(spec)
        arch = self._arch(facts, problem)
        return self._runner(_library(self._binary(facts, spec, arch), self._abi()), problem)

    def load_writer(self, problem: Problem) -> Writer:
        """A write serves any sizes, so that any library of the right types has it."""
        from pagedattn.backends.cuda.write import CudaWriter

        facts, spec = self._known_facts(), spec_of(problem)
        arch = self._arch(facts, problem)
        kept = binary_cache.find_types(spec, source.content_hash(), self._abi(), arch)
        if kept is None:
            raise BackendUnavailable(
                f"no library is built for {spec.kv_dtype} caches under {spec.dtype} on {arch}"
            )
        return CudaWriter(_library(kept, self._abi()), problem.device)

    def build_jobs(self, facts: Facts, options: BuildOptions) -> dict[str, BuildJob]:
        specs = _specs(options)
        for spec in specs:
            check(spec)
        source.entry()
        jobs: dict[str, BuildJob] = {}
        for arch in toolchains.chosen_archs(facts, options.archs):
            toolchain = toolchains.find(facts, arch)
            for spec in specs:
                jobs[f"{spec.name} {arch}"] = partial(self._build, toolchain, spec)
        return jobs

    def built(self) -> list[Built]:
        return [self._told(binary) for binary in binary_cache.listing()]

    def _build(self, toolchain: Toolchain, spec: Spec, stop: threading.Event) -> Built:
        return self._told(compile.build(toolchain, spec, self._abi(), again=True, stop=stop))

    def _told(self, binary: Binary) -> Built:
        made = binary.made_of
        current = (made["source"], made["abi"]) == (source.content_hash(), self._abi())
        name, compiler = f"{binary.spec.name} {made['arch']}", f"{made['compiler']}"
        return Built(name, str(binary.path), compiler, binary.when, binary.seconds, current)

    def _known_facts(self) -> Facts:
        if self._facts is None:
            raise BackendUnavailable("the cuda backend was not asked whether it is present")
        return self._facts

    def _arch(self, facts: Facts, problem: Problem) -> str:
        device = device_of(facts, problem.device)
        arch = toolchains.arch_of(facts, device)
        if arch is None:
            named = device.name if device else "a device whose name is not known yet"
            raise BackendUnavailable(f"no architecture is known for {problem.device}: {named}")
        return arch

    def _binary(self, facts: Facts, spec: Spec, arch: str) -> Binary:
        """What is built already; else compiled now, where that is policy."""
        abi, line = self._abi(), f"{_COMMAND} --arch {arch} {spec.options()}"
        toolchain, broken = _toolchain(facts, arch)
        if toolchain is None:  # as in an image that was built elsewhere: whoever compiled it
            kept = binary_cache.find(spec, source.content_hash(), abi, arch)
        else:
            kept = binary_cache.lookup(compile.key_of(toolchain, spec, abi))
        if kept is not None:
            return kept
        if _builds_at_first_use(facts):
            if toolchain is None:
                raise broken or BuildError("no CUDA compiler was found")
            return _build_now(toolchain, spec, abi, line)
        why = "PAGEDATTN_BUILD=never" if _never() else "here it is not compiled at first use"
        raise BackendUnavailable(
            f"nothing is built for {spec.name} on {arch}, and {why}; to build it: {line}"
        )

    def _abi(self) -> int:
        """The number of the interface that our ctypes structure mirrors."""
        return ABI

    def _runner(self, library: ctypes.CDLL, problem: Problem) -> Runner:
        # imported here: until something is loaded the report needs none of it
        from pagedattn.backends.cuda.launch import CudaRunner

        return CudaRunner(library, problem)


def _untuned_reason(problem: Problem, facts: Facts) -> str | None:
    """Why the tuned kernel does not serve `problem` on its device; None: it does."""
    arch = toolchains.arch_of(facts, device_of(facts, problem.device))
    if arch is None or not toolchains.tuned_for(arch):
        return f"there is no tuned kernel for {arch or 'this device'}"
    spec = spec_of(problem)
    kept = binary_cache.find(spec, source.content_hash(), ABI, arch)
    if kept is not None and not toolchains.has_tuned(kept.made_of["flags"]):
        return "the library is of a CUDA before 12, which compiles no tuned kernel"
    return untuned_reason(spec, problem.kv_layout)


def _policy() -> str:
    return os.environ.get("PAGEDATTN_BUILD", "").strip().lower() or "auto"


def _never() -> bool:
    return _policy() == "never"


def _builds_at_first_use(facts: Facts) -> bool:
    """Where Triton serves, compiling waits for the command; on CoreX nothing but torch would."""
    return _policy() == "always" or (facts.vendor == "corex" and not _never())


def _toolchain(facts: Facts, arch: str) -> tuple[Toolchain | None, BuildError | None]:
    """The toolchain, or None and why. Where nothing may be compiled nothing is started either."""
    if _never() or facts.compiler.path is None:
        return None, None
    try:
        return toolchains.find(facts, arch), None
    except BuildError as error:
        return None, error


def _build_now(toolchain: Toolchain, spec: Spec, abi: int, line: str) -> Binary:
    if binary_cache.failure(compile.key_of(toolchain, spec, abi)) is None:
        log.warning(
            "compiling the CUDA kernel for %s on %s, once: half a minute or more (beforehand: %s)",
            spec.name, toolchain.arch, line,
        )  # fmt: skip
    try:
        return compile.build(toolchain, spec, abi)
    except OSError as error:
        raise BuildError(
            f"the binary cannot be kept ({error}); PAGEDATTN_CACHE_DIR names another folder"
        ) from error


def _library(binary: Binary, abi: int) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(binary.path))
        found = library.pagedattn_abi()
    except (OSError, AttributeError) as error:
        raise BackendUnavailable(
            f"{binary.path} does not load ({error}); delete {binary.path.parent} to have it "
            "compiled anew"
        ) from error
    if found != abi:
        raise BackendUnavailable(f"{binary.path} has the interface {found}, and not {abi}")
    return library


def _specs(options: BuildOptions) -> list[Spec]:
    made = itertools.product(
        options.dtypes, options.kv_dtypes or ("",), options.head_dims, options.groups,
        options.block_sizes,
    )  # fmt: skip
    return list(dict.fromkeys(Spec(q, kv or q, d, g, b) for q, kv, d, g, b in made))
