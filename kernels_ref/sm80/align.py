"""Pairs sorted by expert and padded to blocks, without a host synchronisation or an atomic.

The layout is that of SGLang's ``moe_align_block_size``; pairs stay in ascending order within an expert, so
the result is the same on every run and equal to `kernels_ref.moe.align_experts`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels_ref.arguments import expect
from kernels_ref.moe import aligned_size, check_alignment

#: Pairs that one block ranks.
CHUNK = 128
#: Up to so many pairs, each block counts all of them itself, and one launch does everything.
SMALL = 512


def align_experts(topk_ids: Tensor, block: int, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort pairs by expert: the function of the same name in `kernels_ref.moe`.

    Args:
        topk_ids: [T, k] int32, contiguous.
        block: Pairs per block, a power of two.
        experts: E.

    Returns:
        sorted_ids [P], expert_ids [P / block] and total [1], int32.

    Raises:
        ValueError: `topk_ids` does not fit, or a block that is no power of two.
    """
    check_alignment(topk_ids, block, experts)
    expect("topk_ids", topk_ids, torch.int32, (None, None), gaps="nowhere")
    if block & (block - 1):
        raise ValueError(f"`block`: expected a power of two; found {block}")
    pairs, device = topk_ids.numel(), topk_ids.device
    size = aligned_size(pairs, block, experts)
    sorted_ids = torch.empty(size, dtype=torch.int32, device=device)
    expert_ids = torch.empty(size // block, dtype=torch.int32, device=device)
    total = torch.empty(1, dtype=torch.int32, device=device)
    if not pairs:
        return sorted_ids, expert_ids, total.zero_()
    bins = triton.next_power_of_2(experts + 1)
    counts, chunk = None, CHUNK
    if pairs > SMALL:
        # Every block reads the counts of all chunks, so many pairs want larger chunks.
        while chunk < 4 * CHUNK and pairs > 96 * chunk:
            chunk *= 2
        counts = torch.empty((triton.cdiv(pairs, chunk), bins), dtype=torch.int32, device=device)
        count_kernel[counts.shape[:1]](
            topk_ids, counts, sorted_ids, expert_ids, pairs, size,
            BLOCK=block, EXPERTS=experts, BINS=bins, CHUNK=chunk, num_warps=4,
        )  # fmt: skip
    place_kernel[(triton.cdiv(pairs, chunk),)](
        topk_ids, counts, sorted_ids, expert_ids, total, pairs, size,
        BLOCK=block, EXPERTS=experts, BINS=bins, CHUNK=chunk, SMALL=SMALL, num_warps=8,
    )  # fmt: skip
    return sorted_ids, expert_ids, total


@triton.jit
def _load_ids(IDS, at, pairs, EXPERTS: tl.constexpr):
    """Load ids; skipped pairs and places beyond the last pair count as expert EXPERTS."""
    ids = tl.load(IDS + at, mask=at < pairs, other=-1)
    return tl.where((ids >= 0) & (ids < EXPERTS), ids, EXPERTS)


@triton.jit
def _pad(SORTED, EXPERT_IDS, pairs, first, size, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Write padding to the places of [first, size), a share of them in each block; `first` begins a block."""
    at = tl.arange(0, CHUNK)
    for start in range(first + tl.program_id(0) * CHUNK, size, tl.num_programs(0) * CHUNK):
        place = start + at
        tl.store(SORTED + place, pairs, mask=place < size)
        tl.store(EXPERT_IDS + place // BLOCK, -1, mask=(place < size) & (place % BLOCK == 0))


@triton.jit(do_not_specialize=["pairs", "size"])
def count_kernel(
    IDS, COUNTS, SORTED, EXPERT_IDS, pairs, size,
    BLOCK: tl.constexpr, EXPERTS: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Count the pairs of each expert in one chunk, and fill the outputs with padding."""
    chunk = tl.program_id(0)
    _pad(SORTED, EXPERT_IDS, pairs, 0, size, BLOCK, CHUNK)
    ids = _load_ids(IDS, chunk * CHUNK + tl.arange(0, CHUNK), pairs, EXPERTS)
    tl.store(COUNTS + chunk * BINS + tl.arange(0, BINS), tl.histogram(ids, BINS))


@triton.jit
def _count_all(
    IDS, COUNTS, pairs, EXPERTS: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, SMALL: tl.constexpr
):
    """Return the pairs of each expert, [BINS]: all of them, and those of earlier chunks."""
    chunk = tl.program_id(0)
    bins = tl.arange(0, BINS)
    if COUNTS is None:
        at = tl.arange(0, SMALL)
        ids = _load_ids(IDS, at, pairs, EXPERTS)
        count = tl.histogram(ids, BINS)
        before = tl.histogram(tl.where(at < chunk * CHUNK, ids, EXPERTS), BINS)
    else:
        count = tl.zeros((BINS,), tl.int32)
        before = tl.zeros((BINS,), tl.int32)
        for one in range(tl.num_programs(0)):
            found = tl.load(COUNTS + one * BINS + bins)
            count += found
            before += tl.where(one < chunk, found, 0)
    return count, before


@triton.jit(do_not_specialize=["pairs", "size"])
def place_kernel(
    IDS, COUNTS, SORTED, EXPERT_IDS, TOTAL, pairs, size,
    BLOCK: tl.constexpr, EXPERTS: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr,
    SMALL: tl.constexpr,
):  # fmt: skip
    """Place the pairs of one chunk. COUNTS is None for up to SMALL pairs, and padding is placed here too."""
    chunk, chunks = tl.program_id(0), tl.num_programs(0)
    bins = tl.arange(0, BINS)
    count, before = _count_all(IDS, COUNTS, pairs, EXPERTS, BINS, CHUNK, SMALL)
    blocks = tl.where(bins < EXPERTS, (count + BLOCK - 1) // BLOCK, 0)
    last = tl.cumsum(blocks, 0)
    used = tl.sum(blocks, 0)

    # Rank within the expert: the pairs of the same expert that come earlier, in this chunk and before it.
    at = tl.arange(0, CHUNK)
    ids = _load_ids(IDS, chunk * CHUNK + at, pairs, EXPERTS)
    earlier = tl.zeros((CHUNK, 16), tl.int32)
    for first in range(0, CHUNK, 16):
        other = first + tl.arange(0, 16)
        other_ids = _load_ids(IDS, chunk * CHUNK + other, pairs, EXPERTS)
        earlier += ((ids[:, None] == other_ids[None, :]) & (other[None, :] < at[:, None])).to(tl.int32)
    rank = tl.gather(before, ids, 0) + tl.sum(earlier, 1)
    place = tl.gather(last - blocks, ids, 0) * BLOCK + rank
    tl.store(SORTED + place, chunk * CHUNK + at, mask=ids < EXPERTS)
    tl.store(EXPERT_IDS + place // BLOCK, ids, mask=(ids < EXPERTS) & (rank % BLOCK == 0))

    if COUNTS is None:
        # Padding between the pairs: the ends of this chunk's share of the experts, then the unused blocks.
        end = (last - blocks) * BLOCK + count
        for gap in range(BLOCK - 1):
            mine = (bins % chunks == chunk) & (end + gap < last * BLOCK)
            tl.store(SORTED + end + gap, pairs, mask=mine)
        _pad(SORTED, EXPERT_IDS, pairs, used * BLOCK, size, BLOCK, CHUNK)
    if chunk == 0:
        tl.store(TOTAL, used * BLOCK)
