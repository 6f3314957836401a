"""Quantisation of activations to INT8 digits, one row per block.

The same results as `kernels_ref.quantize`, bit by bit: the division is rounded to nearest, and so are halves
to even.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels_ref.arguments import FLOATS, expect

# Adding it rounds a float32 below 2^22 to an integer, halves to even.
_ROUND: tl.constexpr = tl.constexpr(12582912.0)


def per_token_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows to INT8: the function of the same name in `kernels_ref.quantize`.

    Args:
        x: [T, K] bfloat16 or float32, contiguous; K a multiple of 16.

    Returns:
        q [T, K] int8 and s [T] float32.
    """
    q, scale = quantize_rows(x, 1)
    return q[:, 0], scale


def per_token_int16(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows to two INT8 digits: the function of the same name in `kernels_ref.quantize`.

    Args:
        x: [T, K] bfloat16 or float32, contiguous; K a multiple of 16.

    Returns:
        digits [T, 2, K] int8 and s [T] float32.
    """
    return quantize_rows(x, 2)


def quantize_rows(x: Tensor, digits: int, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantise rows to one or two digits.

    Args:
        x: [T, K] bfloat16 or float32, contiguous.
        digits: 1 or 2.
        ids: [T] int32 or None; rows whose entry is below 0 are not read and stay undefined.

    Returns:
        q [T, digits, K] int8 and s [T] float32.

    Raises:
        ValueError: `x` is something else.
    """
    expect("x", x, FLOATS, (None, None), gaps="nowhere")
    rows, k = x.shape
    if not k:
        raise ValueError(f"`x`: expected rows of 1 value or more; found {list(x.shape)}")
    q = torch.empty((rows, digits, k), dtype=torch.int8, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        launch_quantize(x, q, scale, ids)
    return q, scale


def launch_quantize(x: Tensor, q: Tensor, scale: Tensor, ids: Tensor | None) -> None:
    """Launch the kernel of `quantize_rows` on given outputs."""
    rows, digits, k = q.shape
    block = triton.next_power_of_2(k)
    quantize_kernel[(rows,)](x, q, scale, ids, K=k, DIGITS=digits, BLOCK=block, num_warps=warps_of_row(k))


def warps_of_row(k: int) -> int:
    """Return the warps for a row of k values: 16 values a thread, two loads of 16 bytes."""
    return min(8, max(1, triton.next_power_of_2(k) // 512))


@triton.jit
def quantize_kernel(X, Q, S, IDS, K: tl.constexpr, DIGITS: tl.constexpr, BLOCK: tl.constexpr):
    """Quantise row ``program_id(0)``; see `quantize_rows`."""
    row = tl.program_id(0).to(tl.int64)
    wanted = IDS is None or tl.load(IDS + row) >= 0
    if wanted:
        quantize_row(X + row * K, Q + row * DIGITS * K, S + row, K, DIGITS, BLOCK)


@triton.jit
def quantize_row(X, Q, S, K: tl.constexpr, DIGITS: tl.constexpr, BLOCK: tl.constexpr):
    """Quantise the K values at X to DIGITS rows at Q and the scale at S."""
    at = tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < K, other=0.0).to(tl.float32)
    largest: tl.constexpr = 127.0 if DIGITS == 1 else 32639.0
    amax = tl.max(tl.abs(x), 0)
    scale = tl.where(amax > 0, tl.div_rn(amax, largest), 1.0)
    rounded = (tl.div_rn(x, scale) + _ROUND) - _ROUND
    q = tl.clamp(rounded, -largest, largest).to(tl.int32)
    if DIGITS == 1:
        tl.store(Q + at, q.to(tl.int8), mask=at < K)
    else:
        high = (q + 128) >> 8
        tl.store(Q + at, high.to(tl.int8), mask=at < K)
        tl.store(Q + K + at, (q - high * 256).to(tl.int8), mask=at < K)
    tl.store(S, scale)
