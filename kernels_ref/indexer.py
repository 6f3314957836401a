"""The INT8 indexer: its key cache, its queries, the scores of every cached key and the best of them.

A cache page is 64 keys: 64 x 128 int8 codes, then 64 float32 scales, as 8448 bytes of one uint8 row. Key j
of a request stands in page ``page_table[j // 64]``, row ``j % 64``. Both operands pass the orthonormal
Hadamard rotation, which leaves the scores alone and spreads outliers before they are rounded.

Source: DeepSeek-V4 ``inference/model.py``, ``Indexer``; INT8 in place of its FP4, `docs/kernels.md`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels_ref.arguments import FLOATS, INTEGERS, expect, expect_length
from kernels_ref.arithmetic import rms_norm
from kernels_ref.attention import ROPE_DIM, check_store
from kernels_ref.quantize import index_int8
from kernels_ref.rotary import apply_rotary, hadamard

#: Keys of a page, dims of a key, heads of a query.
PAGE, INDEX_DIM, INDEX_HEADS = 64, 128, 64
CODE_BYTES = PAGE * INDEX_DIM
#: Bytes of a page: codes, then one float32 scale per key.
PAGE_BYTES = CODE_BYTES + 4 * PAGE
# Bytes of scores that `index_topk` holds at a time unless told otherwise.
_SCORE_BYTES = 128 << 20


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

    Args:
        k: [T, 128] float32; rows may be strided.
        weight: [128] float32 or bfloat16.
        eps: Added to the mean square.
        freqs: [P, 64] float32, cosine and sine interleaved, one row per position.
        positions: [T] int32 or int64, rows of `freqs`.
        slots: [T] int32 or int64, ``page * 64 + row``; -1 skips the key.
        cache: [pages, 8448] uint8, written in place; other rows stay as they are.

    Raises:
        ValueError: a tensor of another shape, dtype or layout; only rows of `k` may be apart.
    """
    expect("cache", cache, torch.uint8, (None, PAGE_BYTES), gaps="nowhere")
    check_store("k", k, INDEX_DIM, weight, freqs, positions, slots)
    kept = (slots >= 0).nonzero().flatten()
    slot = slots[kept].long()
    x = rms_norm(k[kept].float(), weight, eps)
    codes, scales = index_int8(hadamard(apply_rotary(x, freqs[positions[kept].long()])))
    page, row = slot // PAGE, slot % PAGE
    column = row[:, None] * INDEX_DIM + torch.arange(INDEX_DIM, device=cache.device)
    cache[page[:, None], column] = codes.view(torch.uint8)
    column = CODE_BYTES + 4 * row[:, None] + torch.arange(4, device=cache.device)
    cache[page[:, None], column] = scales[:, None].view(torch.uint8)


