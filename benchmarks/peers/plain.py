"""The experts as one would first write them in Triton: W4A8 on the official MXFP4 bytes, without a packing.

Low and high nibbles are decoded with integer operations, joined, and multiplied 32 codes at a time; each
block's product is scaled in float32. The products use the same quantisation, alignment and weighted sum as
ours; SwiGLU is a handful of torch operations between them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels_ref.moe import limited_swiglu
from kernels_ref.sm80.align import align_experts
from kernels_ref.sm80.few_tokens import reduce_kernel
from kernels_ref.sm80.quantize import quantize_rows

_TILES = {16: (64, 4), 64: (128, 8)}


def plain_moe(
    x: Tensor,
    packed: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor],
    weights: Tensor,
    ids: Tensor,
    limit: float,
) -> Tensor:
    """Run the layer.

    Args:
        x: [T, H] bfloat16.
        packed: w13 [E, 2 I, H / 2] and w2 [E, H, I / 2] uint8, the low nibble first.
        scales: [E, 2 I, H / 32] and [E, H, I / 32] uint8.
        weights, ids: [T, k].
        limit: Bound of SwiGLU's inputs.
    """
    tokens, k = ids.shape
    experts, hidden = packed[0].shape[0], x.shape[1]
    block = 16 if tokens * k <= 32 * experts else 64
    sorted_ids, expert_ids, _ = align_experts(ids, block, experts)
    gate_up = _product(*quantize_rows(x, 1), packed[0], scales[0], sorted_ids, expert_ids, ids.numel(), k)
    activated = limited_swiglu(*gate_up.float().chunk(2, 1), limit).bfloat16()
    outputs = _product(
        *quantize_rows(activated, 1), packed[1], scales[1], sorted_ids, expert_ids, ids.numel(), 1
    )
    out = torch.empty_like(x)
    reduce_kernel[(tokens, triton.cdiv(hidden, 1024))](
        outputs, weights, ids, out, N=hidden, TOPK=k, COLUMNS=1024, num_warps=4
    )
    return out


def _product(
    q: Tensor,
    scale: Tensor,
    packed: Tensor,
    scales: Tensor,
    sorted_ids: Tensor,
    expert_ids: Tensor,
    pairs: int,
    topk: int,
) -> Tensor:
    n, k = packed.shape[1], 2 * packed.shape[2]
    block = len(sorted_ids) // len(expert_ids)
    rows, warps = _TILES[block]
    out = torch.empty((pairs, n), dtype=torch.bfloat16, device=q.device)
    plain_kernel[(n // rows, len(expert_ids))](
        q, scale, packed, scales, sorted_ids, expert_ids, out, pairs,
        N=n, K=k, TOPK=topk, TOKENS=block, ROWS=rows, num_warps=warps, num_stages=4,
    )  # fmt: skip
    return out


@triton.jit
def _int8(nibble):
    """Return twice the value of E2M1 codes, int8."""
    magnitude = nibble & 7
    large = (2 + (magnitude & 1)) << ((magnitude >> 1) - 1 & 3)
    value = tl.where(magnitude < 4, magnitude, large)
    return tl.where(nibble >= 8, -value, value).to(tl.int8)


@triton.jit(do_not_specialize=["pairs"])
def plain_kernel(
    X, X_SCALE, PACKED, SCALES, SORTED, EXPERT_IDS, OUT, pairs,
    N: tl.constexpr, K: tl.constexpr, TOPK: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Multiply the tokens of one block by ROWS rows of its expert."""
    expert = tl.load(EXPERT_IDS + tl.program_id(1)).to(tl.int64)
    if expert >= 0:
        pair = tl.load(SORTED + tl.program_id(1) * TOKENS + tl.arange(0, TOKENS))
        x_row = tl.where(pair < pairs, pair, 0).to(tl.int64) // TOPK
        n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        rows = expert * N + n
        total = tl.zeros((TOKENS, ROWS), tl.float32)
        for k in range(0, K, 32):
            x = tl.load(X + x_row[:, None] * K + k + tl.arange(0, 32)[None, :])
            codes = tl.load(PACKED + rows[:, None] * (K // 2) + k // 2 + tl.arange(0, 16)[None, :]).to(
                tl.int32
            )
            weights = tl.reshape(tl.join(_int8(codes & 15), _int8(codes >> 4)), (ROWS, 32))
            exponent = tl.load(SCALES + rows * (K // 32) + k // 32).to(tl.float32) - 128.0
            product = tl.dot(x, tl.trans(weights), out_dtype=tl.int32).to(tl.float32)
            total += product * tl.exp2(exponent)[None, :]
        total *= tl.load(X_SCALE + x_row)[:, None]
        out = OUT + pair.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(out, total.to(tl.bfloat16), mask=(pair < pairs)[:, None])
