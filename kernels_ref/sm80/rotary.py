"""What the stores and the query quantiser do to a row in registers: rotary embedding, Hadamard, INT8."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def apply_rotary(x, FREQS, position, R: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr):
    """Rotate the last ROPE dims of rows.

    Args:
        x: [R, D] float32.
        FREQS: float32 table of `kernels_ref.rotary.rotary_table`, ROPE values a position.
        position: [R] or [1] int64.
    """
    pair = tl.arange(0, D // 2)
    turned = pair >= (D - ROPE) // 2
    at = FREQS + position[:, None] * ROPE + 2 * (pair - (D - ROPE) // 2)[None, :]
    # The dims before are turned by nothing: cosine 1, sine 0.
    cos = tl.load(at, mask=turned[None, :], other=1.0)
    sin = tl.load(at + 1, mask=turned[None, :], other=0.0)
    even, odd = tl.split(tl.reshape(x, [R, D // 2, 2]))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), [R, D])


@triton.jit
def hadamard(x, R: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr):
    """Multiply rows [R, D] float32 by the orthonormal Hadamard matrix, D = 2^BITS.

    The butterflies come in the order of the reference, so that the sums are the same float32 numbers.
    """
    for bit in tl.static_range(BITS):
        pairs = tl.permute(tl.reshape(x, [R, D >> (bit + 1), 2, 1 << bit]), [0, 1, 3, 2])
        a, b = tl.split(pairs)
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), [0, 1, 3, 2]), [R, D])
    return x * (D**-0.5)


@triton.jit
def index_int8(x):
    """Quantise rows [R, D] float32: int8 codes, and scales [R], max|row| / 127 max|row| at least 1e-8."""
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), 1), 1e-8), 127.0)
    codes = tl.div_rn(x, tl.expand_dims(scale, 1))
    # Adding 1.5 * 2^23 leaves no bits for a fraction: this rounds to nearest, halves to even.
    return ((codes + 12582912.0) - 12582912.0).to(tl.int8), scale
