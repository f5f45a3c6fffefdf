"""What importing pagedattn may need, cost and do; each case in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# A call small enough to be quick: one sequence of 4 tokens in one block (weights of 1/4 are exact).
ONE_CALL = """
import torch
from pagedattn import paged_attention
key = torch.ones(1, 1, 16 // 4, 16, 4)
value = torch.full((1, 1, 16, 16), 2.0)
table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
out = paged_attention(torch.ones(1, 2, 16), key, value, table, lens)
assert torch.equal(out, torch.full((1, 2, 16), 2.0)), out
"""

BLOCK = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)
sys.meta_path.insert(0, Blocker())
"""


def run_python(
    code: str, remove: tuple[str, ...] = (), timeout: float = 120, **environ: str
) -> str:
    """Run `code` in a fresh interpreter that finds what this one finds; its output."""
    env = {k: v for k, v in os.environ.items() if k not in remove and "PAGEDATTN" not in k}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**env, **environ},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_and_call_without_triton(tmp_path: Path) -> None:
    run_python(BLOCK.format(names=["triton"]) + ONE_CALL, PAGEDATTN_CACHE_DIR=str(tmp_path))


def test_import_with_torch_alone() -> None:
    # the other dependencies serve the commands, the build and the verdicts on disk
    names = ["triton", "rich", "filelock", "platformdirs", "ninja", "packaging", "numpy"]
    run_python("import torch\n" + BLOCK.format(names=names) + "import pagedattn")


NO_HOME_VARIABLES = ("HOME", "USERPROFILE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")
# a container's user often has no entry in the password file
NO_PASSWORD_ENTRY = """
import pwd
def missing(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")
pwd.getpwuid = missing
"""


def test_import_and_call_without_a_home(tmp_path: Path) -> None:
    code = f"import os; os.chdir({str(tmp_path)!r})\n" + NO_PASSWORD_ENTRY + ONE_CALL
    run_python(code, remove=NO_HOME_VARIABLES)


def test_import_and_call_with_a_home_that_is_gone(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")
    run_python(ONE_CALL, remove=NO_HOME_VARIABLES, HOME=str(occupied / "home"))


@pytest.mark.parametrize("kind", ["read-only folder", "below a file", "below /proc"])
def test_import_and_call_with_a_cache_that_cannot_be_written(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    if kind == "read-only folder":  # root may write here all the same
        folder.mkdir(mode=0o555)
    elif kind == "below a file":
        folder.write_text("")
        folder = folder / "below"
    else:
        folder = Path("/proc/pagedattn")
    run_python(ONE_CALL, PAGEDATTN_CACHE_DIR=str(folder))


# Each child is forked from a process that has torch and imports pagedattn afresh. It counts the
# processor's time, which a busy machine stretches less than the clock's.
IMPORT_TIMES = """
import os, time, torch
for _ in range(7):
    read, write = os.pipe()
    if os.fork() == 0:
        start = time.process_time()
        import pagedattn
        os.write(write, str(time.process_time() - start).encode())
        os._exit(0)
    os.wait()
    print(os.read(read, 64).decode())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_import_time_beyond_torchs_own() -> None:
    uncached = ("PYTHONDONTWRITEBYTECODE",)  # an installed package has its bytecode
    run_python("import pagedattn", remove=uncached)
    seconds = sorted(float(line) for line in run_python(IMPORT_TIMES, remove=uncached).split())
    # the contract is 30 ms (benchmarks/import_time.py measures it by the clock)
    assert seconds[len(seconds) // 2] <= 0.060


WATCH = """
import sys, torch
WATCHED = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork",
           "os.forkpty", "socket.connect", "ctypes.dlopen")
seen = []
def hook(event, arguments):
    if event in WATCHED:
        seen.append((event, str(arguments[:1])))
    elif event == "import" and arguments[0].partition(".")[0] in ("triton", "pynvml"):
        seen.append((event, arguments[0]))
sys.addaudithook(hook)
def watch(module, name):
    original = getattr(module, name, None)
    def wrapper(*args, **kwargs):
        seen.append(("cuda", name))
        if original is not None:
            return original(*args, **kwargs)
    setattr(module, name, wrapper)
for name in ("is_available", "device_count", "_lazy_init", "init", "current_device",
             "get_device_properties", "get_device_capability", "get_device_name"):
    watch(torch.cuda, name)
for name in ("_cuda_getDeviceCount", "_cuda_init"):
    watch(torch._C, name)
"""


def test_import_starts_no_process_and_no_cuda() -> None:
    run_python(WATCH + "import pagedattn\nassert seen == [], seen")


def test_probe_starts_no_process_and_no_cuda() -> None:
    code = """
from pagedattn.probe import facts
facts()
started = [event for event in seen if event[0] != "ctypes.dlopen"]
assert started == [], started
assert "triton" not in sys.modules
"""
    run_python(WATCH + code)


FORK = """
import os, signal, sys, torch, pagedattn
from pagedattn.probe import facts
{before}
child = os.fork()
if child == 0:
    signal.alarm(60)  # a deadlock ends the child, and with it the test
    {inside}
    os._exit(0)
_, status = os.waitpid(child, 0)
sys.exit(os.waitstatus_to_exitcode(status) != 0)
"""
ON_CPU = "assert float((torch.ones(256, 256) @ torch.ones(256, 256)).sum()) == 256.0**3"
ON_GPU = "assert float((torch.ones(256, 256, device='cuda') * 2).sum()) == 2 * 256.0**2"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("before", ["", "facts()"], ids=["import", "probe"])
def test_forked_child_can_use_torch(before: str) -> None:
    run_python(FORK.format(before=before, inside=ON_CPU))


@pytest.mark.gpu
@pytest.mark.parametrize("before", ["", "facts()"], ids=["import", "probe"])
def test_forked_child_can_use_the_gpu(before: str) -> None:
    run_python(FORK.format(before=before, inside=ON_GPU))
