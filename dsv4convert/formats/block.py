"""Block-scaled weights to BF16: a readable definition of each format, and the decoder `convert` runs.

The definitions (`dequantize_fp8_block`, `dequantize_mxfp4`) multiply in FP32 and round once. `Fp8Decoder`
gives the same bits an order of magnitude faster and says what was wrong with its input. It knows strips
of rows, not tensors, files or names. Importing this module imports torch.

Source: DeepSeek-V4 config ``weight_block_size``; OCP Microscaling Formats v1.0; ``docs/formats.md``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4convert.formats.codes import E2M1, E4M3, FP8_EXACT, UE8M0, count_nan_scales
from dsv4convert.formats.spec import MXFP4, ceil_div, fp8_block

U8 = NDArray[np.uint8]
#: BF16 as raw 16-bit words: int16 or uint16.
Bits16 = NDArray[Any]

#: Inexact blocks a result lists one by one; all are counted.
LISTED_BLOCKS = 64

# Codes per step: enough that five calls per step cost nothing, and a step and its output stay in L3.
_STEP = 1024 * 1024
# Scale bytes for which the factor 2^(byte - 7) of the fast path is a normal BF16 and nothing rounds.
_FAST_LOW, _FAST_HIGH = FP8_EXACT.low, 134
# Sign, four exponent and three mantissa bits of E4M3 at their places in BF16.
_BF16_FIELDS = 0x87F0


def dequantize_fp8_block(codes: Tensor, scales: Tensor, block: tuple[int, int] = (128, 128)) -> Tensor:
    """Decode block-scaled E4M3 weights to BF16.

    ``out[n, k] = E4M3(codes[n, k]) * 2 ** (scales[n // bn, k // bk] - 127)``

    Exact while every scale byte lies in 3..246; outside, the result is rounded to nearest even and may
    reach zero or infinity. NaN codes and scale byte 255 give NaN.

    Args:
        codes: [N, K] uint8 or float8_e4m3fn. N and K need not be multiples of the block.
        scales: [ceil(N / bn), ceil(K / bk)] uint8 or float8_e8m0fnu; multiplies.
        block: (bn, bk) elements per scale.

    Returns:
        [N, K] bfloat16, contiguous, on the device of `codes`. Inputs are not modified.

    Raises:
        ValueError: `scales` is not the grid that `codes` and `block` require.

    Source:
        DeepSeek-V4 config ``weight_block_size``; UE8M0 in OCP Microscaling Formats v1.0.
    """
    n, k = codes.shape
    _require("scales", tuple(scales.shape), fp8_block(*block).grid((n, k)))
    values = _lookup(E4M3, codes)
    factors = _lookup(UE8M0, scales).repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    # FP32 holds every product exactly or as infinity, so BF16 is the only rounding.
    return (values * factors[:n, :k]).to(torch.bfloat16)


def dequantize_mxfp4(packed: Tensor, scales: Tensor) -> Tensor:
    """Decode MXFP4 weights to BF16.

    ``out[n, k] = E2M1(code[n, k]) * 2 ** (scales[n, k // 32] - 127)``

    Exact while every scale byte lies in 0..252; at 253 and 254 large codes become infinity
    (`codes.count_mxfp4_overflow`), 255 gives NaN.

    Args:
        packed: [N, K / 2] uint8 or int8; the low nibble holds the even k.
        scales: [N, K / 32] uint8 or float8_e8m0fnu.

    Returns:
        [N, K] bfloat16, contiguous, on the device of `packed`. Inputs are not modified.

    Raises:
        ValueError: `scales` is not the grid that `packed` requires.

    Source:
        DeepSeek-V4 ``inference/convert.py``; OCP Microscaling Formats v1.0.
    """
    n, k = MXFP4.logical_shape((packed.shape[0], packed.shape[1]))
    _require("scales", tuple(scales.shape), MXFP4.grid((n, k)))
    raw = packed.view(torch.uint8)
    codes = torch.stack((raw & 15, raw >> 4), dim=-1).reshape(n, k)
    factors = _lookup(UE8M0, scales).repeat_interleave(MXFP4.block[1], 1)[:, :k]
    return (_lookup(E2M1, codes) * factors).to(torch.bfloat16)


def _require(what: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise ValueError(f"{what} must be {list(expected)}, got {list(found)}")


def _lookup(table: NDArray[np.float64], codes: Tensor) -> Tensor:
    values = torch.tensor(table, dtype=torch.float32, device=codes.device)
    return values[codes.view(torch.uint8).long()]


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


class Fp8Decoder:
    """Decode strips of block-scaled E4M3 rows of one width to BF16, without temporaries per call.

    An E4M3 code, shifted to the places of the BF16 fields, reads as its value times 2^-120, subnormals and
    signed zero included. One BF16 multiplication by ``2 ** (120 + byte - 127)`` then gives the weight, and
    that factor is itself a BF16 number up to byte 134. Blocks outside 3..134 go through a table of the
    256 products of their byte. Bits equal those of `dequantize_fp8_block`; a NaN keeps the sign of its code.

    One object serves one thread. Call ``torch.set_num_threads(1)`` when several run at once.

    Args:
        block: (bn, bk) elements per scale.
        k: Codes per row.

    Raises:
        RuntimeError: this thread flushes denormals (``torch.set_flush_denormal``), which loses codes.
    """

    def __init__(self, block: tuple[int, int], k: int) -> None:
        if not (torch.tensor([2.0**-133], dtype=torch.bfloat16) * 1.0).item():
            raise RuntimeError("denormals are flushed: call torch.set_flush_denormal(False)")
        self._bn, self._bk = block
        self._k = k
        self._columns = ceil_div(k, self._bk)
        rows = max(1, _STEP // k)
        self._step = rows // self._bn * self._bn or rows
        factors = np.empty((ceil_div(self._step, self._bn), self._columns, self._bk), np.int16)
        self._factor_bits = factors
        flat = torch.from_numpy(factors).view(torch.bfloat16).view(len(factors), 1, -1)
        self._factors = flat[:, :, :k]

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
        has_nan = False
        for start, stop in self._steps(rows):
            piece = codes[start:stop]
            # 0xFF is the largest uint8 and 0x7F the largest int8: two maxima find every NaN code.
            has_nan |= bool(piece.max() == 0xFF) or bool(piece.view(np.int8).max() == 0x7F)
            scale_rows = scales[start // self._bn : ceil_div(stop, self._bn)]
            self._decode_step(piece, scale_rows, bits[start:stop])
        stats = self._rescue_blocks(codes, scales, bits, row)
        return stats + _mark_nan(codes, bits, row) if has_nan else stats

    def _steps(self, rows: int) -> Iterator[tuple[int, int]]:
        """Cut rows into steps of whole block rows, or of parts of one block row."""
        bn, start = self._bn, 0
        border = rows // bn * bn
        while start < rows:
            whole = self._step >= bn and start < border
            stop = min(start + self._step, border if whole else start // bn * bn + bn, rows)
            yield start, stop
            start = stop

    def _decode_step(self, codes: U8, scales: U8, bits: NDArray[np.int16]) -> None:
        exponents = np.minimum(scales, _FAST_HIGH).astype(np.int16) + 120
        self._factor_bits[: len(scales)] = (exponents << 7)[:, :, None]
        np.copyto(bits, codes.view(np.int8))
        # Bits that a wide shift carries into the next lane land in its low four bits, which are masked.
        lanes = bits.reshape(-1)
        lanes = lanes.view(np.int64) if lanes.size % 4 == 0 else lanes
        fields = np.array([_BF16_FIELDS] * 4, np.uint16).view(lanes.dtype)[0]
        np.left_shift(lanes, 4, out=lanes)
        np.bitwise_and(lanes, fields, out=lanes)
        weights = torch.from_numpy(bits).view(torch.bfloat16).view(len(scales), -1, self._k)
        weights.mul_(self._factors[: len(scales)])

    def _rescue_blocks(self, codes: U8, scales: U8, bits: NDArray[np.int16], row: int) -> Fp8Stats:
        """Decode the blocks outside the fast range again, exactly, and report on them."""
        if not scales.size or (scales.min() >= _FAST_LOW and scales.max() <= _FAST_HIGH):
            return Fp8Stats()
        inexact: list[InexactBlock] = []
        first_row = row // self._bn
        for r, c in np.argwhere((scales < _FAST_LOW) | (scales > _FAST_HIGH)).tolist():
            place = np.s_[r * self._bn : (r + 1) * self._bn, c * self._bk : (c + 1) * self._bk]
            scale = int(scales[r, c])
            products, rounds = _products(scale)
            bits[place] = products[codes[place]]
            if rounds is not None and rounds[codes[place]].any():
                inexact.append(InexactBlock(first_row + r, c, scale))
        nans, first = count_nan_scales(scales)
        return Fp8Stats(
            nan_scales=nans,
            first_nan_scale=(first_row + first[0], first[1]) if first else None,
            inexact_blocks=len(inexact),
            inexact=tuple(inexact[:LISTED_BLOCKS]),
        )


@lru_cache(maxsize=256)
def _products(scale: int) -> tuple[NDArray[np.int16], NDArray[np.bool_] | None]:
    """Return the BF16 bits of all 256 codes at one scale byte, and which of them are not exact, if any."""
    true = E4M3 * UE8M0[scale]
    rounded = torch.from_numpy(true).to(torch.float32).to(torch.bfloat16)
    with np.errstate(invalid="ignore"):
        inexact = (rounded.double().numpy() != true) & ~np.isnan(true)
    return rounded.view(torch.int16).numpy(), inexact if inexact.any() else None


def _mark_nan(codes: U8, bits: NDArray[np.int16], row: int) -> Fp8Stats:
    """Replace the numbers that the bit trick makes of NaN codes, and report them."""
    mask = (codes & 0x7F) == 0x7F
    bits[mask] = np.where(codes[mask] == 0xFF, 0xFFC0, 0x7FC0).astype(np.uint16).view(np.int16)
    first = np.unravel_index(int(mask.argmax()), mask.shape)
    return Fp8Stats(nan_codes=int(mask.sum()), first_nan=(row + int(first[0]), int(first[1])))
