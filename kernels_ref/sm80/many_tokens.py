"""Products with experts for many tokens per expert: bound by the matrix units.

Weights are the 16-row operand of ``mma.m16n8k32`` again, and every warp owns rows of its own, so each code is
decoded once, in the registers that the matrix instruction reads: decoded weights never pass through shared
memory. The shift is folded into the decode (|value| <= 96 is INT8), so one INT32 sum runs over all of K.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels_ref.sm80.few_tokens import (
    activation_columns,
    activation_offset,
    load_shifts,
    matrix_rows,
    pairs_of_block,
    store_block,
)
from kernels_ref.sm80.int8_shift import code_offsets, load_codes, power_of_block, powers_of_blocks, signed


@triton.jit(do_not_specialize=["pairs"])
def many_kernel(
    X, X_SCALE, CODES, SHIFT2, CHANNEL_SCALE, SORTED, EXPERT_IDS, OUT, pairs, limit,
    N: tl.constexpr, K: tl.constexpr, TOPK: tl.constexpr, GATED: tl.constexpr, LIMITED: tl.constexpr,
    DIGITS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, HALVES: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Multiply the tokens of one block by ROWS rows of its expert, with SwiGLU when GATED.

    The arguments are those of `few_kernel`; SORTED is always given.
    """
    tiles: tl.constexpr = N // ROWS
    block = tl.program_id(0) // tiles
    expert = tl.load(EXPERT_IDS + block)
    if expert >= 0:
        first = tl.program_id(0) % tiles * ROWS
        rows = expert.to(tl.int64) * N + matrix_rows(first, N, ROWS, GATED)
        pair = pairs_of_block(SORTED, block, pairs, COLUMNS, DIGITS)
        # Padding reads row 0; its columns are not stored.
        x = activation_columns(X, pair, pairs, K, TOPK, DIGITS)
        codes = CODES + rows[:, None] * (K // 2) + code_offsets()[None, :]
        acc = tl.zeros((ROWS, COLUMNS), tl.int32)
        for step in tl.range(0, K // (64 * HALVES), num_stages=STAGES):
            powers = powers_of_blocks(load_shifts(SHIFT2, rows, step, K, HALVES))
            for half in tl.static_range(HALVES):
                x_at = x + activation_offset(step, half, HALVES)
                low = tl.load(x_at)
                high = tl.load(x_at + 64)
                tile = load_codes(codes + (step * HALVES + half) * 32)
                power = power_of_block(powers, half // 2, half % 2, 0)[:, None]
                acc = tl.dot(signed(tile, power, 0), low, acc, out_dtype=tl.int32)
                power = power_of_block(powers, half // 2, half % 2, 1)[:, None]
                acc = tl.dot(signed(tile, power, 1), high, acc, out_dtype=tl.int32)
        store_block(
            acc, X_SCALE, CHANNEL_SCALE, SORTED, OUT, rows, first, block, pairs, limit,
            N, TOPK, GATED, LIMITED, DIGITS,
        )  # fmt: skip
