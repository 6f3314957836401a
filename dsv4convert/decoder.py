"""Where the arithmetic of a conversion is done: the interface, and the CPU behind it.

Knows strips of rows, not tensors or files. Another implementation may still be at work on a strip when the
next one is handed over, and must give the same bytes and the same statistics. numpy only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dsv4convert.formats.fp8 import Fp8Decoder, Fp8Stats
from dsv4convert.formats.int8_shift import RepackStats
from dsv4convert.formats.repack import Repacker, interleave
from dsv4convert.sink import Buffer

Bytes = NDArray[np.uint8]


class Decoder(Protocol):
    """Does the arithmetic of one thread's strips.

    Attributes:
        depth: Strips that may be under way when the result of the oldest is asked for.
        finish: What is still to be done to repacked codes, in the thread that writes them; None for nothing.
    """

    depth: int
    finish: Callable[[memoryview], None] | None

    def allocate(self, size: int) -> Buffer:
        """Return a buffer for output."""

    def staging(self, size: int) -> Bytes:
        """Return where the input of the next strip is read to; valid until its result was asked for."""

    def fp8(
        self, block: tuple[int, int], codes: Bytes, scales: Bytes, out: NDArray[Any], row: int
    ) -> Callable[[], Fp8Stats]:
        """Begin to decode a strip of FP8_BLOCK rows; the arguments are those of `Fp8Decoder.decode`.

        Returns:
            Waits until `out` holds the result and returns the statistics.
        """

    def mxfp4(
        self,
        packed: Bytes,
        scales: Bytes,
        out: Bytes,
        shift2: Bytes,
        channel_scale: NDArray[np.float32],
        row: int,
    ) -> Callable[[], RepackStats]:
        """Begin to repack a strip of MXFP4 rows; the arguments are those of `Repacker.remap`.

        Returns:
            Waits until `out` (after `finish`), `shift2` and `channel_scale` hold the result, and returns the
            statistics without the sums that only `weigh` computes.
        """


class CpuDecoder:
    """Works at once, in the calling thread; the writing thread does its share through `finish`."""

    depth = 0

    def __init__(self) -> None:
        self._scratch = np.empty(0, np.uint8)
        self.finish: Callable[[memoryview], None] | None = _interleave

    def allocate(self, size: int) -> Buffer:
        """Return ordinary memory."""
        return bytearray(size)

    def staging(self, size: int) -> Bytes:
        """Return the same memory for every strip."""
        if size > self._scratch.size:
            self._scratch = np.empty(size, np.uint8)
        return self._scratch[:size]

    def fp8(
        self, block: tuple[int, int], codes: Bytes, scales: Bytes, out: NDArray[Any], row: int
    ) -> Callable[[], Fp8Stats]:
        """Decode a strip."""
        stats = _fp8_decoder(block, codes.shape[1]).decode(codes, scales, out, row=row)
        return lambda: stats

    def mxfp4(
        self,
        packed: Bytes,
        scales: Bytes,
        out: Bytes,
        shift2: Bytes,
        channel_scale: NDArray[np.float32],
        row: int,
    ) -> Callable[[], RepackStats]:
        """Repack a strip, but for the order of the codes."""
        stats = _repacker(2 * packed.shape[1]).remap(packed, scales, out, shift2, channel_scale, row=row)
        return lambda: stats


def _interleave(view: memoryview) -> None:
    interleave(np.frombuffer(view, np.uint8))


@lru_cache(maxsize=32)
def _repacker(k: int) -> Repacker:
    return Repacker(k)


@lru_cache(maxsize=32)
def _fp8_decoder(block: tuple[int, int], k: int) -> Fp8Decoder:
    return Fp8Decoder(block, k)
