"""What a repack on the GPU met, counted in exact integers: the figures that the manifest records.

Source: ``docs/manifest.md``, section Figures; `dsv4convert.formats.int8_shift.RepackStats`.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4convert.formats.int8_shift import RepackStats
from dsv4convert.formats.repack import row_stats

#: Blocks of a tile.
FIGURES_TILE = 128
#: Places in `RepackFigures.counts`; from `ERROR` on, 256 sums of squared errors, one for each scale byte.
ZERO_BLOCKS, DOUBLED, ROUNDED, CHANGED, FLUSHED, WORST, ERROR = 0, 1, 2, 7, 8, 9, 10
COUNTS = ERROR + 256


class RepackFigures(NamedTuple):
    """What a repack met, in exact integers.

    Attributes:
        exponents: [3, N] int16, all plus one: largest effective exponent of a row, its largest and its
            smallest scale byte, each among blocks that are not all zero; 0 in the middle for a row of zeros.
        counts: [COUNTS] int64, added to: blocks of zeros, doubled blocks, blocks with delta 4, 5, 6, 7, 8 or
            more, codes changed, codes flushed; `WORST` keeps the largest (squared error / squared weight) of
            a block as the bits of a float64; then squared errors by scale byte, in units of (2^(byte -
            128))^2.
    """

    exponents: Tensor
    counts: Tensor

    @classmethod
    def empty(cls, rows: int, device: torch.device | str) -> RepackFigures:
        """Return figures of nothing yet, for tensors of `rows` rows."""
        exponents = torch.empty(3, rows, dtype=torch.int16, device=device)
        return cls(exponents, torch.zeros(COUNTS, dtype=torch.int64, device=device))

    def add_blocks(self, packed: Tensor, scale: Tensor) -> None:
        """Count the doubled and the rounded blocks of weights whose `exponents` are known.

        Args:
            packed: [..., N, K / 2] uint8 or int8, contiguous.
            scale: [..., N, K / 32] uint8 or float8_e8m0fnu, contiguous.
        """
        blocks = scale.numel()
        _figures_kernel[(triton.cdiv(blocks, FIGURES_TILE),)](
            packed.view(torch.int32),
            scale.view(torch.uint8),
            self.exponents,
            self.counts,
            blocks,
            scale.shape[-1],
            TILE=FIGURES_TILE,
        )

    def stats(self, blocks: int, row: int = 0) -> RepackStats:
        """Return what `Repacker.repack` reports of the same rows; the figures must be on the CPU.

        Args:
            blocks: Number of blocks.
            row: Row of the tensor at which the strip starts.
        """
        counts = self.counts.tolist()
        met = RepackStats(
            blocks=blocks,
            zero_blocks=counts[ZERO_BLOCKS],
            doubled_blocks=counts[DOUBLED],
            rounded_blocks=tuple(counts[ROUNDED:CHANGED]),
            codes_changed=counts[CHANGED],
            codes_flushed=counts[FLUSHED],
            worst_block=math.sqrt(struct.unpack("<d", struct.pack("<q", counts[WORST]))[0]),
            error_square=sum(total << 2 * byte for byte, total in enumerate(counts[ERROR:]) if total),
        )
        e_max, top, lowest = self.exponents.numpy()
        return met + row_stats(e_max, top, lowest - 1, row)


@triton.jit
def remapping(delta):
    """Return what becomes of the magnitude codes 7..0 of a block, a hex digit each."""
    table = tl.where(delta == 4, 0x54321100, 0x76543210)
    table = tl.where(delta == 5, 0x32111000, table)
    table = tl.where(delta == 6, 0x11100000, table)
    table = tl.where(delta == 7, 0x10000000, table)
    table = tl.where(delta >= 8, 0, table)
    table = tl.where(delta == -1, 0x00765420, table)
    table = tl.where(delta == -2, 0x00007640, table)
    return tl.where(delta <= -3, 0x00000060, table)


@triton.jit
def _figures_kernel(packed, scales, exponents, counts, total, blocks, TILE: tl.constexpr):
    """Count the blocks outside delta 0..3 of TILE blocks; reads codes only where a scale allows for one."""
    block = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = block < total
    scale = tl.load(scales + block, mask=inside, other=0).to(tl.int32)
    e_max = tl.load(exponents + block // blocks, mask=inside, other=0).to(tl.int32) - 1
    delta = e_max - scale
    special = inside & ((delta < 0) | (delta > 3))
    if tl.max(special.to(tl.int32), 0) > 0:
        place = block[:, None] * 4 + tl.arange(0, 4)[None, :]
        words = tl.load(packed + place, mask=special[:, None], other=0) & 0x77777777
        special = special & (tl.max(words, 1) > 0)
        rounds = special & (delta > 3)
        table = remapping(delta)[:, None]
        grow = tl.minimum(tl.maximum(delta, 3), 8)[:, None] - 3
        error, square, changed, flushed = (words & 0, words & 0, words & 0, words & 0)
        for i in tl.static_range(0, 32, 4):
            code = words >> i & 7
            new = table >> (4 * code) & 7
            value = _doubled(code)
            lost = value - (_doubled(new) << grow)
            error += lost * lost
            square += value * value
            changed += (lost != 0).to(tl.int32)
            flushed += ((code > 0) & (new == 0)).to(tl.int32)
        error = tl.where(rounds, tl.sum(error, 1), 0)
        square = tl.where(rounds, tl.sum(square, 1), 1)
        tl.atomic_add(counts + 1, tl.sum((special & (delta < 0)).to(tl.int64), 0))
        for d in tl.static_range(4, 9):
            tl.atomic_add(counts + d - 2, tl.sum((rounds & (tl.minimum(delta, 8) == d)).to(tl.int64), 0))
        tl.atomic_add(counts + 7, tl.sum(tl.where(rounds, tl.sum(changed, 1), 0).to(tl.int64), 0))
        tl.atomic_add(counts + 8, tl.sum(tl.where(rounds, tl.sum(flushed, 1), 0).to(tl.int64), 0))
        # A positive float64 orders as its bits do.
        worst = tl.max(error.to(tl.float64) / square.to(tl.float64), 0)
        tl.atomic_max(counts + 9, worst.to(tl.int64, bitcast=True))
        tl.atomic_add(counts + 10 + scale, error.to(tl.int64), mask=error > 0)


@triton.jit
def _doubled(code):
    """Return twice the magnitude that an E2M1 code without sign stands for: 0, 1, 2, 3, 4, 6, 8, 12."""
    return (0xC8643210 >> (4 * code).to(tl.uint32) & 15).to(tl.int32)
