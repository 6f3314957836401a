"""The routed experts of one layer: alignment, two grouped products, limited SwiGLU, weighted sum.

The weights are INT8_SHIFT integers times a power of two per row, so with INT8 activations every product is
exact in integers. There are two arithmetics over the same stored codes:

* ``w4a8``: one INT8 digit per activation (`per_token_int8`).
* ``w4a16``: two INT8 digits per activation (`per_token_int16`), a 16-bit fixed-point number with a scale per
  token. Its error is far below that of BF16 products, and it costs one more column of an INT8 matrix
  instruction where BF16 would cost a longer decode of every weight.

Sizes: T tokens, k experts per token, E experts, H hidden, I intermediate of this rank. A *pair* is one
(token, expert) entry of ``topk_ids``; pair p = token * k + j.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

import torch
from torch import Tensor

from dsv4convert.formats.spec import INT8_SHIFT
from kernels_ref.arguments import FLOATS, INTEGERS, expect
from kernels_ref.quantize import per_token_int8, per_token_int16
from kernels_ref.tensors import Int8Shift

Arithmetic = Literal["auto", "w4a8", "w4a16"]

#: Weight of the digits of `quantize_activations`, by number of digits.
DIGIT_WEIGHTS = {1: (1,), 2: (256, 1)}


def align_experts(topk_ids: Tensor, block: int, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort pairs by expert and pad each expert to whole blocks: the layout of SGLang's moe_align_block_size.

    Args:
        topk_ids: [T, k] int32; entries below 0 are skipped.
        block: Pairs per block.
        experts: E.

    Returns:
        sorted_ids [P] int32, pairs in ascending order within an expert, T * k in unused places;
        expert_ids [P / block] int32, the expert of a block, -1 for unused blocks;
        total [1] int32, the used part of ``sorted_ids``, a multiple of ``block``.
        P depends on shapes only, `aligned_size`, so that a captured graph holds for every routing.

    Raises:
        ValueError: `topk_ids` does not fit, or no block or expert.
    """
    check_alignment(topk_ids, block, experts)
    pairs = topk_ids.numel()
    size = aligned_size(pairs, block, experts)
    sorted_ids = torch.full((size,), pairs, dtype=torch.int32, device=topk_ids.device)
    expert_ids = torch.full((size // block,), -1, dtype=torch.int32, device=topk_ids.device)
    start = 0
    for expert, members in pairs_of_experts(topk_ids, experts):
        end = start + -(-len(members) // block) * block
        sorted_ids[start : start + len(members)] = members.int()
        expert_ids[start // block : end // block] = expert
        start = end
    return sorted_ids, expert_ids, torch.tensor([start], dtype=torch.int32, device=topk_ids.device)


def check_alignment(topk_ids: Tensor, block: int, experts: int) -> None:
    """Refuse what `align_experts` cannot be given, with a ValueError."""
    expect("topk_ids", topk_ids, INTEGERS, (None, None))
    if block < 1 or experts < 1:
        raise ValueError(f"expected a block and experts of 1 or more, found block {block}, experts {experts}")


def aligned_size(pairs: int, block: int, experts: int) -> int:
    """Return P, the length of ``sorted_ids`` that no routing exceeds: a multiple of ``block``."""
    used = min(pairs, experts)  # experts that can own a partly filled block
    return (pairs + used * (block - 1)) // block * block


def pairs_of_experts(topk_ids: Tensor, experts: int) -> Iterator[tuple[int, Tensor]]:
    """Yield (expert, its pairs in ascending order) for every expert that has one."""
    flat = topk_ids.flatten()
    for expert in range(experts):
        members = (flat == expert).nonzero().flatten()
        if len(members):
            yield expert, members


def quantize_activations(x: Tensor, digits: int) -> tuple[Tensor, Tensor]:
    """Quantise rows to one or two INT8 digits.

    Args:
        x: [T, K] bfloat16 or float32.
        digits: 1 (`per_token_int8`) or 2 (`per_token_int16`).

    Returns:
        q [T, digits, K] int8 and s [T] float32; x is about ``s * (q * DIGIT_WEIGHTS[digits]).sum(1)``.
    """
    if digits == 2:
        return per_token_int16(x)
    q, scale = per_token_int8(x)
    return q[:, None], scale


def expert_products(q: Tensor, weight: Int8Shift, expert: int) -> Tensor:
    """Return the integer products of quantised rows with one expert's matrix, [rows, N] float64, exact.

    Args:
        q: [rows, digits, K] int8.
        weight: Stack of E matrices [N, K].
        expert: Which of them.
    """
    digit_weights = torch.tensor(DIGIT_WEIGHTS[q.shape[1]], dtype=torch.float64, device=q.device)
    rows = torch.einsum("rdk,d->rk", q.double(), digit_weights)
    matrix = Int8Shift(*(part[expert] for part in weight)).integers(q.shape[-1])
    # Below 2^53: |sum| <= 32639 * 96 * K. A float64 product of integers is exact there.
    return rows @ matrix.double().T


def grouped_gemm(q: Tensor, scale: Tensor, weight: Int8Shift, topk_ids: Tensor, rows: Tensor) -> Tensor:
    """Multiply each pair's row by the matrix of its expert.

    Args:
        q: [R, digits, K] int8 and scale [R] float32, of `quantize_activations`.
        weight: Stack of E matrices [N, K].
        topk_ids: [T, k] int32.
        rows: [T * k] int64, the row of ``q`` that a pair reads.

    Returns:
        [T * k, N] float32; rows of skipped pairs are 0.
    """
    experts, n = weight.channel_scale.shape
    out = torch.zeros(topk_ids.numel(), n, device=q.device)
    for expert, members in pairs_of_experts(topk_ids, experts):
        integers = expert_products(q[rows[members]], weight, expert).float()
        out[members] = integers * weight.channel_scale[expert] * scale[rows[members], None]
    return out


def limited_swiglu(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """Return ``silu(min(gate, limit)) * clamp(up, -limit, limit)``; None means no limit."""
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate) * up


def weighted_sum(outputs: Tensor, topk_weights: Tensor) -> Tensor:
    """Return ``sum_j topk_weights[t, j] * outputs[t * k + j]`` in float32, [T, H] bfloat16."""
    # The last size is given, not inferred: without tokens it could not be.
    by_token = outputs.view(*topk_weights.shape, outputs.shape[-1])
    return (by_token * topk_weights[..., None]).sum(1).bfloat16()


def fused_moe(
    x: Tensor,
    w13: Int8Shift,
    w2: Int8Shift,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    limit: float | None = 10.0,
    arithmetic: Arithmetic = "auto",
    out: Tensor | None = None,
) -> Tensor:
    """Apply the routed experts of a layer.

    Args:
        x: [T, H] bfloat16.
        w13: E matrices [2I, H]: rows 0..I-1 are w1 (gate), I..2I-1 are w3 (up).
        w2: E matrices [H, I].
        topk_weights: [T, k] float32; whatever factor routing applies is already in them.
        topk_ids: [T, k] int32, below E; an entry below 0 contributes nothing.
        limit: Bound of SwiGLU's inputs; None: no bound.
        arithmetic: ``w4a8`` or ``w4a16``; ``auto`` is ``w4a16`` here, and the measured choice in `sm80`.
        out: [T, H] bfloat16 to write to; may be `x`.

    Returns:
        [T, H] bfloat16.

    Raises:
        ValueError: a tensor of another shape or dtype, or an unknown arithmetic.
    """
    check_layer(x, w13, w2, topk_weights, topk_ids, arithmetic, out)
    digits = 1 if arithmetic == "w4a8" else 2
    tokens, k = topk_ids.shape
    pairs = torch.arange(tokens * k, device=x.device)
    gate_up = grouped_gemm(*quantize_activations(x, digits), w13, topk_ids, pairs // max(k, 1))
    gate, up = gate_up.chunk(2, dim=-1)
    activated = limited_swiglu(gate, up, limit).bfloat16()
    outputs = grouped_gemm(*quantize_activations(activated, digits), w2, topk_ids, pairs)
    result = weighted_sum(outputs, topk_weights)
    return result if out is None else out.copy_(result)


def check_layer(
    x: Tensor,
    w13: Int8Shift,
    w2: Int8Shift,
    topk_weights: Tensor,
    topk_ids: Tensor,
    arithmetic: str,
    out: Tensor | None,
) -> None:
    """Refuse what `fused_moe` cannot be given.

    Raises:
        ValueError: a tensor of another shape or dtype, or an unknown arithmetic.
    """
    expect("x", x, FLOATS, (None, None))
    tokens, hidden = x.shape
    expect("w13.channel_scale", w13.channel_scale, torch.float32, (None, None))
    experts, twice = w13.channel_scale.shape
    if twice % 2:
        raise ValueError(f"`w13`: expected an even number of rows, gate and up; found {twice}")
    check_matrices("w13", w13, experts, twice, hidden)
    check_matrices("w2", w2, experts, hidden, twice // 2)
    expect("topk_ids", topk_ids, INTEGERS, (tokens, None))
    expect("topk_weights", topk_weights, FLOATS, tuple(topk_ids.shape))
    if out is not None:
        expect("out", out, FLOATS, (tokens, hidden))
    if arithmetic not in get_args(Arithmetic):
        expected = ", ".join(get_args(Arithmetic))
        raise ValueError(f"`arithmetic`: expected one of {expected}; found {arithmetic!r}")


def check_matrices(name: str, weight: Int8Shift, experts: int, n: int, k: int) -> None:
    """Refuse anything but `experts` matrices [n, k], each part contiguous, with a ValueError."""
    groups = -(-k // INT8_SHIFT.group)
    for part, dtype, shape in (
        ("codes", torch.uint8, (experts, n, groups * INT8_SHIFT.group // 2)),
        ("shift2", torch.uint8, (experts, n, groups)),
        ("channel_scale", torch.float32, (experts, n)),
    ):
        expect(f"{name}.{part}", getattr(weight, part), dtype, shape, gaps="nowhere")
