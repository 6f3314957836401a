"""Block-scaled weights to BF16: a readable definition of each format, in torch.

Both multiply in FP32 and round once. The decoder that `convert` runs is `fp8.Fp8Decoder`, which is judged by
these and shares nothing with them. Importing this module imports torch.

Source: DeepSeek-V4 config ``weight_block_size``; OCP Microscaling Formats v1.0; ``docs/formats.md``.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4convert.formats.codes import E2M1, E4M3, UE8M0
from dsv4convert.formats.spec import MXFP4, fp8_block


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
    if codes.element_size() != 1:
        raise ValueError(f"codes and scales: expected a dtype of one byte, found {codes.dtype}")
    values = torch.tensor(table, dtype=torch.float32, device=codes.device)
    return values[codes.view(torch.uint8).long()]
