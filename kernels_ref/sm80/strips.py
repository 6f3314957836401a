"""Strips of a conversion on the GPU, several at a time: copy in, convert, copy out, while others are read.

Each strip has a lane: a stream, page-locked memory that its input is read into, and memory on the card. What
the kernels do not report (where the first NaN is, which blocks are inexact) is left to the CPU, which decodes
such a strip again; official weights have none. So bytes and statistics are those of the CPU, always.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4convert.formats.codes import FP8_EXACT, SCALE_NAN
from dsv4convert.formats.fp8 import Fp8Decoder, Fp8Stats
from dsv4convert.formats.int8_shift import RepackStats
from dsv4convert.formats.repack import Repacker
from kernels_ref.sm80.convert import dequantize_fp8_block, repack_mxfp4
from kernels_ref.sm80.figures import COUNTS, RepackFigures
from kernels_ref.tensors import Int8Shift

Bytes = NDArray[np.uint8]


class _Lane:
    """Room for one strip, by name and grown as needed: on the host page-locked, on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: dict[tuple[str, str], Tensor] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def host(self, name: str, size: int) -> Tensor:
        """Return `size` bytes of the host that the card can reach directly."""
        return self._room(name, "cpu", size)

    def card(self, name: str, size: int) -> Tensor:
        """Return `size` bytes on the device."""
        return self._room(name, "card", size)

    def _room(self, name: str, kind: str, size: int) -> Tensor:
        found = self._memory.get((name, kind))
        if found is None or found.numel() < size:
            if kind == "card":
                found = torch.empty(size, dtype=torch.uint8, device=self._device)
            else:
                found = torch.empty(size, dtype=torch.uint8, pin_memory=self._stream is not None)
            self._memory[name, kind] = found
        return found[:size]

    def upload(self, name: str, data: Bytes) -> Tensor:
        """Copy an array, which need not be page-locked, to the card through a page-locked copy of it."""
        source = self.host(name, data.size)
        source.numpy()[:] = data.reshape(-1)
        return self.card(name, data.size).copy_(source, non_blocking=True)

    def on(self) -> AbstractContextManager[Any]:
        """Let what follows run in the order of this lane, beside the other lanes."""
        return torch.cuda.stream(self._stream) if self._stream else nullcontext()

    def wait(self) -> None:
        """Wait for everything that was begun on this lane."""
        if self._stream:
            self._stream.synchronize()


class StripDecoder:
    """Decodes and repacks strips on the GPU; an implementation of `dsv4convert.decoder.Decoder`.

    Args:
        device: Where the kernels run: ``cuda``, or ``cpu`` where they are interpreted.
    """

    depth = 2

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._lanes = [_Lane(self._device) for _ in range(self.depth + 1)]
        self._turn = 0
        self.finish: Callable[[memoryview], None] | None = None

    def allocate(self, size: int) -> memoryview:
        """Return page-locked memory, which the card writes to directly."""
        pinned = self._device.type == "cuda"
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned).numpy().data

    def staging(self, size: int) -> Bytes:
        """Return the input of the next lane; its last strip must be out of flight."""
        self._turn = (self._turn + 1) % len(self._lanes)
        return self._lanes[self._turn].host("input", size).numpy()

    def fp8(
        self, block: tuple[int, int], codes: Bytes, scales: Bytes, out: NDArray[Any], row: int
    ) -> Callable[[], Fp8Stats]:
        """Begin to decode the strip that was read into the last `staging`; see `Decoder`."""

        def on_cpu() -> Fp8Stats:
            return Fp8Decoder(block, codes.shape[1]).decode(codes, scales, out, row=row)

        square = not any(side & (side - 1) for side in block) and block[1] >= 4
        if not square or not codes.size or FP8_EXACT.outside(scales).any():
            stats = on_cpu()
            return lambda: stats
        lane = self._lanes[self._turn]
        with lane.on():
            source = lane.card("input", codes.size).copy_(lane.host("input", codes.size), non_blocking=True)
            grid = lane.upload("scales", scales).view(scales.shape)
            nans = lane.card("nans", 4).zero_()
            bits = lane.card("output", out.nbytes).view(torch.int16).view(codes.shape)
            dequantize_fp8_block(
                source.view(codes.shape), grid, block, out=bits, nan_codes=nans.view(torch.int32)
            )
            torch.from_numpy(out).copy_(bits, non_blocking=True)
            found = lane.host("nans", 4).copy_(nans, non_blocking=True)

        def wait() -> Fp8Stats:
            lane.wait()
            return on_cpu() if found.view(torch.int32).item() else Fp8Stats()

        return wait

    def mxfp4(
        self,
        packed: Bytes,
        scales: Bytes,
        out: Bytes,
        shift2: Bytes,
        channel_scale: NDArray[np.float32],
        row: int,
    ) -> Callable[[], RepackStats]:
        """Begin to repack the strip that was read into the last `staging`; see `Decoder`."""
        if not packed.size or scales.max() == SCALE_NAN:
            repacker = Repacker(2 * packed.shape[1])
            stats = repacker.repack(packed, scales, out, shift2, channel_scale, row=row)
            return lambda: stats
        lane, rows = self._lanes[self._turn], len(packed)
        # Everything small comes back in one copy: figures by rows, row scales, counts, shifts.
        sizes = (8 * COUNTS, 4 * rows, 6 * rows, shift2.size)
        small = lane.card("small", sum(sizes))
        counts, channels, exponents, shifts = small.split(sizes)
        with lane.on():
            source = lane.card("input", packed.size).copy_(lane.host("input", packed.size), non_blocking=True)
            grid = lane.upload("scales", scales).view(scales.shape)
            counts.zero_()
            codes = lane.card("output", out.size).view(out.shape)
            target = Int8Shift(codes, shifts.view(shift2.shape), channels.view(torch.float32))
            figures = RepackFigures(exponents.view(torch.int16).view(3, rows), counts.view(torch.int64))
            repack_mxfp4(source.view(packed.shape), grid, out=target, figures=figures)
            torch.from_numpy(out).copy_(codes, non_blocking=True)
            back = lane.host("small", sum(sizes)).copy_(small, non_blocking=True)

        def wait() -> RepackStats:
            lane.wait()
            counts, channels, exponents, shifts = back.split(sizes)
            shift2[:] = shifts.view(shift2.shape).numpy()
            channel_scale[:] = channels.view(torch.float32).numpy()
            met = RepackFigures(exponents.view(torch.int16).view(3, rows), counts.view(torch.int64))
            return met.stats(scales.size, row)

        return wait
