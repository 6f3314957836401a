"""Attention over listed cache rows, and the store that fills the cache, for SM80.

A block owns one query token, up to 16 of its heads and a share of its keys. It walks over tiles of listed
rows: indices, then the rows themselves by `cp.async` into shared memory, where a tile serves both products.
Few tokens leave most of the card idle, so their keys are split over several blocks and a second kernel joins
the parts; how often is decided from shapes alone, and lengths only end loops early: no host waits, and a
captured graph stays valid. Measured in `docs/kernels.md`.

Source: `kernels_ref.attention`; FlashAttention-2 (online softmax), flash-decoding (split keys).
"""

from __future__ import annotations

import math
import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels_ref.attention import HEAD_DIM, ROPE_DIM
from kernels_ref.sm80 import rotary
from kernels_ref.sm80.device import blocks_at_once

#: Heads of a block: the rows of one `mma`. A tensor-parallel rank of 4 has 16 heads.
HEADS = 16
#: Keys of a tile.
KEYS = 32
# Two tiles and the queries take 81 KiB: exactly two blocks fit one multiprocessor of an A100.
_WARPS, _STAGES, _BLOCKS_PER_PROCESSOR = 4, 3, 2
# What `splits_of` counts beside tiles, and how far it goes.
_BLOCK_TILES, _JOIN_TILES, _MOST_SPLITS = 3, 2, 32
_LOG2E = math.log2(math.e)
# Triton's interpreter multiplies bf16 operands as raw bits.
_UP = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit(do_not_specialize=["heads", "splits", "width1", "row1", "width2", "row2"])
def _attend(
    Q, C1, I1, L1, C2, I2, L2, SINK, OUT, PARTIAL, STATS,
    scale, heads, splits, q_row, q_head, o_row, o_head, width1, row1, width2, row2,
    TWO: tl.constexpr, SPLIT: tl.constexpr, GROUPS: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, UP: tl.constexpr,
):  # fmt: skip
    # Neighbours share a token, so that its rows are gathered from memory once and from L2 afterwards.
    pid = tl.program_id(0)
    group = pid % GROUPS
    split = pid // GROUPS % splits
    t = (pid // (GROUPS * splits)).to(tl.int64)
    head = group * H + tl.arange(0, H)
    mine = head < heads
    dim = tl.arange(0, D)

    length1 = tl.minimum(tl.load(L1 + t), width1)
    tiles1 = tl.maximum(length1 + KEYS - 1, 0) // KEYS
    list1 = I1 + t * row1
    tiles, length2, list2 = tiles1, length1, list1
    if TWO:
        length2 = tl.minimum(tl.load(L2 + t), width2)
        tiles = tiles1 + tl.maximum(length2 + KEYS - 1, 0) // KEYS
        list2 = I2 + t * row2
    share = tl.cdiv(tiles, splits)
    first = split * share
    last = tl.minimum(first + share, tiles)

    index, rows = _listed(first, tiles1, C1, list1, length1, C2, list2, length2, TWO, KEYS)
    # Rows of other heads may hold anything: they are never read.
    q = tl.load(Q + t * q_row + head[:, None] * q_head + dim[None, :], mask=mine[:, None], other=0.0)
    if UP:
        q = q.to(tl.float32)
    top = tl.full([H], -float("inf"), tl.float32)
    # One sum per key of the tile: summing them up waits until the end, where it costs barriers once.
    totals = tl.zeros([H, KEYS], tl.float32)
    acc = tl.zeros([H, D], tl.float32)
    for i in tl.range(first, last, num_stages=STAGES):
        valid = index >= 0
        # The copy itself fills holes with zeros, so what lies in unlisted rows never enters.
        k = tl.load(rows + index.to(tl.int64)[:, None] * D + dim[None, :], mask=valid[:, None], other=0.0)
        # One tile ahead: a copy then waits for memory once, not for its index and then for its row.
        index, rows = _listed(i + 1, tiles1, C1, list1, length1, C2, list2, length2, TWO, KEYS)
        if UP:
            k = k.to(tl.float32)
        s = tl.dot(q, tl.trans(k)) * scale
        s = tl.where(valid[None, :], s, -float("inf"))
        new = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(new == -float("inf"), 0.0, new)
        p = tl.exp2(s - safe[:, None])
        shrink = tl.exp2(top - safe)
        totals = totals * shrink[:, None] + p
        acc = tl.dot(p.to(k.dtype), k, acc * shrink[:, None])
        top = new

    total = tl.sum(totals, 1)
    if SPLIT:
        part = (t * splits + split) * heads + head
        tl.store(STATS + part * 2, top, mask=mine)
        tl.store(STATS + part * 2 + 1, total, mask=mine)
        # A split without tiles leaves its part unwritten, and `_join` does not read it.
        used = mine & (first < last)
        tl.store(PARTIAL + part[:, None] * D + dim[None, :], acc, mask=used[:, None])
    else:
        sink = tl.load(SINK + head, mask=mine, other=0.0)
        o = acc * _share(top, top, total, sink)[:, None]
        at = OUT + t * o_row + head[:, None] * o_head + dim[None, :]
        tl.store(at, o.to(OUT.dtype.element_ty), mask=mine[:, None])


@triton.jit
def _listed(
    i, tiles1, C1, list1, length1, C2, list2, length2, TWO: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """Return the indices of tile i, -1 from the length on, and the cache that they point into."""
    listed, length, rows, start = list1, length1, C1, i * KEYS
    if TWO:
        second = i >= tiles1
        listed = tl.where(second, list2, list1)
        length = tl.where(second, length2, length1)
        rows = tl.where(second, C2, C1)
        start = tl.where(second, i - tiles1, i) * KEYS
    place = start + tl.arange(0, KEYS)
    return tl.load(listed + place, mask=place < length, other=-1), rows


@triton.jit
def _share(top, peak, total, sink):
    """Return the factor of sums taken at `top`, when all sums at `peak` are `total` and the sink joins.

    The scores, `top` and `peak` are in powers of two; `sink` is a natural logit.
    """
    sink *= 1.4426950408889634
    level = tl.maximum(peak, sink)
    # Without a valid key and with a sink of -inf everything is 0, and so is the output.
    level = tl.where(level == -float("inf"), 0.0, level)
    total = total * tl.exp2(peak - level) + tl.exp2(sink - level)
    return tl.exp2(top - level) / tl.where(total == 0.0, 1.0, total)


@triton.jit(do_not_specialize=["heads", "splits"])
def _join(
    PARTIAL, STATS, SINK, OUT, heads, splits, o_row, o_head,
    MOST: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    dim = tl.arange(0, D)
    base = t * splits * heads + head
    split = tl.arange(0, MOST)
    stats = STATS + (base + split * heads) * 2
    top = tl.load(stats, mask=split < splits, other=-float("inf"))
    total = tl.load(stats + 1, mask=split < splits, other=0.0)
    peak = tl.max(top, 0)
    total = tl.sum(total * tl.exp2(top - tl.where(peak == -float("inf"), 0.0, peak)), 0)
    sink = tl.load(SINK + head)
    acc = tl.zeros([D], tl.float32)
    for start in range(0, splits, STEP):
        some = start + tl.arange(0, STEP)
        part = base + some * heads
        at = tl.load(STATS + part * 2, mask=some < splits, other=-float("inf"))
        # A split that met no valid key may have left its sums unwritten.
        used = (at > -float("inf"))[:, None]
        sums = tl.load(PARTIAL + part[:, None] * D + dim[None, :], mask=used, other=0.0)
        acc += tl.sum(sums * _share(at, peak, total, sink)[:, None], 0)
    tl.store(OUT + t * o_row + head * o_head + dim, acc.to(OUT.dtype.element_ty))


@triton.jit(do_not_specialize=["tokens"])
def _store_kv(
    KV, WEIGHT, FREQS, POSITIONS, SLOTS, CACHE, tokens, eps, kv_row,
    R: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * R + tl.arange(0, R)
    slot = tl.load(SLOTS + t, mask=t < tokens, other=-1).to(tl.int64)
    kept = slot >= 0
    dim = tl.arange(0, D)
    x = tl.load(KV + t.to(tl.int64)[:, None] * kv_row + dim[None, :], mask=kept[:, None], other=0.0)
    x = x.to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    x *= tl.load(WEIGHT + dim).to(tl.float32)[None, :]
    position = tl.load(POSITIONS + t, mask=kept, other=0).to(tl.int64)
    x = rotary.apply_rotary(x, FREQS, position, R, D, ROPE)
    tl.store(CACHE + slot[:, None] * D + dim[None, :], x.to(CACHE.dtype.element_ty), mask=kept[:, None])


def sparse_attention(
    q: Tensor,
    cache: Tensor,
    indices: Tensor,
    lengths: Tensor,
    sink: Tensor,
    scale: float,
    *,
    extra_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_lengths: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend to listed rows of one cache or of two, in one softmax with a sink.

    As `kernels_ref.attention.sparse_attention`, bfloat16 in and out. Probabilities are rounded to bfloat16
    before they meet the rows, sums are float32. One launch, or two when keys are split.

    Raises:
        ValueError: a cache that is not [S, 512] without gaps, or half a second source.
    """
    if (extra_cache is None) != (extra_indices is None) or (extra_cache is None) != (extra_lengths is None):
        raise ValueError("extra_cache, extra_indices and extra_lengths come together")
    _check_rows(cache)
    tokens, heads = q.shape[:2]
    if out is None:
        out = torch.empty((tokens, heads, HEAD_DIM), dtype=q.dtype, device=q.device)
    if not tokens or not heads:
        return out
    two = extra_cache is not None
    cache2, list2, lengths2 = (
        (extra_cache, extra_indices, extra_lengths) if two else (cache, indices, lengths)
    )
    _check_rows(cache2)
    groups = triton.cdiv(heads, HEADS)
    tiles = triton.cdiv(indices.shape[1], KEYS) + (triton.cdiv(list2.shape[1], KEYS) if two else 0)
    splits = splits_of(tokens * groups, tiles, blocks_at_once(q.device, _BLOCKS_PER_PROCESSOR))
    parts = tokens * splits * heads if splits > 1 else 0
    partial = torch.empty(parts, HEAD_DIM, dtype=torch.float32, device=q.device) if parts else out
    stats = torch.empty(parts, 2, dtype=torch.float32, device=q.device) if parts else out
    _attend[(tokens * groups * splits,)](
        q, cache, indices, lengths, cache2, list2, lengths2, sink, out, partial, stats,
        scale * _LOG2E, heads, splits, q.stride(0), q.stride(1), out.stride(0), out.stride(1),
        indices.shape[1], indices.stride(0), list2.shape[1], list2.stride(0),
        TWO=two, SPLIT=splits > 1, GROUPS=groups, H=HEADS, D=HEAD_DIM, KEYS=KEYS, STAGES=_STAGES, UP=_UP,
        num_warps=_WARPS,
    )  # fmt: skip
    if splits > 1:
        _join[(tokens * heads,)](
            partial, stats, sink, out, heads, splits, out.stride(0), out.stride(1),
            MOST=_MOST_SPLITS, STEP=8, D=HEAD_DIM, num_warps=4,
        )  # fmt: skip
    return out


def splits_of(blocks: int, tiles: int, places: int) -> int:
    """Return over how many blocks the keys of a query are split.

    Args:
        blocks: Blocks without a split: tokens times groups of heads.
        tiles: Tiles of keys of the longest list.
        places: Blocks that the card runs at a time.

    Counted in tiles: every round of blocks costs its longest share and what a block takes besides its tiles,
    and a split costs the second kernel.
    """

    def cost(splits: int) -> int:
        rounds = -(-blocks * splits // places)
        return rounds * (-(-tiles // splits) + _BLOCK_TILES) + (_JOIN_TILES if splits > 1 else 0)

    return min(range(1, min(tiles, _MOST_SPLITS) + 1), key=cost, default=1)


def store_kv(
    kv: Tensor,
    weight: Tensor,
    eps: float,
    freqs: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
) -> None:
    """Normalise latents, rotate their last 64 dims and write them to their cache rows.

    As `kernels_ref.attention.store_kv`; one launch, a row is in registers from load to store.
    """
    _check_rows(cache)
    if not len(slots):
        return
    rows = 1
    _store_kv[(triton.cdiv(len(slots), rows),)](
        kv, weight, freqs, positions, slots, cache, len(slots), eps, kv.stride(0),
        R=rows, D=HEAD_DIM, ROPE=ROPE_DIM, num_warps=2,
    )  # fmt: skip


def _check_rows(cache: Tensor) -> None:
    if cache.shape[1:] != (HEAD_DIM,) or not cache.is_contiguous():
        raise ValueError(
            f"a cache is [rows, {HEAD_DIM}] without gaps, got {list(cache.shape)}, strides {cache.stride()}"
        )
