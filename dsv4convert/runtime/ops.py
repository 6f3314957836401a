"""The kernels a patch calls: Triton on a card, the torch references on CPU, under the same names.

The references serve the contract tests, which drive SGLang's own code without a GPU.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor

#: Function -> module of ``kernels_ref`` and, under the same name, of ``kernels_ref.sm80``.
_HOME: Final = {
    "fused_moe": "moe",
    "index_logits": "indexer",
    "quantize_index_queries": "indexer",
    "repack_mxfp4": "convert",
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
