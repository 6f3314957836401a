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

from kernels_ref.arguments import FLOATS, expect
from kernels_ref.attention import HEAD_DIM, ROPE_DIM, check_attention, check_store, second_source
from kernels_ref.sm80 import rotary
from kernels_ref.sm80.device import blocks_at_once
from kernels_ref.sm80.tiles import AttentionPlan, choose_attention

#: Heads of a block: the rows of one `mma`. A tensor-parallel rank of 4 has 16 heads.
HEADS = 16
#: Keys of a tile.
KEYS = 32
_WARPS = 4
# What `splits_of` counts beside tiles, and how far it goes.
_BLOCK_TILES, _JOIN_TILES, _MOST_SPLITS = 3, 2, 32
_LOG2E = math.log2(math.e)
# Triton's interpreter multiplies bf16 operands as raw bits.
_UP = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit(do_not_specialize=["heads", "groups", "splits", "width1", "row1", "width2", "row2"])
def _attend(
    Q, C1, I1, L1, C2, I2, L2, SINK, OUT, PARTIAL, STATS,
    scale, heads, groups, splits, q_row, q_head, o_row, o_head, width1, row1, width2, row2,
    TWO: tl.constexpr, SPLIT: tl.constexpr, H: tl.constexpr, D: tl.constexpr, SLICES: tl.constexpr,
    KEYS: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr, UP: tl.constexpr,
):  # fmt: skip
    # Neighbours share a token, so that its rows are gathered from memory once and from L2 afterwards.
    pid = tl.program_id(0)
    group = pid % groups
    split = pid // groups % splits
    t = (pid // (groups * splits)).to(tl.int64)
    head = group * H + tl.arange(0, H)
    mine = head < heads
    # Rows are cut into slices of their 512 dims: each slice is a chain of products of its own, and what one
    # warp waits for in a tile is the longest chain.
    W: tl.constexpr = D // SLICES
    dim = tl.arange(0, W)

    length1 = tl.minimum(tl.load(L1 + t), width1)
    tiles1 = tl.maximum(length1 + KEYS - 1, 0) // KEYS
    list1 = I1 + t * row1
    tiles, length2, list2 = tiles1, length1, list1
    if TWO:
        length2 = tl.minimum(tl.load(L2 + t), width2)
        tiles = tiles1 + tl.maximum(length2 + KEYS - 1, 0) // KEYS
        list2 = I2 + t * row2
    share = tl.cdiv(tl.cdiv(tiles, splits), TILES) * TILES
    first = split * share
    last = tl.minimum(first + share, tiles)

    index, rows = _listed(first, tiles1, C1, list1, length1, C2, list2, length2, TWO, KEYS, TILES)
    # Rows of other heads may hold anything: they are never read.
    q_at = Q + t * q_row + head[:, None] * q_head + dim[None, :]
    q, acc = (), ()
    for n in tl.static_range(SLICES):
        q += (_as_operand(tl.load(q_at + n * W, mask=mine[:, None], other=0.0), UP),)
        acc += (tl.zeros([H, W], tl.float32),)
    top = tl.full([H], -float("inf"), tl.float32)
    # One sum per key of the tile: summing them up waits until the end, where it costs barriers once.
    totals = tl.zeros([H, KEYS], tl.float32)
    for i in tl.range(first, last, TILES, num_stages=STAGES):
        k, valid = (), ()
        for m in tl.static_range(TILES):
            valid += (index[m] >= 0,)
            k_at = rows[m] + index[m].to(tl.int64)[:, None] * D + dim[None, :]
            for n in tl.static_range(SLICES):
                # The copy itself fills holes with zeros, so what lies in unlisted rows never enters.
                k += (_as_operand(tl.load(k_at + n * W, mask=valid[m][:, None], other=0.0), UP),)
        # A round ahead: a copy then waits for memory once, not for its index and then for its row.
        index, rows = _listed(i + TILES, tiles1, C1, list1, length1, C2, list2, length2, TWO, KEYS, TILES)
        scores = _scores(q, k, valid, scale, SLICES, TILES)
        new = scores[0]
        for m in tl.static_range(1, TILES):
            new = tl.maximum(new, scores[m])
        peak = tl.maximum(top, tl.max(new, 1))
        safe = tl.where(peak == -float("inf"), 0.0, peak)
        shrink = tl.exp2(top - safe)[:, None]
        totals *= shrink
        for m in tl.static_range(TILES):
            p = tl.exp2(scores[m] - safe[:, None])
            totals += p
            sums = ()
            for n in tl.static_range(SLICES):
                so_far = acc[n] * shrink if m == 0 else acc[n]
                sums += (tl.dot(p.to(q[0].dtype), k[m * SLICES + n], so_far),)
            acc = sums
        top = peak

    total = tl.sum(totals, 1)
    if SPLIT:
        # A split without tiles leaves its part unwritten, and `_join` does not use it.
        _store_part(PARTIAL, STATS, (t * splits + split) * heads + head, mine, mine & (first < last),
                    acc, top, total, H, D, SLICES)  # fmt: skip
    else:
        weight = _weight(top, top, total, tl.load(SINK + head, mask=mine, other=0.0))
        o_at = OUT + t * o_row + head[:, None] * o_head + dim[None, :]
        for n in tl.static_range(SLICES):
            o = (acc[n] * weight[:, None]).to(OUT.dtype.element_ty)
            tl.store(o_at + n * W, o, mask=mine[:, None])


@triton.jit
def _store_part(
    PARTIAL, STATS, part, mine, used, acc, top, total,
    H: tl.constexpr, D: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """Store the sums of a split as float16 relative to their largest magnitude, and its three numbers."""
    largest = tl.zeros([H], tl.float32)
    for n in tl.static_range(SLICES):
        largest = tl.maximum(largest, tl.max(tl.abs(acc[n]), 1))
    tl.store(STATS + part * 3, top, mask=mine)
    tl.store(STATS + part * 3 + 1, total, mask=mine)
    tl.store(STATS + part * 3 + 2, largest, mask=mine)
    inverse = 1.0 / tl.where(largest == 0.0, 1.0, largest)
    W: tl.constexpr = D // SLICES
    at = PARTIAL + part[:, None] * D + tl.arange(0, W)[None, :]
    for n in tl.static_range(SLICES):
        tl.store(at + n * W, (acc[n] * inverse[:, None]).to(tl.float16), mask=used[:, None])


@triton.jit
def _scores(q, k, valid, scale, SLICES: tl.constexpr, TILES: tl.constexpr):
    """Return the scores [H, KEYS] of TILES tiles, -inf where a key is not valid."""
    scores = ()
    # Tiles inside slices: both products of a slice take its queries from the same registers.
    for n in tl.static_range(SLICES):
        sums = ()
        for m in tl.static_range(TILES):
            s = tl.dot(q[n], tl.trans(k[m * SLICES + n])) * scale
            sums += (s if n == 0 else scores[m] + s,)
        scores = sums
    masked = ()
    for m in tl.static_range(TILES):
        masked += (tl.where(valid[m][None, :], scores[m], -float("inf")),)
    return masked


@triton.jit
def _as_operand(x, UP: tl.constexpr):
    """Return an operand of a product; interpreted, a wider one, because bf16 is multiplied as raw bits."""
    if UP:
        x = x.to(tl.float32)
    return x


@triton.jit
def _listed(
    i, tiles1, C1, list1, length1, C2, list2, length2,
    TWO: tl.constexpr, KEYS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Return the indices of TILES tiles from i on, -1 behind a list, and the caches that they point into."""
    indices, caches = (), ()
    for m in tl.static_range(TILES):
        listed, length, cache, start = list1, length1, C1, (i + m) * KEYS
        if TWO:
            second = i + m >= tiles1
            listed = tl.where(second, list2, list1)
            length = tl.where(second, length2, length1)
            cache = tl.where(second, C2, C1)
            start = tl.where(second, i + m - tiles1, i + m) * KEYS
        place = start + tl.arange(0, KEYS)
        indices += (tl.load(listed + place, mask=place < length, other=-1),)
        caches += (cache,)
    return indices, caches


@triton.jit
def _weight(top, peak, total, sink):
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
def _join(PARTIAL, STATS, SINK, OUT, heads, splits, o_row, o_head, MOST: tl.constexpr, D: tl.constexpr):
    t = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    dim = tl.arange(0, D)
    split = tl.arange(0, MOST)
    there = split < splits
    part = (t * splits + split) * heads + head
    # All loads at once: none waits for another.
    top = tl.load(STATS + part * 3, mask=there, other=-float("inf"))
    total = tl.load(STATS + part * 3 + 1, mask=there, other=0.0)
    largest = tl.load(STATS + part * 3 + 2, mask=there, other=0.0)
    sink = tl.load(SINK + head)
    sums = tl.load(PARTIAL + part[:, None] * D + dim[None, :], mask=there[:, None], other=0.0)
    # A split that met no valid key may have left its sums unwritten: they may be anything, NaN included.
    sums = tl.where((top > -float("inf"))[:, None], sums.to(tl.float32), 0.0)
    peak = tl.max(top, 0)
    total = tl.sum(total * tl.exp2(top - tl.where(peak == -float("inf"), 0.0, peak)), 0)
    o = tl.sum(sums * (_weight(top, peak, total, sink) * largest)[:, None], 0)
    tl.store(OUT + t * o_row + head * o_head + dim, o.to(OUT.dtype.element_ty))


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
    plan: AttentionPlan | None = None,
) -> Tensor:
    """Attend to listed rows of one cache or of two, in one softmax with a sink.

    As `kernels_ref.attention.sparse_attention`, bfloat16 in and out. Probabilities are rounded to bfloat16
    before they meet the rows, sums are float32. One launch, or two when keys are split. `plan` replaces the
    one of the table, `kernels_ref.sm80.tiles`.

    Raises:
        ValueError: a tensor of another shape, dtype or layout, part of a second source, lists of two dtypes,
            or a `scale` that is a tensor: rows may be apart in `q`, `out` and the lists, everything else is
            contiguous.
    """
    extra = second_source(extra_cache, extra_indices, extra_lengths)
    check_attention(q, (cache, indices, lengths), extra, sink, out, kernel=True)
    if isinstance(scale, Tensor):
        raise ValueError("`scale`: expected a number, which no kernel has to wait for; found a tensor")
    if extra and extra[1].dtype != indices.dtype:
        raise ValueError(
            f"`extra_indices`: expected {indices.dtype}, the dtype of `indices`; found {extra[1].dtype}"
        )
    tokens, heads = q.shape[:2]
    if out is None:
        out = torch.empty((tokens, heads, HEAD_DIM), dtype=q.dtype, device=q.device)
    if not tokens or not heads:
        return out
    two = extra is not None
    cache2, list2, lengths2 = extra or (cache, indices, lengths)
    groups = triton.cdiv(heads, HEADS)
    plan = plan or choose_attention(tokens * groups)
    tiles = triton.cdiv(indices.shape[1], KEYS) + (triton.cdiv(list2.shape[1], KEYS) if two else 0)
    splits = splits_of(tokens * groups, tiles, blocks_at_once(q.device, plan.blocks))
    parts = tokens * splits * heads if splits > 1 else 0
    partial = torch.empty(parts, HEAD_DIM, dtype=torch.float16, device=q.device) if parts else out
    stats = torch.empty(parts, 3, dtype=torch.float32, device=q.device) if parts else out
    walk = plan.split if splits > 1 else plan.whole
    _attend[(tokens * groups * splits,)](
        q, cache, indices, lengths, cache2, list2, lengths2, sink, out, partial, stats,
        scale * _LOG2E, heads, groups, splits, q.stride(0), q.stride(1), out.stride(0), out.stride(1),
        indices.shape[1], indices.stride(0), list2.shape[1], list2.stride(0),
        TWO=two, SPLIT=splits > 1, H=HEADS, D=HEAD_DIM, SLICES=walk.slices,
        KEYS=KEYS, TILES=walk.tiles, STAGES=walk.stages, UP=_UP, num_warps=_WARPS,
    )  # fmt: skip
    if splits > 1:
        most = max(4, triton.next_power_of_2(splits))
        _join[(tokens * heads,)](
            partial, stats, sink, out, heads, splits, out.stride(0), out.stride(1),
            MOST=most, D=HEAD_DIM, num_warps=min(most // 4, 4),
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

    Raises:
        ValueError: a tensor of another shape, dtype or layout; only rows of `kv` may be apart.
    """
    expect("cache", cache, FLOATS, (None, HEAD_DIM), gaps="nowhere")
    check_store("kv", kv, HEAD_DIM, weight, freqs, positions, slots)
    if not len(slots):
        return
    rows = 1
    _store_kv[(triton.cdiv(len(slots), rows),)](
        kv, weight, freqs, positions, slots, cache, len(slots), eps, kv.stride(0),
        R=rows, D=HEAD_DIM, ROPE=ROPE_DIM, num_warps=1,
    )  # fmt: skip
