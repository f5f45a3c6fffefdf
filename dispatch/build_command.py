"""``pagedattn build``: compile before the first call, as when an image is built."""

from __future__ import annotations

import argparse
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from pagedattn import registry
from pagedattn.backends.errors import BackendUnavailable, BuildError
from pagedattn.backends.protocol import Buildable, BuildJob, BuildOptions, Built
from pagedattn.console import Steps, make_console, print_field, print_text
from pagedattn.probe import facts as probe_facts

#: Binaries compiled at once; each compiler takes about 1 GB of memory.
MOST_JOBS = 8


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options; each list may be given as several words or with commas."""
    default = BuildOptions()

    def listed(option: str, kind: Callable[[str], object], shown: object, help: str) -> None:
        parser.add_argument(
            option, type=kind, nargs="+", action="extend", metavar=option[2:].upper(),
            help=help + (f" (default {shown})" if shown else ""),
        )  # fmt: skip

    listed("--arch", _words, None, "sm_90, ivcore10, …; needed where no GPU is in sight")
    listed("--dtype", _words, default.dtypes[0], "of the query: fp16, bf16, fp32")
    listed("--kv-dtype", _words, "the query's", "or int8, fp8_e4m3, fp8_e5m2")
    listed("--head-dim", _numbers, default.head_dims[0], "size of a head")
    listed("--group", _numbers, default.groups[0], "query heads per KV head")
    listed("--block-size", _numbers, default.block_sizes[0], "tokens in a cache block")
    parser.add_argument("--jobs", type=_count, help="compile so many at once")
    parser.add_argument("--list", action="store_true", help="only say what is built")
    parser.add_argument("--backend", default="cuda", help="whose kernels (default cuda)")


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _numbers(text: str) -> list[int]:
    return [_count(word) for word in _words(text)]


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def options_of(arguments: argparse.Namespace) -> BuildOptions:
    """The lists that were given, flat; the defaults for the others."""
    given = {
        "archs": arguments.arch,
        "dtypes": arguments.dtype,
        "kv_dtypes": arguments.kv_dtype,
        "head_dims": arguments.head_dim,
        "groups": arguments.group,
        "block_sizes": arguments.block_size,
    }
    flat = {k: tuple(one for some in v for one in some) for k, v in given.items() if v}
    return BuildOptions(**flat)


def run(arguments: argparse.Namespace) -> int:
    """Build what is asked for and list it; the exit code is 1 if anything failed.

    Raises
    ------
    BackendUnavailable
        If the backend is not one that is compiled.
    BuildError
        If nothing could be started: no compiler, or no architecture named and none in sight.
    """
    backend = registry.get(arguments.backend)
    if not isinstance(backend, Buildable):
        raise BackendUnavailable(f"the backend {backend.name} has nothing to build")
    if arguments.list:
        _show(backend.built(), "nothing is built")
        return 0
    jobs = backend.build_jobs(probe_facts(), options_of(arguments))
    made, failed = compile_all(jobs, arguments.jobs or min(MOST_JOBS, os.cpu_count() or 1))
    _show(made, "nothing was built")
    for name, error in failed.items():
        print_field(make_console(), "failed", f"{name}\n{error}", indent=8, style="red")
    return 1 if failed else 0


def compile_all(
    jobs: dict[str, BuildJob], at_once: int
) -> tuple[list[Built], dict[str, Exception]]:
    """Run `jobs`, some at once, under a progress bar. What one raises stops no other."""
    made: dict[str, Built] = {}
    failed: dict[str, Exception] = {}
    steps = Steps(make_console())
    stop = threading.Event()
    with (
        steps.step(f"compiling {len(jobs)}", len(jobs)) as advance,
        ThreadPoolExecutor(at_once) as pool,
    ):
        running = {pool.submit(job, stop): name for name, job in jobs.items()}
        try:
            for done in as_completed(running):
                name = running[done]
                try:
                    made[name] = done.result()
                except (BuildError, OSError) as error:
                    failed[name] = error
                advance(1)
        except BaseException:  # the compilers are in sessions of their own, where no ^C comes
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [made[name] for name in jobs if name in made], failed


def _show(binaries: Sequence[Built], otherwise: str) -> None:
    console = make_console()
    for built in binaries:
        aged = "" if built.current else "; of other sources, so never loaded"
        print_text(console, (built.name, "bold"), f"  {built.seconds:.1f} s, {built.when}{aged}")
        print_field(console, "", f"{built.path}\nby {built.compiler}", indent=2)
    if not binaries:
        print_text(console, otherwise)
