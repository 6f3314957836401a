"""What a conversion does to numbers: FP8_BLOCK to BF16 and MXFP4 to INT8_SHIFT, on tensors.

Source: ``docs/formats.md``, sections FP8_BLOCK and INT8_SHIFT.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dsv4convert.formats.block import dequantize_fp8_block
from dsv4convert.formats.repack import Repacker
from dsv4convert.formats.spec import INT8_SHIFT, MXFP4
from kernels_ref.arguments import expect
from kernels_ref.tensors import Int8Shift

__all__ = ["dequantize_fp8_block", "repack_mxfp4"]


def repack_mxfp4(packed: Tensor, scale: Tensor) -> Int8Shift:
    """Repack MXFP4 weights; what rounds, rounds to the nearest value and of two equally near to the smaller.

    Args:
        packed: [..., N, K / 2] uint8 or int8; the low nibble holds the even k.
        scale: [..., N, K / 32] uint8 or float8_e8m0fnu. With a byte of 255 the result means nothing.

    Returns:
        Codes, shifts and row scales on the device of `packed`; ``[..., N, ceil(K / 128) * 64]`` and so on.

    Raises:
        ValueError: `scale` is not the grid of `packed`, or a tensor of another dtype.
    """
    sizes = (None,) * max(packed.dim(), 2)
    expect("packed", packed, (torch.uint8, torch.int8), sizes)
    expect("scale", scale, (torch.uint8, torch.float8_e8m0fnu), sizes)
    lead, (n, k) = packed.shape[:-1], MXFP4.logical_shape((packed.shape[-2], packed.shape[-1]))
    if tuple(scale.shape) != (*packed.shape[:-2], *MXFP4.grid((n, k))):
        raise ValueError(f"scale must be the grid of packed {list(packed.shape)}, got {list(scale.shape)}")
    rows, groups = lead.numel(), INT8_SHIFT.groups(k)
    source = packed.view(torch.uint8).cpu().reshape(rows, k // 2).numpy()
    scales = scale.view(torch.uint8).cpu().reshape(rows, k // 32).numpy()
    codes, shift2 = np.empty((rows, groups * 64), np.uint8), np.empty((rows, groups), np.uint8)
    channel_scale = np.empty(rows, np.float32)
    Repacker(k).repack(np.ascontiguousarray(source), scales, codes, shift2, channel_scale)
    results = (torch.from_numpy(a).to(packed.device) for a in (codes, shift2, channel_scale))
    return Int8Shift(*(a.reshape(*lead, *a.shape[1:]) for a in results))
