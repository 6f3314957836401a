"""FP8_BLOCK to BF16 at memory speed, and what was wrong with the input.

Gives the bits of `block.dequantize_fp8_block`, which defines them. Knows strips of rows, not tensors, files
or names. numpy only: a conversion never loads torch.

Source: ``docs/formats.md``, section FP8_BLOCK.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dsv4convert.formats.codes import E4M3, FP8_EXACT, UE8M0, count_nan_scales
from dsv4convert.formats.spec import ceil_div

U8 = NDArray[np.uint8]
I16 = NDArray[np.int16]
#: BF16 as raw 16-bit words: int16 or uint16.
Bits16 = NDArray[Any]

#: Inexact blocks a result lists one by one; all are counted.
LISTED_BLOCKS = 64

# Codes per step: enough that ten calls per step cost nothing, and a step and its output stay in L3.
_STEP = 1024 * 1024
# Scale bytes for which a normal code stays a normal BF16: exponent field 1..15 plus byte - 7 within 1..254.
_FAST_LOW, _FAST_HIGH = 7, FP8_EXACT.high
# Sign, four exponent and three mantissa bits of E4M3 at their places in BF16.
_BF16_FIELDS = 0x87F0
# Biases: E4M3 7, UE8M0 127, BF16 127; and the BF16 exponent begins at bit 7.
_EXPONENT_OFFSET, _EXPONENT_BIT = -7, 7
#: Magnitudes below this have exponent field zero: subnormal or zero. The largest one is NaN.
_FIRST_NORMAL, _MAGNITUDE = 8, np.uint8(0x7F)
_EACH_BYTE = np.uint64(0x0101010101010101)
_TOP_BIT, _TO_TOP_BIT = _EACH_BYTE * np.uint64(0x80), _EACH_BYTE * np.uint64(0x80 - _FIRST_NORMAL)
_EIGHT = np.arange(8)


@dataclass(frozen=True, slots=True)
class InexactBlock:
    """A block that left BF16: its place in the scale grid and its scale byte."""

    row: int
    column: int
    scale: int


@dataclass(frozen=True, slots=True)
class Fp8Stats:
    """What `Fp8Decoder` met; the sum of two results is the result of both strips, in any order.

    Attributes:
        nan_codes: Codes 0x7F and 0xFF.
        first_nan: (row, column) of the first of them in row-major order.
        nan_scales: Scale bytes 255.
        first_nan_scale: (block row, block column) of the first of them.
        inexact_blocks: Blocks in which a finite product is not a BF16 number.
        inexact: The first `LISTED_BLOCKS` of them in row-major order.
    """

    nan_codes: int = 0
    first_nan: tuple[int, int] | None = None
    nan_scales: int = 0
    first_nan_scale: tuple[int, int] | None = None
    inexact_blocks: int = 0
    inexact: tuple[InexactBlock, ...] = ()

    def __add__(self, other: Fp8Stats) -> Fp8Stats:
        listed = sorted(self.inexact + other.inexact, key=lambda b: (b.row, b.column))
        return Fp8Stats(
            self.nan_codes + other.nan_codes,
            _earlier(self.first_nan, other.first_nan),
            self.nan_scales + other.nan_scales,
            _earlier(self.first_nan_scale, other.first_nan_scale),
            self.inexact_blocks + other.inexact_blocks,
            tuple(listed[:LISTED_BLOCKS]),
        )

    @property
    def clean(self) -> bool:
        """True when the output is exactly the input."""
        return not (self.nan_codes or self.nan_scales or self.inexact_blocks)


def _earlier(a: tuple[int, int] | None, b: tuple[int, int] | None) -> tuple[int, int] | None:
    return min((p for p in (a, b) if p is not None), default=None)


def _bf16_products() -> tuple[I16, NDArray[np.bool_]]:
    """Return [scale byte, code] -> BF16 bits of the product, and whether it had to be rounded."""
    true = UE8M0[:, None] * E4M3[None, :]
    with np.errstate(over="ignore", invalid="ignore"):
        # FP32 holds every product exactly or as infinity, so BF16 is the only rounding, to nearest even.
        single = true.astype(np.float32).view(np.uint32)
        bits = (single + 0x7FFF + (single >> 16 & 1)) >> 16
        rounded = (bits << 16).astype(np.uint32).view(np.float32).astype(np.float64)
        inexact = (rounded != true) & ~np.isnan(true)
    quiet_nan = np.where(np.arange(256) >= 0x80, 0xFFC0, 0x7FC0)
    bits = np.where(np.isnan(true), quiet_nan, bits)
    return bits.astype(np.uint16).view(np.int16), inexact


_PRODUCTS, _ROUNDS = _bf16_products()
_ANY_ROUNDS: Final = frozenset(np.flatnonzero(_ROUNDS.max(axis=1)).tolist())


class Fp8Decoder:
    """Decode strips of block-scaled E4M3 rows of one width to BF16, without temporaries per call.

    An E4M3 code with its fields at the places of BF16 is the code's value with another exponent bias, so for
    a normal code the product with 2^(byte - 127) is one integer addition to the exponent field. Codes whose
    exponent field is zero, few in real weights, and blocks with a scale byte outside 7..246 are taken from a
    table of all 256 x 256 products.

    One object serves one thread.

    Args:
        block: (bn, bk) elements per scale.
        k: Codes per row.
    """

    def __init__(self, block: tuple[int, int], k: int) -> None:
        self._bn, self._bk = block
        self._k = k
        self._columns = ceil_div(k, self._bk)
        rows = max(1, _STEP // max(k, 1))
        self._step = rows // self._bn * self._bn or rows
        # Whole 64-bit words, so that eight codes are looked at together.
        self._magnitude = np.empty(ceil_div(self._step * k, 8) * 8, np.uint8)
        self._lane = np.dtype(np.int64 if k % 4 == 0 else np.int16)
        self._fields = np.full(4, _BF16_FIELDS, np.uint16).view(self._lane)[0]

    def decode(self, codes: U8, scales: U8, out: Bits16, *, row: int = 0) -> Fp8Stats:
        """Decode a strip that starts on a block-row border.

        Args:
            codes: [R, K] uint8, C-contiguous; may be read-only.
            scales: [ceil(R / bn), ceil(K / bk)] uint8, the scale rows of the strip.
            out: [R, K] int16 or uint16, C-contiguous; receives BF16 bits.
            row: Row of the tensor at which the strip starts; only places in the result depend on it.

        Returns:
            What was met in this strip, with places counted from row 0 of the tensor.

        Raises:
            ValueError: a shape does not fit, or `row` is not a multiple of bn.
        """
        rows = len(codes)
        _require("codes", codes.shape, (rows, self._k))
        _require("out", out.shape, (rows, self._k))
        _require("scales", scales.shape, (ceil_div(rows, self._bn), self._columns))
        if row % self._bn:
            raise ValueError(f"a strip starts on a block-row border, got row {row} for blocks of {self._bn}")
        bits = out.view(np.int16)
        addends = self._addends(scales)
        has_nan = False
        for start, stop in self._steps(rows):
            piece, result = codes[start:stop], bits[start:stop]
            blocks = slice(start // self._bn, ceil_div(stop, self._bn))
            self._shift_fields(piece, addends[blocks], result)
            has_nan |= self._look_up_special(piece.reshape(-1), scales[blocks], result.reshape(-1))
        stats = self._rescue_blocks(codes, scales, bits, row)
        return stats + _count_nan(codes, row) if has_nan else stats

    def _addends(self, scales: U8) -> NDArray[Any]:
        """Return, per block row, what is added to the exponent field of each column, in wide lanes."""
        exponents = np.minimum(np.maximum(scales, _FAST_LOW), _FAST_HIGH).astype(np.int16) + _EXPONENT_OFFSET
        wide = (exponents << _EXPONENT_BIT).repeat(self._bk, axis=1)[:, : self._k]
        return np.ascontiguousarray(wide).view(self._lane)

    def _steps(self, rows: int) -> Iterator[tuple[int, int]]:
        """Cut rows into steps of whole block rows, or of parts of one block row."""
        bn, start = self._bn, 0
        border = rows // bn * bn
        while start < rows:
            whole = self._step >= bn and start < border
            stop = min(start + self._step, border if whole else start // bn * bn + bn, rows)
            yield start, stop
            start = stop

    def _shift_fields(self, codes: U8, addends: NDArray[Any], bits: I16) -> None:
        """Decode the normal codes of a step."""
        np.copyto(bits, codes.view(np.int8))
        # Four lanes in a word: what a shift carries into the next lane lands in its low four bits, which are
        # masked; an addition carries nothing, because exponent fields stay below 255.
        lanes = bits.view(self._lane)
        np.left_shift(lanes, 4, out=lanes)
        np.bitwise_and(lanes, self._fields, out=lanes)
        lanes = lanes.reshape(len(addends), -1, addends.shape[1])
        np.add(lanes, addends[:, None], out=lanes)

    def _look_up_special(self, codes: U8, scales: U8, bits: I16) -> bool:
        """Take subnormals, zeros and NaN from the table; return whether there was a NaN."""
        magnitude = self._magnitude[: -(-len(codes) // 8) * 8]
        np.bitwise_and(codes, _MAGNITUDE, out=magnitude[: len(codes)])
        magnitude[len(codes) :] = _FIRST_NORMAL
        has_nan = bool(magnitude.max() == _MAGNITUDE)
        if has_nan:
            special = np.flatnonzero((magnitude < _FIRST_NORMAL) | (magnitude == _MAGNITUDE))
        else:
            # Eight codes at a time: magnitude plus 0x78 has its top bit unless the exponent field is zero.
            words = magnitude.view(np.uint64)
            np.add(words, _TO_TOP_BIT, out=words)
            np.bitwise_and(words, _TOP_BIT, out=words)
            near = (np.flatnonzero(words != _TOP_BIT)[:, None] * 8 + _EIGHT).reshape(-1)
            special = near[magnitude[near] == 0]
        if len(special):
            rows, columns = special // self._k, special % self._k
            scale = scales[rows // self._bn, columns // self._bk]
            bits[special] = _PRODUCTS[scale, codes[special]]
        return has_nan

    def _rescue_blocks(self, codes: U8, scales: U8, bits: I16, row: int) -> Fp8Stats:
        """Decode the blocks outside the fast range again, from the table, and report on them."""
        if not scales.size or (scales.min() >= _FAST_LOW and scales.max() <= _FAST_HIGH):
            return Fp8Stats()
        inexact: list[InexactBlock] = []
        first_row = row // self._bn
        for r, c in np.argwhere((scales < _FAST_LOW) | (scales > _FAST_HIGH)).tolist():
            place = np.s_[r * self._bn : (r + 1) * self._bn, c * self._bk : (c + 1) * self._bk]
            scale = int(scales[r, c])
            bits[place] = _PRODUCTS[scale, codes[place]]
            if scale in _ANY_ROUNDS and _ROUNDS[scale, codes[place]].any():
                inexact.append(InexactBlock(first_row + r, c, scale))
        nans, first = count_nan_scales(scales)
        return Fp8Stats(
            nan_scales=nans,
            first_nan_scale=(first_row + first[0], first[1]) if first else None,
            inexact_blocks=len(inexact),
            inexact=tuple(inexact[:LISTED_BLOCKS]),
        )


def _require(what: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise ValueError(f"{what} must be {list(expected)}, got {list(found)}")


def _count_nan(codes: U8, row: int) -> Fp8Stats:
    mask = (codes & 0x7F) == 0x7F
    first = np.unravel_index(int(mask.argmax()), mask.shape)
    return Fp8Stats(nan_codes=int(mask.sum()), first_nan=(row + int(first[0]), int(first[1])))
