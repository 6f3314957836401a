"""Format descriptors: how a logical weight is stored, as data.

A descriptor is the only place that states block, packing and stored dtypes of a format. Nothing may
re-derive these from a dtype: ``I8`` can be packed E2M1 or a real integer, and an E4M3 tensor can carry
128x128, 32x32 or 1x32 scales. Shapes here are tuples of ints; no torch, no numpy.

Source: safetensors 0.8 dtype list; DeepSeek-V4 ``quantization_config``; OCP Microscaling Formats v1.0;
``docs/formats.md`` for INT8_SHIFT.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

#: Bits per element of every safetensors dtype, in the order in which the stock serializer lays
#: tensors out (last first). The order is part of the file format we write.
DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

Shape = tuple[int, ...]
Stored = tuple[str, Shape]  # (safetensors dtype, stored shape)

#: Version name of the packing of ``weight_codes`` and of the rounding rule of the repack.
PACKING = "g128-split64"
ROUNDING = "nearest-ties-to-smaller"

#: Codes of one INT8_SHIFT group: one shift byte, 64 code bytes, and the tensor-parallel granularity.
GROUP = 128


def ceil_div(a: int, b: int) -> int:
    """Return ``ceil(a / b)`` for non-negative ints."""
    return -(-a // b)


# A checkpoint has tens of thousands of tensors and a few dozen shapes.
@lru_cache(maxsize=4096)
def nbytes(dtype: str, shape: Shape) -> int:
    """Return the stored size in bytes of a tensor.

    Raises:
        KeyError: unknown dtype.
        ValueError: the bits do not fill whole bytes.
    """
    bits = prod(shape) * DTYPE_BITS[dtype]
    if bits % 8:
        raise ValueError(f"{dtype} {list(shape)} does not fill whole bytes")
    return bits // 8


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Two tensors per weight: codes and a grid of block scales.

    Attributes:
        name: Name used in reports and in the manifest.
        code: Element code: ``E4M3`` or ``E2M1``.
        dtype: safetensors dtype of the stored codes.
        per_byte: Codes per stored byte along K; the low bits hold the even k.
        scale_dtype: safetensors dtype of the block scales.
        block: (rows, columns) of logical elements that share one scale. The last block of a row or
            column may be partial.
    """

    name: str
    code: str
    dtype: str
    per_byte: int
    scale_dtype: str
    block: tuple[int, int]

    def grid(self, shape: Shape) -> Shape:
        """Return the shape of the scale grid of a logical ``[N, K]`` weight."""
        n, k = shape
        return ceil_div(n, self.block[0]), ceil_div(k, self.block[1])

    def storage_shape(self, shape: Shape) -> Shape:
        """Return the stored shape of the codes of a logical ``[N, K]`` weight.

        Raises:
            ValueError: K does not fill whole bytes or, for a packed format, whole blocks.
        """
        n, k = shape
        if self.per_byte > 1 and k % self.block[1]:
            raise ValueError(f"{self.name} needs K in whole blocks of {self.block[1]}, got {k}")
        return n, k // self.per_byte

    def logical_shape(self, storage: Shape) -> Shape:
        """Return the logical ``[N, K]`` of stored codes; inverse of `storage_shape`."""
        n, k = storage
        return n, k * self.per_byte

    def parts(self, shape: Shape) -> dict[str, Stored]:
        """Return suffix -> (dtype, stored shape) of the tensors that store a logical weight."""
        return {
            ".weight": (self.dtype, self.storage_shape(shape)),
            ".scale": (self.scale_dtype, self.grid(shape)),
        }


@dataclass(frozen=True, slots=True)
class ShiftFormat:
    """INT8_SHIFT: remapped E2M1 codes, a 2-bit shift per 32 codes, one F32 scale per row.

    ``weight[n, k] = channel_scale[n] * (lut2[code[n, k]] << shift[n, k // 32])`` with
    ``lut2 = 0, 1, 2, 3, 4, 6, 8, 12`` and the sign of the code. K is zero-padded to whole groups.
    """

    name: str = "INT8_SHIFT"
    group: int = GROUP

    def groups(self, k: int) -> int:
        """Return the number of groups of a row of K codes."""
        return ceil_div(k, self.group)

    def parts(self, shape: Shape) -> dict[str, Stored]:
        """Return suffix -> (dtype, stored shape) of the tensors that store a logical weight."""
        n, k = shape
        groups = self.groups(k)
        return {
            ".weight_codes": ("U8", (n, groups * self.group // 2)),
            ".weight_shift2": ("U8", (n, groups)),
            ".channel_scale": ("F32", (n,)),
        }


def fp8_block(rows: int, cols: int) -> BlockFormat:
    """Return the descriptor of E4M3 codes with one UE8M0 scale per ``rows x cols`` block."""
    return BlockFormat("FP8_BLOCK", "E4M3", "F8_E4M3", 1, "F8_E8M0", (rows, cols))


#: Packed E2M1 with one UE8M0 scale per 32 codes along K; the low nibble holds the even k.
MXFP4 = BlockFormat("MXFP4", "E2M1", "I8", 2, "F8_E8M0", (1, 32))
INT8_SHIFT = ShiftFormat()
