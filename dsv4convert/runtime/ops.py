"""The kernels a patch calls: Triton on a card, the torch references on CPU, under the same names.

The references serve the contract tests, which drive SGLang's own code without a GPU.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor

from dsv4convert.formats.spec import INT8_SHIFT, ceil_div

#: Function -> module of ``kernels_ref`` and, under the same name, of ``kernels_ref.sm80``.
_HOME: Final = {
    "fused_moe": "moe",
    "index_logits": "indexer",
    "quantize_index_queries": "indexer",
    "sparse_attention": "attention",
    "store_index_keys": "indexer",
    "store_kv": "attention",
}


def kernel(name: str, device: torch.device) -> Any:
    """Return the kernel `name` for tensors on `device`.

    Raises:
        KeyError: no such kernel (a bug of the caller).
    """
    return _load(name, device.type)


@cache
def _load(name: str, device: str) -> Any:
    package = "kernels_ref.sm80" if device == "cuda" else "kernels_ref"
    return getattr(import_module(f"{package}.{_HOME[name]}"), name)


def int8_shift(codes: Tensor, shift2: Tensor, channel_scale: Tensor) -> Any:
    """Return the three tensors of a stack of expert matrices as `kernels_ref.tensors.Int8Shift`."""
    from kernels_ref.tensors import Int8Shift

    return Int8Shift(codes, shift2, channel_scale)


def repack_mxfp4(packed: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Repack MXFP4 matrices into INT8_SHIFT, bit for bit as `dsv4convert convert --experts int8` does.

    Args:
        packed: [..., N, K / 2] int8 or uint8, low nibble first.
        scales: [..., N, K / 32] float8_e8m0fnu or uint8.

    Returns:
        ``codes`` [..., N, ceil(K / 128) * 64] uint8, ``shift2`` [..., N, ceil(K / 128)] uint8 and
        ``channel_scale`` [..., N] float32, on the device of `packed`.
    """
    if packed.device.type == "cuda":
        from kernels_ref.sm80.convert import repack_mxfp4 as repack

        codes, shift2, channel_scale = repack(packed, scales)
        return codes, shift2, channel_scale
    return _repack_on_cpu(packed.view(torch.uint8), scales.view(torch.uint8))


def _repack_on_cpu(packed: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from dsv4convert.formats.repack import Repacker

    half = packed.shape[-1]
    rows, groups = packed.numel() // half, ceil_div(2 * half, INT8_SHIFT.group)
    codes = torch.empty(rows, groups * INT8_SHIFT.group // 2, dtype=torch.uint8)
    shift2 = torch.empty(rows, groups, dtype=torch.uint8)
    channel_scale = torch.empty(rows, dtype=torch.float32)
    source = [t.reshape(rows, -1).contiguous().numpy() for t in (packed, scales)]
    Repacker(2 * half).repack(*source, *(t.numpy() for t in (codes, shift2, channel_scale)))
    shape = packed.shape[:-1]
    return codes.view(*shape, -1), shift2.view(*shape, -1), channel_scale.view(shape)
