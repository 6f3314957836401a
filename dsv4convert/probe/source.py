"""The weights of a checkpoint of any layout, read when they are needed and decoded exactly.

Nothing is kept: every call reads (`pread`, no mapped memory), and a process holds what its caller holds.

Decoded weights are BF16, which holds every one of them exactly: FP8 blocks with scale bytes 3..246, MXFP4
blocks with scale bytes 0..252, and INT8_SHIFT always. Outside these ranges FP8 and MXFP4 round as the
conversion does, so an official checkpoint and its ``mxfp4`` output give the same bits.

Source: ``docs/formats.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4convert.formats.codes import E2M1, UE8M0
from dsv4convert.formats.fp8 import Fp8Decoder
from dsv4convert.formats.spec import GROUP, MXFP4, ceil_div
from dsv4convert.header import TensorInfo
from dsv4convert.names import Layout, Unit
from dsv4convert.survey import Survey
from dsv4convert.table import Storage

if TYPE_CHECKING:
    from kernels_ref.source import Expert

Bytes = NDArray[np.uint8]

_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I64": torch.int64,
}
_BLOCK: Final = MXFP4.block[1]
_STRIP: Final = 16 << 20


class CheckpointSource:
    """Reads and decodes the tensors of one checkpoint by their official names.

    A weight is asked for by the name that the official release gives it, whatever the layout: a dense weight
    may lie as FP8 with scales or as BF16, a routed expert as MXFP4 or as INT8_SHIFT.

    Args:
        seen: A survey without errors.
    """

    def __init__(self, seen: Survey) -> None:
        self.layout = seen.layout or Layout.OFFICIAL
        self._tensors = seen.checkpoint.tensors
        self._units = {unit.base: unit for unit in seen.units}
        self._reader = seen.checkpoint.reader()

    def __enter__(self) -> CheckpointSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.close()

    def tensor(self, name: str) -> Tensor:
        """Return a weight, decoded, in a dtype that holds it exactly.

        Args:
            name: Official name of a plain tensor, of a dense weight or of a routed expert's weight.

        Returns:
            BF16 of the logical shape for everything quantized; everything else as it is stored.

        Raises:
            KeyError: no such weight.
            EnvironmentFault: reading failed.
        """
        unit = self._unit(name)
        parts = [self._tensors[part] for part in unit.stored(self.layout)]
        if unit.row.storage is Storage.EXPERT_MXFP4:
            decode = self._int8_shift if self.layout is Layout.INT8 else self._mxfp4
            return decode(unit.shape[1], *parts)
        if len(parts) == 2:
            return self._fp8(unit.block, *parts)
        return self._plain(parts[0], 0, parts[0].nbytes).reshape(parts[0].shape)

    def expert(self, prefix: str, index: int) -> Expert:
        """Return a routed expert of a block, ``layers.N`` or ``mtp.N``, as numbers in BF16."""
        from kernels_ref.source import Expert

        return Expert(*(self.tensor(f"{prefix}.ffn.experts.{index}.{w}.weight") for w in ("w1", "w2", "w3")))

    def _unit(self, name: str) -> Unit:
        return self._units.get(name) or self._units[name.removesuffix(".weight")]

    def _read(self, info: TensorInfo, start: int = 0, count: int | None = None) -> Bytes:
        data = np.empty(info.nbytes if count is None else count, np.uint8)
        self._reader.pread_into(info, start, data.data)
        return data

    def _plain(self, info: TensorInfo, start: int, count: int) -> Tensor:
        return torch.from_numpy(self._read(info, start, count)).view(_DTYPES[info.dtype])

    def _fp8(self, block: tuple[int, int], weight: TensorInfo, scale: TensorInfo) -> Tensor:
        (n, k), rows = weight.shape, block[0]
        scales = self._read(scale).reshape(scale.shape)
        out = np.empty((n, k), np.int16)
        decoder = Fp8Decoder(block, k)
        step = max(rows, _STRIP // k // rows * rows)
        for row in range(0, n, step):
            count = min(step, n - row)
            codes = self._read(weight, row * k, count * k).reshape(count, k)
            strip = scales[row // rows : ceil_div(row + count, rows)]
            decoder.decode(codes, strip, out[row : row + count], row=row)
        return torch.from_numpy(out).view(torch.bfloat16)

    def _mxfp4(self, k: int, weight: TensorInfo, scale: TensorInfo) -> Tensor:
        codes = self._read(weight).reshape(-1, k // 2)
        return _scaled(codes, torch.from_numpy(_SCALES[self._read(scale).reshape(scale.shape)]))

    def _int8_shift(self, k: int, codes: TensorInfo, shift: TensorInfo, channel: TensorInfo) -> Tensor:
        n, groups = shift.shape
        # A 32-bit word of a group holds four codes of its first half below four of its second.
        words = self._read(codes).view(np.uint16).reshape(n, groups, GROUP // 8, 2)
        packed = np.ascontiguousarray(words.swapaxes(2, 3)).view(np.uint8).reshape(n, -1)
        shifts = self._read(shift).reshape(n, groups, 1) >> np.arange(0, 8, 2, dtype=np.uint8) & 3
        scale = self._plain(channel, 0, channel.nbytes).numpy()
        # Shifts count from integers, which are twice what E2M1 codes stand for.
        factors = np.ldexp(scale[:, None], shifts.reshape(n, -1).astype(np.int32) + 1)
        return _scaled(packed, torch.from_numpy(factors))[:, :k]


def _bf16_pairs() -> NDArray[np.uint32]:
    """Return, for each packed byte, the BF16 bits of its two codes, that of the low nibble first."""
    byte = np.arange(256)
    both = np.stack([E2M1[byte & 15], E2M1[byte >> 4]], axis=1).astype(np.float32)
    pairs: NDArray[np.uint32] = (both.view(np.uint32) >> 16).astype(np.uint16).view(np.uint32).reshape(256)
    return pairs


_PAIRS: Final = _bf16_pairs()
_SCALES: Final = UE8M0.astype(np.float32)


def _scaled(packed: Bytes, factors: Tensor) -> Tensor:
    """Return [N, K] BF16: E2M1 codes, two to a byte, times a power of two [N, K / 32] F32 per block."""
    values = torch.from_numpy(np.take(_PAIRS, packed).view(np.int16)).view(torch.bfloat16)
    return values.view(*factors.shape, _BLOCK).mul_(factors.bfloat16()[..., None]).view(len(packed), -1)
