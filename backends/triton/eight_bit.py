"""Eight-bit caches read as 16-bit words, whose low and high bytes are converted apart.

Triton brings a tile to the tensor cores by way of shared memory. Of 16-bit elements the
hardware's matrix loads serve it; of bytes that lie across what they serve, each goes alone. Two
tiles of words' halves also convert two elements in an instruction.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

#: whether the installed Triton has what this takes (3.0 and later)
AVAILABLE = hasattr(tl, "join")

# The interpreter has no assembly. A jitted function reads only globals that are constexpr.
ASSEMBLY = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")

# Each takes two words in a register and gives two fp16. Bytes b0 to b3 become (b0, b2) for the
# low half and (b1, b3) for the high one.
_APART = "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $1, 0, 0x3120; mov.b32 {a, b}, t; "
LOW_E4M3 = tl.constexpr(_APART + "cvt.rn.f16x2.e4m3x2 $0, a; }")
HIGH_E4M3 = tl.constexpr(_APART + "cvt.rn.f16x2.e4m3x2 $0, b; }")
# e5m2 is the upper byte of an fp16
LOW_E5M2 = tl.constexpr("prmt.b32 $0, $1, 0, 0x2404;")
HIGH_E5M2 = tl.constexpr("prmt.b32 $0, $1, 0, 0x3414;")
# with its sign bit turned an int8 counts from −128; under the byte 0x64 it is an fp16 above 1024
_FROM_1152 = "sub.rn.f16x2 $0, t, u; }"
_INT8 = (
    "{{ .reg .b32 t, u; xor.b32 t, $1, 0x80808080; prmt.b32 t, t, 0x64646464, {}; "
    "mov.b32 u, 0x64806480; "
)
LOW_INT8 = tl.constexpr(_INT8.format("0x4240") + _FROM_1152)
HIGH_INT8 = tl.constexpr(_INT8.format("0x4341") + _FROM_1152)


@triton.jit
def half_of_words(words, HIGH: tl.constexpr, KV_TYPE: tl.constexpr):
    """The low or the high bytes of int16 `words`, elements of KV_TYPE, in fp16: all exact."""
    if ASSEMBLY:
        if tl.float8e4nv == KV_TYPE:
            half = tl.inline_asm_elementwise(
                HIGH_E4M3 if HIGH else LOW_E4M3,
                "=r,r",
                [words],
                dtype=tl.float16,
                is_pure=True,
                pack=2,
            )
        elif tl.float8e5 == KV_TYPE:
            half = tl.inline_asm_elementwise(
                HIGH_E5M2 if HIGH else LOW_E5M2,
                "=r,r",
                [words],
                dtype=tl.float16,
                is_pure=True,
                pack=2,
            )
        else:
            half = tl.inline_asm_elementwise(
                HIGH_INT8 if HIGH else LOW_INT8,
                "=r,r",
                [words],
                dtype=tl.float16,
                is_pure=True,
                pack=2,
            )
    else:
        byte = ((words >> 8) if HIGH else words) & 0xFF
        half = byte.to(tl.uint8).to(KV_TYPE, bitcast=True).to(tl.float16)
    return half


# Triton looks up every name of a function, also in branches not taken, so one that an older one
# lacks stands in a function that it never sees.
if AVAILABLE:

    @triton.jit
    def interleave(even, odd, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
        """``[ROWS, COLUMNS]`` of its even and its odd columns."""
        return tl.reshape(tl.join(even, odd), (ROWS, COLUMNS))
else:
    interleave = tl.debug_barrier
