"""The INT8 indexer for SM80: key store, query quantiser, paged scores, best keys.

The scores are what costs: every query meets every cached key of its request. A block owns one query and a
run of pages; a page of 64 keys comes by `cp.async`, one `mma` m16n8k32 product gives 64 keys x 64 heads
in integers, and relu, head weights and key scales follow in registers. `docs/kernels.md` has the times.

Source: `kernels_ref.indexer`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels_ref.arguments import expect
from kernels_ref.attention import ROPE_DIM, check_store
from kernels_ref.indexer import (
    INDEX_DIM,
    INDEX_HEADS,
    PAGE,
    PAGE_BYTES,
    check_queries,
    check_scores,
    chunked_topk,
)
from kernels_ref.sm80 import rotary
from kernels_ref.sm80.device import blocks_at_once
from kernels_ref.sm80.tiles import ScoresPlan, choose_scores


@triton.jit(do_not_specialize=["max_len", "share", "w_row", "length_row", "table_row", "out_row"])
def _logits(
    Q, CODES, SCALES, WEIGHT, LENGTHS, TABLE, OUT,
    max_len, share, w_row, length_row, table_row, out_row,
    CLEAN: tl.constexpr, STAGES: tl.constexpr,
    KEYS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * share
    length = tl.minimum(tl.load(LENGTHS + t * length_row), max_len)
    key = tl.arange(0, KEYS)
    out = OUT + t * out_row
    pages = tl.minimum(tl.maximum(tl.cdiv(length, KEYS) - start, 0), share)
    if pages > 0:
        head = tl.arange(0, HEADS)
        dim = tl.arange(0, D)
        q = tl.load(Q + t * (HEADS * D) + head[None, :] * D + dim[:, None])
        w = tl.load(WEIGHT + t * w_row + head)
        listed = TABLE + t * table_row + start
        # 32 bits from load to load: a wider number between them would end the pipeline.
        page = tl.load(listed)
        for i in tl.range(0, pages, num_stages=STAGES):
            at = page.to(tl.int64) * BYTES
            k = tl.load(CODES + at + key[:, None] * D + dim[None, :])
            scale = tl.load(SCALES + at // 4 + KEYS * D // 4 + key)
            # One page ahead: a copy then waits for memory once, not for the table and then for the page.
            page = tl.load(listed + tl.minimum(i + 1, pages - 1))
            # The sums start at the bits of 1.5 * 2^23 and stay below 2^21 in magnitude: read as float32 they
            # are that number plus the sum, without a conversion.
            bits = tl.dot(k, q, tl.full([KEYS, HEADS], 0x4B400000, tl.int32), out_dtype=tl.int32)
            products = tl.maximum(bits.to(tl.float32, bitcast=True), 12582912.0) - 12582912.0
            logit = tl.sum(products * w[None, :], 1) * scale
            column = (start + i) * KEYS + key
            if CLEAN:
                logit = tl.where(column < length, logit, -float("inf"))
                tl.store(out + column, logit, mask=column < max_len)
            else:
                tl.store(out + column, logit, mask=column < length)
    if CLEAN:
        for i in range(start + pages, tl.minimum(start + share, tl.cdiv(max_len, KEYS))):
            column = i * KEYS + key
            tl.store(out + column, tl.full([KEYS], -float("inf"), tl.float32), mask=column < max_len)


@triton.jit(do_not_specialize=["tokens"])
def _store_keys(
    K, WEIGHT, FREQS, POSITIONS, SLOTS, CODES, SCALES, tokens, eps, k_row,
    R: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, ROPE: tl.constexpr,
    KEYS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * R + tl.arange(0, R)
    slot = tl.load(SLOTS + t, mask=t < tokens, other=-1).to(tl.int64)
    kept = slot >= 0
    dim = tl.arange(0, D)
    x = tl.load(K + t.to(tl.int64)[:, None] * k_row + dim[None, :], mask=kept[:, None], other=0.0)
    x = x.to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    x *= tl.load(WEIGHT + dim).to(tl.float32)[None, :]
    position = tl.load(POSITIONS + t, mask=kept, other=0).to(tl.int64)
    x = rotary.hadamard(rotary.apply_rotary(x, FREQS, position, R, D, ROPE), R, D, BITS)
    codes, scale = rotary.index_int8(x)
    page, row = slot // KEYS, slot % KEYS
    at = page * BYTES + row * D
    tl.store(CODES + at[:, None] + dim[None, :], codes, mask=kept[:, None])
    tl.store(SCALES + page * (BYTES // 4) + KEYS * D // 4 + row, scale, mask=kept)


@triton.jit
def _quantize_queries(
    Q, WEIGHT, FREQS, POSITIONS, CODES, SCALED, weight_scale, q_row, q_head, w_row,
    R: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) // (HEADS // R)).to(tl.int64)
    head = tl.program_id(0) % (HEADS // R) * R + tl.arange(0, R)
    dim = tl.arange(0, D)
    x = tl.load(Q + t * q_row + head[:, None] * q_head + dim[None, :]).to(tl.float32)
    position = tl.load(POSITIONS + t + tl.arange(0, 1)).to(tl.int64)
    x = rotary.hadamard(rotary.apply_rotary(x, FREQS, position, R, D, ROPE), R, D, BITS)
    codes, scale = rotary.index_int8(x)
    tl.store(CODES + (t * HEADS + head)[:, None] * D + dim[None, :], codes)
    weight = tl.load(WEIGHT + t * w_row + head).to(tl.float32)
    tl.store(SCALED + t * HEADS + head, weight * weight_scale * scale)


def store_index_keys(
    k: Tensor,
    weight: Tensor,
    eps: float,
    freqs: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
) -> None:
    """Normalise keys, rotate them (rotary, then Hadamard), quantise them and write them to their page rows.

    As `kernels_ref.indexer.store_index_keys`; one launch, a row is in registers from load to store.

    Raises:
        ValueError: a tensor of another shape, dtype or layout; only rows of `k` may be apart.
    """
    expect("cache", cache, torch.uint8, (None, PAGE_BYTES), gaps="nowhere")
    check_store("k", k, INDEX_DIM, weight, freqs, positions, slots)
    if not len(slots):
        return
    rows = 4
    _store_keys[(triton.cdiv(len(slots), rows),)](
        k, weight, freqs, positions, slots, cache.view(torch.int8), cache.view(torch.float32),
        len(slots), eps, k.stride(0),
        R=rows, D=INDEX_DIM, BITS=7, ROPE=ROPE_DIM, KEYS=PAGE, BYTES=PAGE_BYTES,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def quantize_index_queries(
    q: Tensor, weight: Tensor, weight_scale: float, freqs: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate queries (rotary, then Hadamard) and quantise them per token and head.

    As `kernels_ref.indexer.quantize_index_queries`; `q` and `weight` may be strided in all but the last dim.

    Raises:
        ValueError: a tensor of another shape, dtype or layout.
    """
    check_queries(q, weight, freqs, positions)
    tokens = len(q)
    codes = torch.empty(q.shape, dtype=torch.int8, device=q.device)
    scaled = torch.empty(tokens, INDEX_HEADS, 1, dtype=torch.float32, device=q.device)
    if not tokens:
        return codes, scaled
    rows = 8
    _quantize_queries[(tokens * (INDEX_HEADS // rows),)](
        q, weight, freqs, positions, codes, scaled, weight_scale, q.stride(0), q.stride(1), weight.stride(0),
        R=rows, HEADS=INDEX_HEADS, D=INDEX_DIM, BITS=7, ROPE=ROPE_DIM, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return codes, scaled


def index_logits(
    q8: Tensor,
    cache: Tensor,
    weight: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    max_len: int,
    *,
    out: Tensor | None = None,
    clean: bool = True,
    plan: ScoresPlan | None = None,
) -> Tensor:
    """Score cached keys, ``logit[t, j] = k_scale[j] * sum_h relu(<q8[t, h], k8[j]>) * weight[t, h]``.

    As `kernels_ref.indexer.index_logits`. `seq_lens` may be [T] or [T, 1]. The grid covers `max_len` for
    every query, whatever the lengths, so that a captured graph stays valid; blocks behind a length end at
    once, after writing their -inf if `clean`. `plan` replaces the one of the table, `kernels_ref.sm80.tiles`.

    Raises:
        ValueError: a tensor of another shape, dtype or layout, or a `max_len` below 0; the first dimension of
            all but `q8` and `cache` may have gaps.
    """
    check_scores(q8, cache, weight, seq_lens, page_table, max_len, out)
    tokens = len(q8)
    if out is None:
        out = torch.empty(tokens, max_len, dtype=torch.float32, device=q8.device)
    if not tokens or not max_len:
        return out
    pages = triton.cdiv(max_len, PAGE)
    plan = plan or choose_scores(tokens)
    share = pages_of_a_block(tokens, pages, blocks_at_once(q8.device, plan.blocks), plan.pages)
    _logits[(tokens, triton.cdiv(pages, share))](
        q8, cache.view(torch.int8), cache.view(torch.float32), weight, seq_lens, page_table, out,
        max_len, share, weight.stride(0), seq_lens.stride(0), page_table.stride(0), out.stride(0),
        CLEAN=clean, STAGES=plan.stages,
        KEYS=PAGE, HEADS=INDEX_HEADS, D=INDEX_DIM, BYTES=PAGE_BYTES, num_warps=plan.warps,
    )  # fmt: skip
    return out


def index_topk(
    q8: Tensor,
    cache: Tensor,
    weight: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    max_len: int,
    topk: int,
    rows: int | None = None,
) -> Tensor:
    """Return the places of the best keys of each query, without scores of all queries at once.

    As `kernels_ref.indexer.index_topk`: scores of `rows` queries in one reused buffer, then `torch.topk`.
    """
    return chunked_topk(index_logits, q8, cache, weight, seq_lens, page_table, max_len, topk, rows)


def pages_of_a_block(tokens: int, pages: int, places: int, most: int) -> int:
    """Return how many pages a block scores: as few as keep the rounds that blocks of `most` pages need.

    More of them read the query less often; fewer, in whole rounds, keep all `places` of the card busy.
    """
    rounds = max(triton.cdiv(tokens * pages, places * most), 1)
    return triton.cdiv(tokens * pages, places * rounds)
