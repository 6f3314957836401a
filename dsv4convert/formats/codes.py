"""One code, one number: E4M3, E2M1, UE8M0, and where a product of two of them is exact in BF16.

Knows single codes, the two codes of a packed byte, and single scale bytes. Knows nothing of blocks,
rows or tensors, and imports numpy only. All tables are computed from the bit fields and are read-only.

Source: OCP Microscaling Formats v1.0 (E4M3, E2M1, E8M0); DeepSeek-V4 ``inference/convert.py`` (packing).
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
_Number = TypeVar("_Number", bound=np.generic)

#: UE8M0 byte that stands for NaN.
SCALE_NAN = 255


class Window(NamedTuple):
    """Scale bytes, both ends included, for which every code of a format is exact in BF16."""

    low: int
    high: int

    def outside(self, scales: U8) -> NDArray[np.bool_]:
        """Return where `scales` (uint8, any shape) leave the window; 255 always does."""
        return (scales < self.low) | (scales > self.high)


#: E4M3 times 2^(byte - 127): below 3 the smallest codes round or vanish, above 246 code 448 overflows.
FP8_EXACT = Window(3, 246)
#: E2M1 times 2^(byte - 127): exact down to byte 0; at 253 a code of 4 overflows.
MXFP4_EXACT = Window(0, 252)


def _frozen(table: NDArray[_Number]) -> NDArray[_Number]:
    table.setflags(write=False)
    return table


def _minifloat(exponent_bits: int, mantissa_bits: int, bias: int) -> NDArray[np.float64]:
    """Return the value of every code of a sign-exponent-mantissa format, ignoring special codes."""
    code = np.arange(1 << (1 + exponent_bits + mantissa_bits))
    mantissa = code & ((1 << mantissa_bits) - 1)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    significand = mantissa + np.where(exponent > 0, 1 << mantissa_bits, 0)
    magnitude = np.ldexp(significand.astype(np.float64), np.maximum(exponent, 1) - bias - mantissa_bits)
    values: NDArray[np.float64] = np.where(code >> (exponent_bits + mantissa_bits), -magnitude, magnitude)
    return values


def _e4m3() -> NDArray[np.float64]:
    values = _minifloat(exponent_bits=4, mantissa_bits=3, bias=7)
    values[[0x7F, 0xFF]] = np.nan
    return values


def _ue8m0() -> NDArray[np.float64]:
    values: NDArray[np.float64] = np.ldexp(1.0, np.arange(256) - 127)
    values[SCALE_NAN] = np.nan
    return values


#: float64 [256]: value of each E4M3 code (fn variant: 0x7F and 0xFF are NaN, no infinity, largest 448).
E4M3: NDArray[np.float64] = _frozen(_e4m3())
#: float64 [16]: value of each E2M1 code; code 8 is -0.
E2M1: NDArray[np.float64] = _frozen(_minifloat(exponent_bits=2, mantissa_bits=1, bias=1))
#: float64 [256]: value of each UE8M0 byte; byte 0 is 2^-127, byte 255 is NaN.
UE8M0: NDArray[np.float64] = _frozen(_ue8m0())
#: int8 [16]: twice the value of each E2M1 code, an integer of magnitude 0, 1, 2, 3, 4, 6, 8, 12.
LUT2: NDArray[np.int8] = _frozen((2 * E2M1).astype(np.int8))


def unpack_e2m1(packed: NDArray[Any]) -> U8:
    """Split packed bytes into codes: ``codes[..., 2i] = low nibble, codes[..., 2i + 1] = high nibble``.

    Args:
        packed: [..., K / 2] uint8 or int8; both storage dtypes give the same codes.

    Returns:
        [..., K] uint8, each 0..15.

    Source:
        DeepSeek-V4 ``inference/convert.py``.
    """
    packed = packed.view(np.uint8)
    codes = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.uint8)
    np.bitwise_and(packed, 15, out=codes[..., 0::2])
    np.right_shift(packed, 4, out=codes[..., 1::2])
    return codes


def pack_e2m1(codes: U8) -> U8:
    """Join codes into bytes, the even one into the low nibble; inverse of `unpack_e2m1`.

    Args:
        codes: [..., K] uint8, each 0..15; K even.

    Returns:
        [..., K / 2] uint8.

    Raises:
        ValueError: K is odd, or a code is above 15.
    """
    if codes.shape[-1] % 2:
        raise ValueError(f"codes must fill whole bytes, got {codes.shape[-1]} per row")
    if codes.size and codes.max() > 15:
        raise ValueError(f"an E2M1 code is 0..15, got {codes.max()}")
    return codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))


def count_nan_scales(scales: U8) -> tuple[int, tuple[int, int] | None]:
    """Count UE8M0 NaN bytes.

    Args:
        scales: [rows, columns] uint8 scale grid.

    Returns:
        The number of bytes 255, and (row, column) of the first one in row-major order or None.
    """
    # The maximum runs at memory speed; the mask is built only when there is something to find.
    if not scales.size or scales.max() != SCALE_NAN:
        return 0, None
    where = np.argwhere(scales == SCALE_NAN)
    return len(where), (int(where[0, 0]), int(where[0, 1]))


def count_mxfp4_overflow(packed: NDArray[Any], scales: U8) -> tuple[int, tuple[int, int] | None]:
    """Count MXFP4 blocks that overflow BF16: a code of 4 or more at scale byte 253, of 2 or more at 254.

    Args:
        packed: [N, K / 2] uint8 or int8.
        scales: [N, K / 32] uint8.

    Returns:
        The number of such blocks, and (row, block) of the first one or None. Byte 255 is not counted
        here (`count_nan_scales`).
    """
    if not scales.size or scales.max() <= MXFP4_EXACT.high:
        return 0, None
    where = np.argwhere((scales > MXFP4_EXACT.high) & (scales != SCALE_NAN))
    blocks = packed.view(np.uint8).reshape(*scales.shape, 16)[where[:, 0], where[:, 1]]
    largest = np.abs(E2M1[unpack_e2m1(blocks)]).max(axis=1)
    # In float64 nothing overflows; 2^128 is the first power of two beyond BF16.
    where = where[largest * UE8M0[scales[where[:, 0], where[:, 1]]] >= 2.0**128]
    return len(where), (int(where[0, 0]), int(where[0, 1])) if len(where) else None
