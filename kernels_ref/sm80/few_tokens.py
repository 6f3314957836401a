"""Products with experts for few tokens per expert: bound by reading weights, so by instructions per weight.

Weights are the 16-row operand of ``mma.m16n8k32``, tokens the 8 columns; one column for each INT8 digit of a
token. A weight costs less than one integer instruction:

* its sign is not decoded: two products, of ``max(v, 0)`` and of ``max(-v, 0)``, are subtracted;
* its shift is not applied: the product of a block of 32 is multiplied by ``1 << shift`` when it is added up.

Both move work from the integer units, which a decode of the full INT8 value keeps busier than the memory, to
the matrix units and multipliers, which wait for the memory anyway.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels_ref.sm80.int8_shift import (
    code_offsets,
    load_codes,
    magnitudes,
    power_of_block,
    powers_of_blocks,
)


@triton.jit
def load_shifts(SHIFT2, rows, step, K: tl.constexpr, HALVES: tl.constexpr):
    """Load the shifts of one step of each row, [rows] int32; those of its first block at bits 0..1.

    A step is HALVES halves of groups, 64 codes each: 1, 2, 4 or 8.
    """
    half = step * HALVES
    pointers = SHIFT2 + rows * (K // 128)
    if K % 512 == 0:
        # Words of four groups: copies of four bytes are the smallest that can be asynchronous.
        words = tl.load(pointers.to(tl.pointer_type(tl.int32)) + half // 8)
        return words if HALVES == 8 else words >> (half // 2 % 4 * 8 + half % 2 * 2)
    if HALVES == 4:
        return tl.load(pointers.to(tl.pointer_type(tl.int16)) + step).to(tl.int32)
    return tl.load(pointers + half // 2).to(tl.int32) >> (half % 2 * 2)


@triton.jit
def activation_offset(step, half, HALVES: tl.constexpr):
    """Return where the low codes of a half lie in a row of activations; those of the high codes are 64 on."""
    if HALVES == 1:
        return step // 2 * 128 + step % 2 * 32
    return step * (64 * HALVES) + half // 2 * 128 + half % 2 * 32


@triton.jit
def add_product(acc, tile, low, high, powers, GROUP: tl.constexpr, HALF: tl.constexpr):
    """Add the product of 64 codes per row with 64 activations per column.

    Args:
        acc: [rows, columns] int32.
        tile: [rows, 32] codes: half HALF of group GROUP of the step.
        low, high: [32, columns] int8, the activations of its low and high codes.
        powers: Of `powers_of_blocks`.
    """
    power = power_of_block(powers, GROUP, HALF, 0)[:, None]
    acc += tl.dot(magnitudes(tile, 0, 0), low, out_dtype=tl.int32) * power
    acc -= tl.dot(magnitudes(tile, 0, 1), low, out_dtype=tl.int32) * power
    power = power_of_block(powers, GROUP, HALF, 1)[:, None]
    acc += tl.dot(magnitudes(tile, 1, 0), high, out_dtype=tl.int32) * power
    acc -= tl.dot(magnitudes(tile, 1, 1), high, out_dtype=tl.int32) * power
    return acc


@triton.jit
def combine_digits(acc, DIGITS: tl.constexpr):
    """Return the float32 values of columns that hold DIGITS digits of a token each, [rows, tokens]."""
    values = acc.to(tl.float32)
    if DIGITS == 1:
        return values
    weight = tl.where(tl.arange(0, DIGITS) == 0, 256.0, 1.0)
    tokens: tl.constexpr = acc.shape[1] // DIGITS
    return tl.sum(tl.reshape(values, (acc.shape[0], tokens, DIGITS)) * weight[None, None, :], 2)


@triton.jit
def matrix_rows(first, N: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr):
    """Return the rows of a matrix that a tile of ROWS rows stands for, [ROWS] int32.

    If GATED, eight gate rows and the eight up rows that belong to them alternate: rows r and r + 8 of a
    matrix instruction's result lie in one thread. `first` counts rows of the tile.
    """
    i = tl.arange(0, ROWS)
    if GATED:
        return first // 2 + i // 16 * 8 + i % 8 + i // 8 % 2 * (N // 2)
    return first + i


@triton.jit
def gated_values(values, limit, LIMITED: tl.constexpr):
    """Apply limited SwiGLU to the rows of a gated tile, [ROWS, tokens] -> [ROWS / 2, tokens] float32."""
    tokens: tl.constexpr = values.shape[1]
    parts = tl.reshape(values, (values.shape[0] // 16, 2, 8, tokens))
    gate, up = tl.split(tl.permute(parts, (0, 2, 3, 1)))
    if LIMITED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    result = gate / (1.0 + tl.exp(-gate)) * up
    return tl.reshape(result, (values.shape[0] // 2, tokens))


@triton.jit
def pairs_of_block(SORTED, block, pairs, COLUMNS: tl.constexpr, DIGITS: tl.constexpr):
    """Return the pair of each column of a block, [COLUMNS] int32; `pairs` where there is none.

    Without SORTED a block is one pair, whose digits are the first columns.
    """
    column = tl.arange(0, COLUMNS)
    if SORTED is None:
        pair = tl.where(column < DIGITS, block, pairs)
    else:
        pair = tl.load(SORTED + block * (COLUMNS // DIGITS) + column // DIGITS)
    return pair


@triton.jit
def activation_columns(X, pair, pairs, K: tl.constexpr, TOPK: tl.constexpr, DIGITS: tl.constexpr):
    """Return pointers to the first 32 activations of each column, [32, columns]; without a pair, of row 0."""
    row = (tl.where(pair < pairs, pair, 0) // TOPK).to(tl.int64) * DIGITS
    row += tl.arange(0, pair.shape[0]) % DIGITS
    return X + row[None, :] * K + tl.arange(0, 32)[:, None]


@triton.jit
def store_block(
    acc, X_SCALE, CHANNEL_SCALE, SORTED, OUT, rows, first, block, pairs, limit,
    N: tl.constexpr, TOPK: tl.constexpr, GATED: tl.constexpr, LIMITED: tl.constexpr,
    DIGITS: tl.constexpr,
):  # fmt: skip
    """Scale the integers of a tile, apply SwiGLU when GATED, and store one row per pair."""
    tokens: tl.constexpr = acc.shape[1] // DIGITS
    pair = pairs_of_block(SORTED, block, pairs, tokens, 1)
    x_scale = tl.load(X_SCALE + tl.where(pair < pairs, pair, 0) // TOPK)
    values = combine_digits(acc, DIGITS) * tl.load(CHANNEL_SCALE + rows)[:, None] * x_scale[None, :]
    width: tl.constexpr = N // 2 if GATED else N
    if GATED:
        values = gated_values(values, limit, LIMITED)
        first = first // 2
    n = first + tl.arange(0, values.shape[0])
    out = OUT + pair.to(tl.int64)[None, :] * width + n[:, None]
    tl.store(out, values.to(OUT.dtype.element_ty), mask=(pair < pairs)[None, :])


@triton.jit(do_not_specialize=["pairs"])
def few_kernel(
    X, X_SCALE, CODES, SHIFT2, CHANNEL_SCALE, SORTED, EXPERT_IDS, OUT, pairs, limit,
    N: tl.constexpr, K: tl.constexpr, TOPK: tl.constexpr, GATED: tl.constexpr, LIMITED: tl.constexpr,
    DIGITS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, HALVES: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Multiply the tokens of one block by ROWS rows of its expert, with SwiGLU when GATED.

    Args:
        X: [*, DIGITS, K] int8; pair p reads row p // TOPK. X_SCALE [*] float32.
        CODES, SHIFT2, CHANNEL_SCALE: [E, N, K / 2], [E, N, K / 128], [E, N]; if GATED, rows n and N / 2 + n
            belong together.
        SORTED, EXPERT_IDS: Of `align_experts` with blocks of COLUMNS / DIGITS; or SORTED is None and each
            pair is a block of its own, EXPERT_IDS [pairs] then being ``topk_ids``.
        OUT: [pairs, N] bfloat16, or [pairs, N / 2] when GATED.
        HALVES: Halves of groups in a step of the loop: 1, 2, 4 or 8; K is a multiple of 64 * HALVES.
    """
    block = tl.program_id(1)
    expert = tl.load(EXPERT_IDS + block)
    if expert >= 0:
        first = tl.program_id(0) * ROWS
        rows = expert.to(tl.int64) * N + matrix_rows(first, N, ROWS, GATED)
        pair = pairs_of_block(SORTED, block, pairs, COLUMNS, DIGITS)
        valid = (pair < pairs)[None, :]
        x = activation_columns(X, pair, pairs, K, TOPK, DIGITS)
        codes = CODES + rows[:, None] * (K // 2) + code_offsets()[None, :]
        acc = tl.zeros((ROWS, COLUMNS), tl.int32)
        for step in tl.range(0, K // (64 * HALVES), num_stages=STAGES):
            powers = powers_of_blocks(load_shifts(SHIFT2, rows, step, K, HALVES))
            for half in tl.static_range(HALVES):
                x_at = x + activation_offset(step, half, HALVES)
                low = tl.load(x_at, mask=valid, other=0)
                high = tl.load(x_at + 64, mask=valid, other=0)
                tile = load_codes(codes + (step * HALVES + half) * 32)
                acc = add_product(acc, tile, low, high, powers, half // 2, half % 2)
        store_block(
            acc, X_SCALE, CHANNEL_SCALE, SORTED, OUT, rows, first, block, pairs, limit,
            N, TOPK, GATED, LIMITED, DIGITS,
        )  # fmt: skip


@triton.jit
def reduce_kernel(
    OUTPUTS, TOPK_WEIGHTS, TOPK_IDS, OUT, N: tl.constexpr, TOPK: tl.constexpr, COLUMNS: tl.constexpr
):
    """Add up the outputs [T * TOPK, N] of each token's pairs with their weights, OUT [T, N] bfloat16."""
    token = tl.program_id(0)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for j in tl.static_range(TOPK):
        pair = token * TOPK + j
        wanted = (tl.load(TOPK_IDS + pair) >= 0) & (n < N)
        outputs = tl.load(OUTPUTS + pair.to(tl.int64) * N + n, mask=wanted, other=0.0)
        total += tl.load(TOPK_WEIGHTS + pair) * outputs.to(tl.float32)
    tl.store(OUT + token.to(tl.int64) * N + n, total.to(OUT.dtype.element_ty), mask=n < N)