def quantize_index_queries(
    q: Tensor, weight: Tensor, weight_scale: float, freqs: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate queries (rotary, then Hadamard) and quantise them per token and head.

    Args:
        q: [T, 64, 128] bfloat16.
        weight: [T, 64] bfloat16 or float32, the weight of each head.
        weight_scale: ``128^-0.5 * 64^-0.5`` in the model.
        freqs: [P, 64] float32, cosine and sine interleaved.
        positions: [T] int32 or int64, rows of `freqs`.

    Returns:
        q8 [T, 64, 128] int8 and [T, 64, 1] float32, ``weight * weight_scale * scale of q8``: a scale is
        positive, so it may leave the relu of `index_logits`.

    Raises:
        ValueError: a tensor of another shape, dtype or layout.
    """
    check_queries(q, weight, freqs, positions)
    positions = positions[: len(q)]
    codes, scales = index_int8(hadamard(apply_rotary(q.float(), freqs[positions.long()])))
    return codes, (weight.float() * weight_scale * scales)[..., None]


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
) -> Tensor:
    """Score cached keys: ``logit[t, j] = k_scale[j] * sum_h relu(<q8[t, h], k8[j]>) * weight[t, h]``.

    Args:
        q8: [T, 64, 128] int8.
        cache: [pages, 8448] uint8.
        weight: [T, 64] float32, of `quantize_index_queries`.
        seq_lens: [T] or [T, 1] int32, keys a query may see.
        page_table: [T, W] int32, 64 W >= every length; entries behind the last page in use may be anything.
        max_len: Columns of the result.
        out: [T, max_len] float32 to write to; a new tensor by default.
        clean: Write -inf to the columns from the length on. Without it they keep what they held, for a
            consumer that reads none of them (SGLang's first top-k).

    Returns:
        [T, max_len] float32. The products are exact integers; the sum over heads is in float32.

    Raises:
        ValueError: a tensor of another shape, dtype or layout, a `max_len` below 0, or (here, not in `sm80`,
            which would have to wait for the GPU) a length beyond the page table.
    """
    check_scores(q8, cache, weight, seq_lens, page_table, max_len, out)
    if out is None:
        out = torch.empty(len(q8), max_len, dtype=torch.float32, device=q8.device)
    for t, length in enumerate(seq_lens.flatten().clamp(0, max_len).tolist()):
        if length > PAGE * page_table.shape[1]:
            raise ValueError(
                f"`page_table`: expected pages for {length} keys of query {t}; found {page_table.shape[1]}"
            )
        pages = cache[page_table[t, : -(-length // PAGE)].long()]
        # Sums of 128 products of int8 stay below 2^24, where float32 is exact.
        keys = pages[:, :CODE_BYTES].reshape(-1, INDEX_DIM)[:length].view(torch.int8).float()
        scales = pages[:, CODE_BYTES:].contiguous().view(torch.float32).reshape(-1)[:length]
        out[t, :length] = (keys @ q8[t].float().T).relu() @ weight[t] * scales
        if clean:
            out[t, length:] = -torch.inf
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

    Args:
        q8, cache, weight, seq_lens, page_table, max_len: As for `index_logits`.
        topk: Keys to pick, 512 or 1024 in the model.
        rows: Queries whose scores are held at a time; by default what fits 128 MiB.

    Returns:
        [T, topk] int32, places j below the length by falling score (equal scores in any order), then -1.
        `page_table[t, j // 64] * 64 + j % 64` is the cache row.

    Raises:
        ValueError: as `index_logits`, or `topk` below 0, or `rows` below 1.
    """
    return chunked_topk(index_logits, q8, cache, weight, seq_lens, page_table, max_len, topk, rows)


def chunked_topk(
    logits: Callable[..., Tensor],
    q8: Tensor,
    cache: Tensor,
    weight: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    max_len: int,
    topk: int,
    rows: int | None,
) -> Tensor:
    """Do what `index_topk` says with the given `index_logits`."""
    check_scores(q8, cache, weight, seq_lens, page_table, max_len, None)
    if topk < 0 or (rows is not None and rows < 1):
        raise ValueError(f"expected a `topk` of 0 or more and `rows` of 1 or more; found {topk} and {rows}")
    rows = max(1, _SCORE_BYTES // (4 * max(1, max_len))) if rows is None else rows
    rows = min(rows, max(1, len(q8)))
    scores = torch.empty(rows, max_len, dtype=torch.float32, device=q8.device)
    best = torch.full((len(q8), topk), -1, dtype=torch.int32, device=q8.device)
    for start in range(0, len(q8), rows):
        part = slice(start, min(start + rows, len(q8)))
        held = scores[: part.stop - start]
        logits(q8[part], cache, weight[part], seq_lens[part], page_table[part], max_len, out=held)
        values, places = held.topk(min(topk, max_len))
        best[part, : places.shape[1]] = torch.where(values == -torch.inf, -1, places).int()
    return best


def check_queries(q: Tensor, weight: Tensor, freqs: Tensor, positions: Tensor) -> None:
    """Refuse what `quantize_index_queries` cannot be given, with a ValueError."""
    expect("q", q, FLOATS, (None, INDEX_HEADS, INDEX_DIM), gaps="between rows")
    expect("weight", weight, FLOATS, (len(q), INDEX_HEADS), gaps="between rows")
    expect("freqs", freqs, torch.float32, (None, ROPE_DIM), gaps="nowhere")
    expect_length("positions", positions, len(q))


def check_scores(
    q8: Tensor,
    cache: Tensor,
    weight: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    max_len: int,
    out: Tensor | None,
) -> None:
    """Refuse what `index_logits` cannot be given.

    Raises:
        ValueError: a tensor of another shape, dtype or layout, or a `max_len` below 0.
    """
    if max_len < 0:
        raise ValueError(f"`max_len`: expected 0 or more; found {max_len}")
    expect("q8", q8, torch.int8, (None, INDEX_HEADS, INDEX_DIM), gaps="nowhere")
    tokens = len(q8)
    expect("cache", cache, torch.uint8, (None, PAGE_BYTES), gaps="nowhere")
    expect("weight", weight, torch.float32, (tokens, INDEX_HEADS), gaps="between rows")
    expect("seq_lens", seq_lens, INTEGERS, (tokens, 1) if seq_lens.dim() == 2 else (tokens,))
    expect("page_table", page_table, INTEGERS, (tokens, None), gaps="between rows")
    if out is not None:
        expect("out", out, torch.float32, (tokens, max_len), gaps="between rows")
