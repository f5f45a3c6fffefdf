"""A CoreX tree in a folder, whose compiler is a real program that does what its mode says.

A child process can import this, so that what crashes or hangs there leaves the tests alive.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _platforms import bi_v100

from pagedattn.backends.cuda import toolchain as toolchains
from pagedattn.backends.cuda.backend import CudaBackend
from pagedattn.backends.cuda.toolchain import Toolchain
from pagedattn.backends.facts import Facts
from pagedattn.backends.protocol import Call, Problem, Runner
from pagedattn.backends.reference import attend
from pagedattn.probe import probe

ABI = 7
GCC = shutil.which("gcc") or shutil.which("cc")

# what a mode's library does when it is called; "zeros" is what a wrong architecture computes
LIBRARIES = {
    "good": "for (long i = 0; i < n; ++i) to[i] = from[i];",
    "zeros": "for (long i = 0; i < n; ++i) to[i] = 0;",
    "crashes": "*(volatile int *)0 = 1;",
    "hangs": "for (;;) pause();",
}
_LIBRARY = """
#include <unistd.h>
int pagedattn_abi(void) {{ return {abi}; }}
const char *pagedattn_error(int code) {{ return code ? "failed" : "no error"; }}
int pagedattn_tuned_warps(void) {{ return 0; }}
int pagedattn_clustered(const void *call) {{ (void)call; return 0; }}
int pagedattn_run(const float *from, float *to, long n) {{ {body} return 0; }}
"""
_COMPILER = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char *value_of(const char *root, const char *name, char *value) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", root, name);
    FILE *file = fopen(path, "r");
    if (!file || !fgets(value, 256, file)) strcpy(value, "");
    if (file) fclose(file);
    value[strcspn(value, "\n")] = 0;
    return value;
}

static int copy(const char *from, const char *to) {
    char block[65536];
    size_t n;
    FILE *in = fopen(from, "rb"), *out = fopen(to, "wb");
    if (!in || !out) return 1;
    while ((n = fread(block, 1, sizeof block, in)) > 0) fwrite(block, 1, n, out);
    fclose(in);
    return fclose(out);
}

int main(int count, char **words) {
    char root[4096], path[4096], mode[256], version[256], *output = 0;
    int right_arch = 0;
    ssize_t length = readlink("/proc/self/exe", root, sizeof root - 1);
    root[length < 0 ? 0 : length] = 0;
    for (int up = 0; up < 2; ++up) *strrchr(root, '/') = 0;
    value_of(root, "mode", mode);
    for (int i = 1; i < count; ++i) {
        if (!strcmp(words[i], "--version")) {
            if (!strcmp(mode, "broken")) return 127;
            printf("clang version 16.0.0 (corex %s)\n", value_of(root, "version", version));
            return 0;
        }
        if (!strcmp(words[i], "--print-targets")) {
            printf("  Registered Targets:\n    %s - of the device\n",
                   strcmp(mode, "foreign") ? "bi" : "x86");
            return 0;
        }
        if (!strcmp(words[i], "-o")) output = words[i + 1];
        if (!strcmp(words[i], "--cuda-gpu-arch=ivcore10")) right_arch = 1;
    }
    snprintf(path, sizeof path, "%s/journal", root);
    FILE *journal = fopen(path, "a");
    fprintf(journal, "compile\n");
    fclose(journal);
    if (!strcmp(mode, "slow")) { sleep(2); strcpy(mode, "good"); }
    if (!strcmp(mode, "silent")) return 0;
    if (!strcmp(mode, "stuck")) for (;;) sleep(600);
    if (!strcmp(mode, "killed")) abort();
    if (!strcmp(mode, "error")) {
        fprintf(stderr, "warning: nothing to see\nportable.cu:7:3: error: expected a ;\n");
        fprintf(stderr, "portable.cu:9:1: error: a consequence\n");
        return 1;
    }
    if (!strcmp(mode, "text")) {
        FILE *file = fopen(output, "w");
        fprintf(file, "no library at all, but some text\n");
        return fclose(file);
    }
    if (!strcmp(mode, "emulates")) {
        /* the real sources, by the host's compiler over the emulation */
        char *made[64] = {"g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-fno-gnu-unique"};
        int n = 6;
        snprintf(path, sizeof path, "-I%s", value_of(root, "emulation", version));
        made[n++] = path;
        for (int i = 1; i < count && n < 58; ++i)
            if (!strncmp(words[i], "-DPAGEDATTN_", 12) || !strncmp(words[i], "-I", 2))
                made[n++] = words[i];
        made[n++] = "-x"; made[n++] = "c++";
        for (int i = 1; i < count; ++i)
            if (strstr(words[i], ".cu")) made[n++] = words[i];
        made[n++] = "-o"; made[n++] = output;
        execvp("g++", made);
        return 127;
    }
    if (!right_arch && !strcmp(mode, "good")) strcpy(mode, "zeros");
    snprintf(path, sizeof path, "%s/made/%s.so", root, mode);
    return copy(path, output);
}
"""


