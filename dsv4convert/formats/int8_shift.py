"""INT8_SHIFT: remapped E2M1 codes, a 2-bit shift per 32 codes, one F32 scale per row.

``weight[n, k] = channel_scale[n] * (lut2[code[n, k]] << shift[n, k // 32])``

Holds the packing ``g128-split64``, the way to numbers, the definition of the repack from MXFP4 and its error
report. The code that `convert` runs is `repack.Repacker`, which is judged by `repack_reference` and shares
nothing with it. numpy only.

Source: ``docs/formats.md``, section INT8_SHIFT.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsv4convert.formats.codes import E2M1, LUT2, pack_e2m1, unpack_e2m1
from dsv4convert.formats.spec import INT8_SHIFT, MXFP4

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]

#: Codes per block scale.
BLOCK = MXFP4.block[1]
#: channel_scale = 2^(e_max - 131) is a normal F32 from here on.
LOW_EXPONENT = 5


def require_shape(what: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raise `ValueError` unless `found` is `expected`."""
    if found != expected:
        raise ValueError(f"{what} must be {list(expected)}, got {list(found)}")


def codes_shape(rows: int, k: int) -> tuple[int, int]:
    """Return the shape of ``weight_codes``, [rows, ceil(K / 128) * 64]."""
    return rows, INT8_SHIFT.groups(k) * INT8_SHIFT.group // 2


def pack_codes(codes: U8) -> U8:
    """Pack E2M1 codes in the order ``g128-split64``.

    In a group of 128, the little-endian 32-bit word w holds k = 4w..4w+3 in nibbles 0..3 and
    k = 64+4w..64+4w+3 in nibbles 4..7.

    Args:
        codes: [N, K] uint8, each 0..15; K is zero-padded to whole groups.

    Returns:
        [N, ceil(K / 128) * 64] uint8.
    """
    n, k = codes.shape
    padded = np.zeros((n, INT8_SHIFT.groups(k) * INT8_SHIFT.group), np.uint8)
    padded[:, :k] = codes
    halves = padded.reshape(n, -1, 2, 16, 4)  # [N, group, half, word, k]
    return pack_e2m1(halves.swapaxes(2, 3).reshape(n, -1))


def unpack_codes(packed: U8, k: int) -> U8:
    """Return the [N, K] codes of a packed [N, ceil(K / 128) * 64] tensor; inverse of `pack_codes`.

    Raises:
        ValueError: the width of `packed` is not that of K codes.
    """
    n = len(packed)
    require_shape("codes", packed.shape, codes_shape(n, k))
    words = unpack_e2m1(packed).reshape(n, -1, 16, 2, 4)  # [N, group, word, half, k]
    return words.swapaxes(2, 3).reshape(n, -1)[:, :k]


def decode_int8_shift(codes: U8, shift2: U8, k: int) -> NDArray[np.int8]:
    """Return the integers ``lut2[code] << shift`` of INT8_SHIFT rows, each within -96..96.

    Args:
        codes: [N, ceil(K / 128) * 64] uint8 in the order ``g128-split64``.
        shift2: [N, ceil(K / 128)] uint8; block b of a group at bits 2b.
        k: Codes per row.

    Returns:
        [N, K] int8. Times ``channel_scale[n]`` it is the weight, exactly, in FP32 and in BF16.

    Raises:
        ValueError: a shape does not fit.
    """
    n = len(codes)
    require_shape("shift2", shift2.shape, (n, INT8_SHIFT.groups(k)))
    shifts = (shift2[:, :, None] >> np.arange(0, 8, 2, dtype=np.uint8)) & np.uint8(3)
    per_code = shifts.reshape(n, -1).repeat(BLOCK, axis=1)[:, :k]
    return LUT2[unpack_codes(codes, k)] << per_code.view(np.int8)


