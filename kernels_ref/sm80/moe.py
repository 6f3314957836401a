"""The routed experts of one layer on SM80; the functions of the same names in `kernels_ref.moe`.

Nothing here waits for the GPU, every grid depends on shapes alone, and no buffer is cleared, so a call can be
captured in a CUDA graph and replayed with another routing.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from kernels_ref.arguments import expect
from kernels_ref.moe import Arithmetic, check_layer
from kernels_ref.sm80.align import align_experts
from kernels_ref.sm80.few_tokens import few_kernel, reduce_kernel
from kernels_ref.sm80.many_tokens import many_kernel
from kernels_ref.sm80.quantize import quantize_rows
from kernels_ref.sm80.tiles import Plan, Tile, choose
from kernels_ref.tensors import Int8Shift

__all__ = ["align_experts", "fused_moe", "grouped_gemm", "warm_up"]

_REDUCE_COLUMNS = 1024
_KERNELS = {"few": few_kernel, "many": many_kernel}


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
    plan: Plan | None = None,
) -> Tensor:
    """Apply the routed experts of a layer.

    Args:
        x: [T, H] bfloat16; H and I multiples of 128.
        w13: E matrices [2I, H]: rows 0..I-1 are w1 (gate), I..2I-1 are w3 (up).
        w2: E matrices [H, I].
        topk_weights: [T, k] float32; whatever factor routing applies is already in them.
        topk_ids: [T, k] int32, below E (nothing checks that: it would wait for the GPU); an entry below 0
            contributes nothing.
        limit: Bound of SwiGLU's inputs; None: no bound.
        arithmetic: ``w4a8``, ``w4a16``, or ``auto``: what the table says for this number of tokens.
        out: [T, H] bfloat16 to write to, contiguous; may be `x`.
        plan: Arithmetic and tiles to use; by default those of the table.

    Returns:
        [T, H] bfloat16.

    Raises:
        ValueError: a tensor of another shape, dtype or layout, an unknown arithmetic, or a size that is no
            multiple of what a tile needs.
    """
    check_layer(x, w13, w2, topk_weights, topk_ids, arithmetic, out)
    tokens, hidden = x.shape
    intermediate = w13.channel_scale.shape[1] // 2
    for name, size in (("H", hidden), ("I", intermediate)):
        if size % 128:
            raise ValueError(f"{name}: expected a multiple of 128, the group of INT8_SHIFT; found {size}")
    if out is None:
        # Not `empty_like`, which would keep the strides of a transposed `x`.
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    expect("out", out, x.dtype, (tokens, hidden), gaps="nowhere")
    if not tokens:
        return out
    plan = choose(tokens, intermediate, arithmetic) if plan is None else plan
    digits = 1 if plan.arithmetic == "w4a8" else 2
    ids = topk_ids.to(torch.int32).contiguous()
    weights = topk_weights.contiguous()
    k, pairs, experts = ids.shape[1], ids.numel(), w13.channel_scale.shape[0]
    if plan.columns:
        block = plan.columns // digits
        sorted_ids, expert_ids, _ = align_experts(ids, block, experts)
    else:
        sorted_ids, expert_ids = None, ids
    q, scale = quantize_rows(x.contiguous(), digits)
    activated = torch.empty((pairs, intermediate), dtype=x.dtype, device=x.device)
    grouped_gemm(
        q,
        scale,
        w13,
        sorted_ids,
        expert_ids,
        activated,
        plan.w13,
        k,
        columns=plan.columns,
        limit=limit,
        gated=True,
    )
    q, scale = quantize_rows(activated, digits, ids)
    outputs = torch.empty((pairs, hidden), dtype=x.dtype, device=x.device)
    grouped_gemm(q, scale, w2, sorted_ids, expert_ids, outputs, plan.w2, 1, columns=plan.columns)
    reduce_kernel[(tokens, triton.cdiv(hidden, _REDUCE_COLUMNS))](
        outputs, weights, ids, out, N=hidden, TOPK=k, COLUMNS=_REDUCE_COLUMNS, num_warps=4
    )
    return out


def grouped_gemm(
    q: Tensor,
    scale: Tensor,
    weight: Int8Shift,
    sorted_ids: Tensor | None,
    expert_ids: Tensor,
    out: Tensor,
    tile: Tile,
    topk: int,
    *,
    columns: int,
    gated: bool = False,
    limit: float | None = None,
) -> None:
    """Multiply each pair's row by the matrix of its expert, with SwiGLU when gated.

    Args:
        q: [R, digits, K] int8 and scale [R] float32; pair p reads row p // topk.
        weight: Stack of E matrices [N, K].
        sorted_ids, expert_ids: Of `align_experts`, or None and the pairs' experts.
        out: [T * k, N] bfloat16 or float32, [T * k, N / 2] when gated; skipped pairs write nothing.
        tile: Kernel and tile.
        topk: Pairs per row of `q`.
        columns: Columns of the tile, 0 without alignment.
        gated: Rows n and N / 2 + n of a matrix are gate and up.
        limit: Bound of SwiGLU's inputs.
    """
    n = weight.channel_scale.shape[1]
    constants = _constants(n, q.shape[2], tile, topk, columns, q.shape[1], gated, limit is not None)
    arguments = (q, scale, *weight, sorted_ids, expert_ids, out, out.shape[0], limit or 0.0)
    tiles, blocks = n // constants["ROWS"], expert_ids.numel()
    grid = (tiles * blocks,) if tile.kernel == "many" else (tiles, blocks)
    _KERNELS[tile.kernel][grid](*arguments, **constants)


def warm_up(n: int, k: int, tile: Tile, topk: int, columns: int, digits: int, gated: bool) -> None:
    """Compile what `grouped_gemm` launches for matrices [n, k], with limited SwiGLU when gated."""
    ids = torch.int32 if columns else None
    types = (
        torch.int8,
        torch.float32,
        torch.uint8,
        torch.uint8,
        torch.float32,
        ids,
        torch.int32,
        torch.bfloat16,
    )
    constants = _constants(n, k, tile, topk, columns, digits, gated, gated)
    kernel = _KERNELS[tile.kernel].warmup(*types, 16, 1.0, **constants, grid=(1,))
    kernel._init_handles()


def _constants(
    n: int, k: int, tile: Tile, topk: int, columns: int, digits: int, gated: bool, limited: bool
) -> dict[str, Any]:
    """Return the compile-time arguments and options of a product's kernel."""
    return {
        "N": n,
        "K": k,
        "TOPK": topk,
        "GATED": gated,
        "LIMITED": limited,
        "DIGITS": digits,
        "COLUMNS": columns or 8,
        "ROWS": _rows(tile, n),
        "HALVES": _halves(tile, k),
        "STAGES": tile.stages,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _rows(tile: Tile, n: int) -> int:
    """Return the tile's rows, halved until they divide the matrix."""
    rows = tile.rows
    while n % rows:
        rows //= 2
    if rows < 16 * tile.warps:
        raise ValueError(
            f"a matrix of {n} rows cannot be cut into tiles of {16 * tile.warps} rows or more, which "
            f"{tile.warps} warps need; use a plan with fewer warps"
        )
    return rows


def _halves(tile: Tile, k: int) -> int:
    """Return the halves of a step, halved until they divide K."""
    if k % 128:
        raise ValueError(f"K must be a multiple of 128, the group of INT8_SHIFT, got {k}")
    halves = tile.halves
    while k % (64 * halves):
        halves //= 2
    return halves