def make_tree(root: Path) -> Path:
    """Put the tree at `root`; its compiler's mode is `set_mode`'s."""
    for folder in ("bin", "lib64", "made"):
        (root / folder).mkdir(parents=True)
    _compile(root / "bin" / "clang++", _COMPILER)
    (root / "bin" / "nvcc").write_text("#!/bin/sh\necho release 10.2\n")
    (root / "bin" / "nvcc").chmod(0o755)
    for mode, body in LIBRARIES.items():
        _compile(root / "made" / f"{mode}.so", _LIBRARY.format(abi=ABI, body=body), "-shared")
    _compile(root / "made" / "abi.so", _LIBRARY.format(abi=ABI + 1, body=""), "-shared")
    gone = root / "made" / "libgone.so"
    _compile(gone, "int gone(void) { return 1; }", "-shared")
    body = "return gone();"
    needs = f"int gone(void); {_LIBRARY.format(abi=ABI, body=body)}"
    _compile(root / "made" / "needs.so", needs, "-shared", f"-L{gone.parent}", "-lgone")
    gone.unlink()
    set_mode(root, "good")
    (root / "version").write_text("3.2.3")
    return root


def _compile(output: Path, text: str, *options: str) -> None:
    assert GCC is not None
    file = output.with_suffix(".c")
    file.write_text(text)
    subprocess.run(
        [GCC, "-O1", "-fPIC", str(file), "-o", str(output), *options], check=True, timeout=60
    )


def set_mode(root: Path, mode: str) -> None:
    (root / "mode").write_text(mode)


def compiled(root: Path) -> int:
    """How often the tree's compiler was asked to compile."""
    journal = root / "journal"
    return journal.read_text().count("compile") if journal.exists() else 0


def facts_of(root: Path, scratch: Path, **changes: Any) -> Facts:
    """A BI-V100 whose CoreX tree is the one at `root`."""
    facts = probe(bi_v100(**changes).sources(scratch))
    compiler = replace(facts.compiler, path=str(root / "bin/clang++"), root=str(root))
    return replace(facts, compiler=compiler, corex_root=str(root))


def toolchain_of(facts: Facts, arch: str = "ivcore10") -> Toolchain:
    return toolchains.find(facts, arch)


def emulate(root: Path) -> None:
    """From now on the compiler compiles the real sources for this CPU."""
    set_mode(root, "emulates")
    (root / "emulation").write_text(str(Path(__file__).parent / "cuda_emulation"))


class FakeRunner:
    """The reference's numbers, carried into the output by the library that was compiled."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def __call__(self, call: Call) -> None:
        attend(call)
        right = call.out.float().contiguous()
        result = torch.full_like(right, float("nan"))
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (right, result)]
        assert self.library.pagedattn_run(*pointers, ctypes.c_long(right.numel())) == 0
        call.out.copy_(result)


class CudaOnCpu(CudaBackend):
    """The CUDA backend, whose tensors lie on the CPU and whose library is the fake tree's."""

    name = "fakecuda"

    def __init__(self, facts: Facts | None = None, arch: str | None = None) -> None:
        super().__init__()
        self._facts = facts
        self.arch = arch

    def not_supported_reasons(self, problem: Problem) -> list[str]:
        return [r for r in super().not_supported_reasons(problem) if "on a CPU" not in r]

    def _arch(self, facts: Facts, problem: Problem) -> str:
        return self.arch or super()._arch(facts, replace(problem, device="cuda:0"))

    def _abi(self) -> int:
        return ABI

    def _runner(self, library: ctypes.CDLL, problem: Problem) -> Runner:
        return FakeRunner(library)


class EmulatedCuda(CudaOnCpu):
    """The same with the real kernels and their real launch."""

    name = "emulatedcuda"

    def _abi(self) -> int:
        return CudaBackend._abi(self)

    def _runner(self, library: ctypes.CDLL, problem: Problem) -> Runner:
        return CudaBackend._runner(self, library, problem)