def repack_reference(packed: U8, scales: U8) -> tuple[U8, U8, F32]:
    """Repack MXFP4 rows from the definition, code by code in float64; slow.

    A row takes the smallest channel scale that lets every block keep its value after as many doublings as
    its largest code and a shift of 3 allow. Each code becomes the nearest one its block can express, the
    smaller of two equally near ones.

    Args:
        packed: [N, K / 2] uint8, low nibble first.
        scales: [N, K / 32] uint8.

    Returns:
        ``weight_codes`` uint8 [N, ceil(K / 128) * 64], ``weight_shift2`` uint8 [N, ceil(K / 128)] and
        ``channel_scale`` float32 [N].

    Source:
        ``docs/formats.md``, section INT8_SHIFT.
    """
    n, k = MXFP4.logical_shape((packed.shape[0], packed.shape[1]))
    codes = np.zeros((n, k), np.uint8)
    shift2 = np.zeros((n, INT8_SHIFT.groups(k)), np.uint8)
    channel_scale = np.zeros(n, np.float32)
    doubled = E2M1[unpack_e2m1(packed)] * 2
    for row in range(n):
        blocks = {b: v for b, v in enumerate(doubled[row].reshape(-1, BLOCK)) if v.any()}
        e_max = max((int(scales[row, b]) - _spare_doublings(v) for b, v in blocks.items()), default=None)
        if e_max is None:
            continue
        channel_scale[row] = math.ldexp(1.0, e_max - 131)
        for b, values in blocks.items():
            delta = e_max - int(scales[row, b])
            shift = min(3, max(0, 3 - delta))
            shift2[row, b // 4] |= shift << 2 * (b % 4)
            # Weight over channel scale and shift: what the table entry of the code should be.
            targets = values * 2.0 ** (3 - delta - shift)
            codes[row, b * BLOCK : (b + 1) * BLOCK] = [_nearest_code(t) for t in targets]
    return pack_codes(codes), shift2, channel_scale


def _spare_doublings(doubled: NDArray[np.float64]) -> int:
    return max(t for t in range(4) if np.abs(doubled).max() * 2**t <= 12)


def _nearest_code(target: float) -> int:
    magnitude = min(range(8), key=lambda c: (abs(float(LUT2[c]) - abs(target)), c))
    return magnitude | 8 if magnitude and target < 0 else magnitude


@dataclass(frozen=True, slots=True)
class RepackStats:
    """What a repack did; the sum of the results of all strips is the result of the tensor, in any order.

    Sums of squares are integers in units of 2^-256, so they are exact and do not depend on strips.

    Attributes:
        rows, zero_rows: Rows, and rows whose codes are all zero.
        low_rows: Non-zero rows with e_max < 5, whose channel scale is not a normal F32.
        first_low_row: The first of them.
        wide_rows: Rows with a raw span above 3.
        max_span: Largest difference of raw scale bytes between non-zero blocks of one row.
        spans: Rows that are not all zero, counted by that difference: 0, 1, 2, ... up to `max_span`.
        blocks, zero_blocks: Blocks of 32 codes, and those whose codes are all zero.
        doubled_blocks: Blocks with delta < 0: other codes, same values.
        rounded_blocks: Blocks with delta 4, 5, 6, 7 and 8 or more.
        codes_changed: Codes that no longer stand for their value.
        codes_flushed: Those of them that became zero.
        worst_block: Largest relative error (root of squares) of a block; 1 when a block was flushed.
        error_square: Sum of the squared errors, in units of 2^-256.
        nan_scales: Scale bytes 255.
        first_nan_scale: (row, block) of the first of them.
        nonzero_codes: Codes that are not zero; only counted by `weigh`.
        weight_square: Sum of the squared weights, in units of 2^-256; only counted by `weigh`.
    """

    rows: int = 0
    zero_rows: int = 0
    low_rows: int = 0
    first_low_row: int | None = None
    wide_rows: int = 0
    max_span: int = 0
    spans: tuple[int, ...] = ()
    blocks: int = 0
    zero_blocks: int = 0
    doubled_blocks: int = 0
    rounded_blocks: tuple[int, ...] = (0, 0, 0, 0, 0)
    codes_changed: int = 0
    codes_flushed: int = 0
    worst_block: float = 0.0
    error_square: int = 0
    nan_scales: int = 0
    first_nan_scale: tuple[int, int] | None = None
    nonzero_codes: int = 0
    weight_square: int = 0

    def __add__(self, other: RepackStats) -> RepackStats:
        total: dict[str, Any] = {}
        for field in fields(self):
            a, b = getattr(self, field.name), getattr(other, field.name)
            total[field.name] = _MERGE.get(field.name, operator.add)(a, b)
        return RepackStats(**total)

    @property
    def exact(self) -> bool:
        """True when every code stands for exactly its value."""
        return self.codes_changed == 0

    @property
    def exact_share(self) -> float:
        """Share of the non-zero codes that stand for exactly their value.

        Raises:
            ValueError: something rounded and the tensor was not weighed.
        """
        return 1.0 if self.exact else 1.0 - self.codes_changed / self._weighed(self.nonzero_codes)

    @property
    def relative_error(self) -> float:
        """Root of (sum of squared errors / sum of squared weights).

        Raises:
            ValueError: something rounded and the tensor was not weighed.
        """
        # The quotient of two ints is correctly rounded, whatever their size: the same on every machine.
        return 0.0 if self.exact else math.sqrt(self.error_square / self._weighed(self.weight_square))

    def _weighed(self, total: int) -> int:
        if not total:
            raise ValueError("codes were rounded: add `weigh` of the same rows to compare with")
        return total

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form: fields without the raw sums, with `exact_share` and `relative_error`.

        Raises:
            ValueError: something rounded and the tensor was not weighed.
        """
        form = asdict(self)
        del form["error_square"], form["weight_square"]
        if not self.nonzero_codes:
            form["nonzero_codes"] = None
        return form | {"exact_share": self.exact_share, "relative_error": self.relative_error}


def _first(a: Any, b: Any) -> Any:
    return min((place for place in (a, b) if place is not None), default=None)


def _add_each(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip_longest(a, b, fillvalue=0))


# How a field of two strips becomes one; what is not named here adds up.
_MERGE: Mapping[str, Callable[[Any, Any], Any]] = {
    "first_low_row": _first,
    "first_nan_scale": _first,
    "max_span": max,
    "worst_block": max,
    "rounded_blocks": _add_each,
    "spans": _add_each,
}
