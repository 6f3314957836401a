"""MXFP4 to INT8_SHIFT at memory speed.

Gives the bytes of `int8_shift.repack_reference` and says what they cost. Rows are independent, so any strip
of rows gives the bytes the whole tensor would. numpy only.

Source: ``docs/formats.md``, section INT8_SHIFT.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsv4convert.formats.codes import LUT2, count_nan_scales
from dsv4convert.formats.int8_shift import (
    BLOCK,
    F32,
    LOW_EXPONENT,
    U8,
    RepackStats,
    codes_shape,
    require_shape,
)
from dsv4convert.formats.spec import INT8_SHIFT

Bools = NDArray[np.bool_]
I16 = NDArray[np.int16]
U64 = NDArray[np.uint64]

# Input bytes per step: a step, two scratch copies and the output stay in a 512 KiB L2 cache.
_STEP = 512 * 1024
# Steps whose block scales are worked on together, which is a sixteenth of the data.
_STEPS = 8

# What becomes of magnitude codes 0..7 in a block with delta = e_max - e_b. Below delta 0 only codes that can
# be doubled so often occur, because the effective exponent of a block allows no more.
_REMAP = {
    -3: "06000000",
    -2: "04670000",
    -1: "02456700",
    0: "01234567",
    1: "01234567",
    2: "01234567",
    3: "01234567",
    4: "00112345",
    5: "00011123",
    6: "00000111",
    7: "00000001",
    8: "00000000",
}
_DELTA_LOW, _DELTA_HIGH = min(_REMAP), max(_REMAP)


def _each_nibble(digit: int) -> np.uint64:
    return np.uint64(int(f"{digit:x}" * 16, 16))


_TWO, _FOUR, _FIVE, _SIX, _SEVEN, _EIGHT = (_each_nibble(digit) for digit in (2, 4, 5, 6, 7, 8))
_ONE_BIT = np.uint64(1)
_BYTE = np.arange(256)


def _code_tables() -> U8:
    """Return uint8 [12, 256]: the byte that replaces a packed byte, one row per delta."""
    nibble = np.array([[int(c) for c in codes] for codes in _REMAP.values()], np.uint8)
    signed = np.concatenate((nibble, np.where(nibble > 0, nibble | 8, 0)), axis=1).astype(np.uint8)
    table: U8 = signed[:, _BYTE & 15] | signed[:, _BYTE >> 4] << np.uint8(4)
    return table


def _loss_tables() -> U64:
    """Return uint64 [12, 256] of four 16-bit counts per packed byte, all zero for delta <= 3.

    Squared error and squared value in units of the block's ``(2^(e_b - 128))^2``, codes changed, codes
    flushed. The sum over a block, at most ``32 * 12^2``, carries into no other count.
    """
    table = np.zeros((len(_REMAP), 16, 4), np.uint16)
    for row, (delta, codes) in enumerate(_REMAP.items()):
        for code, new in enumerate(map(int, codes)):
            value, kept = int(LUT2[code]), int(LUT2[new]) << max(0, delta - 3)
            if delta > 3:
                flushed = code > 0 and new == 0
                table[row, [code, code + 8]] = (value - kept) ** 2, value**2, value != kept, flushed
    return (table[:, _BYTE & 15] + table[:, _BYTE >> 4]).view(np.uint64)[:, :, 0]


_CODES = _code_tables()
_LOSSES = _loss_tables()
# uint16 [65536]: sum of the squares of the four lut2 values of two packed bytes.
_SQUARES = (LUT2.astype(np.uint16) ** 2)[_BYTE & 15] + (LUT2.astype(np.uint16) ** 2)[_BYTE >> 4]
_SQUARES = np.add.outer(_SQUARES, _SQUARES).reshape(-1)


class Repacker:
    """Repack strips of MXFP4 rows of one width, at memory speed, into buffers of the caller.

    Nearly all blocks keep their codes, so the data passes through 64-bit words, 16 codes each, only to clear
    the sign of zeros, to find the blocks that count and to change the order; tables serve the exceptions.
    Equals `int8_shift.repack_reference` byte for byte. One object serves one thread.

    Args:
        k: Codes per row, a multiple of 32.

    Raises:
        ValueError: K is not a multiple of 32.
    """

    def __init__(self, k: int) -> None:
        if k % BLOCK:
            raise ValueError(f"MXFP4 rows have whole blocks of {BLOCK} codes, got K = {k}")
        self._k, self._blocks, self._words = k, k // BLOCK, k // 16
        self._groups = INT8_SHIFT.groups(k)
        self._step = max(1, _STEP // max(1, k // 2))
        self._rows = self._step * _STEPS
        self._shift = np.zeros((self._rows, self._groups * 4), np.uint8)
        self._pair = np.empty((self._step, self._blocks), np.uint64)
        self._present = np.empty((self._rows, self._blocks), np.bool_)
        self._full = np.empty((self._rows, self._blocks), np.bool_)

    def repack(
        self, packed: U8, scales: U8, codes: U8, shift2: U8, channel_scale: F32, *, row: int = 0
    ) -> RepackStats:
        """Repack R rows into the stored order; see `remap` for the arguments."""
        stats = self.remap(packed, scales, codes, shift2, channel_scale, row=row)
        interleave(codes)
        return stats

    def remap(
        self, packed: U8, scales: U8, codes: U8, shift2: U8, channel_scale: F32, *, row: int = 0
    ) -> RepackStats:
        """Repack R rows, but for the order of the codes, which `interleave` gives them.

        Two halves of about equal cost, for two threads.

        Args:
            packed: [R, K / 2] uint8, C-contiguous, low nibble first; may be read-only.
            scales: [R, K / 32] uint8.
            codes: [R, ceil(K / 128) * 64] uint8, C-contiguous; receives the codes in the
                order of K, two per byte, zero-padded to whole groups.
            shift2: [R, ceil(K / 128)] uint8; receives ``weight_shift2``.
            channel_scale: [R] float32; receives ``channel_scale``.
            row: Row of the tensor at which the strip starts; only places in the result depend on it.

        Returns:
            What was met, without the sums that only `weigh` computes. With a scale byte of 255 the output
            means nothing.

        Raises:
            ValueError: a shape does not fit.
        """
        self._check(packed, scales, codes, shift2, channel_scale)
        n = len(packed)
        e_max, top, lowest = (np.empty(n, np.int16) for _ in range(3))
        parts: list[_Special] = []
        zero_blocks = 0
        for start in range(0, n, self._rows):
            rows = slice(start, start + self._rows)
            present, full = self._store_codes(packed[rows].view(np.uint64), codes[rows])
            # Scale byte plus one, and zero for a block that does not count. 255 becomes zero as well.
            raised = (scales[rows] + np.uint8(1)) * present.view(np.uint8)
            e_max[rows], top[rows] = _row_exponents(raised, full, packed[rows])
            lowest[rows] = (raised - np.uint8(1)).min(axis=1)
            # Modulo 256: 0..3 is what it says, all else is settled block by block.
            delta = e_max[rows, None].astype(np.uint8) - raised
            shift = (np.uint8(3) - delta) * present.view(np.uint8)
            special = np.flatnonzero((delta > 3) & present)
            if special.size:
                part = _remap(codes[rows], special, scales[rows], e_max[rows])
                shift.reshape(-1)[special] = np.where(part.delta < 0, 3, 0)
                parts.append(part)
            self._store_shifts(shift, shift2[rows])
            zero_blocks += present.size - int(np.count_nonzero(present))
        channel_scale[:] = np.where(top > 0, np.ldexp(np.float32(1), e_max.astype(np.int32) - 132), 0)
        nans, first = count_nan_scales(scales)
        place = (row + first[0], first[1]) if first else None
        met = RepackStats(blocks=scales.size, zero_blocks=zero_blocks, nan_scales=nans, first_nan_scale=place)
        return met + row_stats(e_max, top, lowest, row) + _losses(parts)

    def _check(self, packed: U8, scales: U8, codes: U8, shift2: U8, channel_scale: F32) -> None:
        n = len(packed)
        require_shape("packed", packed.shape, (n, self._k // 2))
        require_shape("scales", scales.shape, (n, self._blocks))
        require_shape("codes", codes.shape, codes_shape(n, self._k))
        require_shape("shift2", shift2.shape, (n, self._groups))
        require_shape("channel_scale", channel_scale.shape, (n,))
        if not (packed.flags.c_contiguous and codes.flags.c_contiguous):
            raise ValueError("packed and codes must be C-contiguous")

    def _store_codes(self, words: U64, out: U8) -> tuple[Bools, Bools]:
        """Store the codes, -0 as +0; return the blocks that are not all zero and those with a 4 or 6."""
        n = len(words)
        for start in range(0, n, self._step):
            rows = slice(start, min(start + self._step, n))
            self._store_step(words[rows], out[rows], self._present[rows], self._full[rows])
        return self._present[:n], self._full[:n]

    def _store_step(self, words: U64, out: U8, present: Bools, full: Bools) -> None:
        padded, pair = out.view(np.uint64), self._pair[: len(words)]
        codes = padded[:, : self._words]
        padded[:, self._words :] = 0
        np.bitwise_and(words, _SEVEN, out=codes)
        # Magnitude codes plus 2: 2 only for zero, and bit 3 only from 6 on; the union of a block keeps both.
        np.add(codes, _TWO, out=codes)
        np.bitwise_or(codes[:, 0::2], codes[:, 1::2], out=pair)
        np.not_equal(pair, _TWO, out=present)
        np.bitwise_and(pair, _EIGHT, out=pair)
        np.not_equal(pair, 0, out=full)
        # Plus 7: bit 3 is set where the magnitude is not zero, and is where the sign may stay.
        np.add(codes, _FIVE, out=codes)
        np.bitwise_or(codes, _SEVEN, out=codes)
        np.bitwise_and(codes, words, out=codes)

    def _store_shifts(self, shift: U8, out: U8) -> None:
        n = len(shift)
        self._shift[:n, : self._blocks] = shift
        # One product moves four 2-bit fields, a byte apart, into the top byte: bits 24, 26, 28, 30.
        fields = self._shift[:n].view(np.uint32) * np.uint32(0x01041040)
        out[:] = fields.view(np.uint8)[:, 3::4]


def interleave(codes: U8) -> None:
    """Bring groups from the order of K into the order ``g128-split64``, in place.

    Every 32-bit word gets one 16-bit word of each half of its group.

    Args:
        codes: uint8, C-contiguous, whole groups of 64 bytes.
    """
    groups = codes.reshape(-1, 64)
    for start in range(0, len(groups), _STEP // 64):
        words = groups[start : start + _STEP // 64].view(np.uint32)
        halves = words.view(np.uint16).reshape(-1, 2, 16)
        low, high = halves[:, 0].astype(np.uint32), halves[:, 1].astype(np.uint32)
        np.left_shift(high, np.uint32(16), out=high)
        np.bitwise_or(low, high, out=words)


def _row_exponents(raised: U8, full: Bools, packed: U8) -> tuple[I16, I16]:
    """Return the largest effective and the largest raw exponent of each row, plus one; 0 for a zero row."""
    # The key puts a block with a code of 4 or 6 before others of its byte: such a winner settles its row.
    key = raised.astype(np.int16)
    np.add(key, key, out=key)
    np.add(key, full, out=key)
    winner = key.max(axis=1)
    top: I16 = winner >> 1
    e_max = top.copy()
    open_rows = np.flatnonzero((winner & 1 == 0) & (winner > 0))
    if open_rows.size:
        spare = _spare_doublings(packed[open_rows].view(np.uint64))
        e_max[open_rows] = (raised[open_rows] - spare).max(axis=1)
    return e_max, top


def _spare_doublings(codes: U64) -> I16:
    """Return [rows, blocks]: how often the codes of a block can be doubled, 3 for an all-zero block."""
    even, odd = codes[:, 0::2], codes[:, 1::2]
    union = even | odd
    # Bit 2 and bit 1 of the same code: 6 or 7.
    six = (even & even << _ONE_BIT) | (odd & odd << _ONE_BIT)
    levels = [(bits != 0).astype(np.int16) for bits in (union & _SIX, union & _FOUR, six & _FOUR)]
    spare: I16 = np.int16(3) - levels[0] - levels[1] - levels[2]
    return spare


class _Special(NamedTuple):
    """Blocks outside delta 0..3: delta clipped to the tables, four counts (`_loss_tables`), scale byte."""

    delta: NDArray[np.intp]
    counts: U64
    scale: U8


def _remap(codes: U8, special: NDArray[np.intp], scales: U8, e_max: I16) -> _Special:
    """Replace, in place, the stored codes of the blocks outside delta 0..3, given by flat index."""
    rows, blocks = np.divmod(special, scales.shape[1])
    scale = scales.take(special)
    delta = np.clip(e_max[rows] - (scale.astype(np.intp) + 1), _DELTA_LOW, _DELTA_HIGH)
    blocks_of = codes.reshape(-1, 16)
    place = rows * (codes.shape[1] // 16) + blocks
    index = (delta - _DELTA_LOW)[:, None] * 256 + blocks_of[place]
    blocks_of[place] = _CODES.take(index)
    return _Special(delta, _LOSSES.take(index).sum(axis=1), scale)


def _losses(parts: list[_Special]) -> RepackStats:
    if not parts:
        return RepackStats()
    delta, counts, scale = (np.concatenate(column) for column in zip(*parts, strict=True))
    error, square, changed, flushed = counts.view(np.uint16).reshape(-1, 4).T.astype(np.int64)
    return RepackStats(
        doubled_blocks=int(np.count_nonzero(delta < 0)),
        rounded_blocks=tuple(int(np.count_nonzero(delta == d)) for d in range(4, _DELTA_HIGH + 1)),
        codes_changed=int(changed.sum()),
        codes_flushed=int(flushed.sum()),
        worst_block=float(np.sqrt((error / np.maximum(square, 1)).max())),
        error_square=_exact_sum(error, scale),
    )


def _exact_sum(squares: NDArray[np.int64], scales: U8) -> int:
    """Return the sum of ``squares * (2^(scales - 128))^2`` in units of 2^-256."""
    # Sums per exponent stay below 2^53, where float64 adds integers exactly.
    sums = np.bincount(scales.reshape(-1), weights=squares.reshape(-1))
    return sum(int(total) << 2 * exponent for exponent, total in enumerate(sums) if total)


def row_stats(e_max: I16, top: I16, lowest: I16, row: int) -> RepackStats:
    """Report on rows.

    Args:
        e_max: [R] largest effective exponent of each row, plus one.
        top: [R] largest scale byte of a block that is not all zero, plus one; 0 for a row of zeros.
        lowest: [R] smallest such byte.
        row: Row of the tensor at which these start.
    """
    low = np.flatnonzero((e_max <= LOW_EXPONENT) & (top > 0))
    span = np.where(top > 0, top - 1 - lowest, 0)
    return RepackStats(
        rows=len(e_max),
        zero_rows=int(np.count_nonzero(top == 0)),
        low_rows=len(low),
        first_low_row=row + int(low[0]) if len(low) else None,
        wide_rows=int(np.count_nonzero(span > 3)),
        max_span=int(span.max(initial=0)),
        spans=tuple(np.bincount(span[top > 0]).tolist()),
    )


def weigh(packed: U8, scales: U8) -> RepackStats:
    """Count the non-zero codes and the squared weights of MXFP4 rows, which `relative_error` divides by.

    It reads every code through a table and costs more than the repack, so it is run over the rows of a tensor
    (all of them) only after the repack of some of them rounded; add the result to that of the repack.

    Args:
        packed: [R, K / 2] uint8, C-contiguous, low nibble first; may be read-only.
        scales: [R, K / 32] uint8.

    Returns:
        `nonzero_codes` and `weight_square`; all else is zero.

    Raises:
        ValueError: `scales` is not the grid of `packed`.
    """
    n, width = packed.shape
    require_shape("scales", scales.shape, (n, width // 16))
    total = RepackStats()
    rows = max(1, _STEP // max(1, width))
    for start in range(0, n, rows):
        strip = packed[start : start + rows]
        # Four lanes of 16 bits, two words per block; the product sums the lanes into the top one.
        lanes = _SQUARES.take(strip.view(np.uint16)).view(np.uint64)
        squares = ((lanes[:, 0::2] + lanes[:, 1::2]) * np.uint64(0x0001000100010001)) >> np.uint64(48)
        total += RepackStats(
            nonzero_codes=int(np.count_nonzero(strip & 0x07) + np.count_nonzero(strip & 0x70)),
            weight_square=_exact_sum(squares.astype(np.int64), scales[start : start + rows]),
        )
    return total
