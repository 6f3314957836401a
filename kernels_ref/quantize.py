"""Quantisers of activations: INT8 per token, E4M3 and E2M1 with power-of-two scales.

The last two are what the official model does to activations, to the KV latent and to the indexer. They
return the numbers the codes stand for ("fake quantisation"), so that the arithmetic around them stays plain.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

#: Largest magnitude of E4M3 and of E2M1.
E4M3_MAX, E2M1_MAX = 448.0, 6.0
#: Values per scale: activations of linear layers, KV latent, indexer.
LINEAR_GROUP, KV_GROUP, INDEX_GROUP = 128, 64, 32
# Lower limits of a group's largest magnitude, so that zeros get a finite scale.
_E4M3_FLOOR, _E2M1_FLOOR = 1e-4, 6 * 2.0**-126
_INDEX_FLOOR = 1e-8
_INT8_MAX = 127.0
# 127 * 256 + 127: the largest number of two digits whose first one stays within -127..127.
_INT16_MAX = 32639.0


def per_token_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows to INT8, symmetric: ``s = max|row| / 127``, ``q = rint(x / s)``, halves to even.

    Args:
        x: [..., K] bfloat16 or float32.

    Returns:
        q [..., K] int8 within -127..127 and s [...] float32; s is 1 for a row of zeros.
    """
    x = x.float()
    largest = x.abs().amax(-1)
    scale = torch.where(largest > 0, largest / _INT8_MAX, torch.ones_like(largest))
    return _to_int8(x, scale), scale


def per_token_int16(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows to two INT8 digits: ``s = max|row| / 32639``, ``256 * high + low = rint(x / s)``.

    The error is 8.9e-6 of the row's largest magnitude (root mean square), so it stays below that of BF16,
    1.7e-3, while the largest is less than 190 times the row's root mean square.

    Args:
        x: [..., K] bfloat16 or float32.

    Returns:
        digits [..., 2, K] int8, high within -127..127 first, low within -128..127, and s [...] float32; s is
        1 for a row of zeros.
    """
    x = x.float()
    largest = x.abs().amax(-1)
    scale = torch.where(largest > 0, largest / _INT16_MAX, torch.ones_like(largest))
    q = (x / scale[..., None]).round().clamp(-_INT16_MAX, _INT16_MAX).to(torch.int32)
    high = (q + 128) >> 8
    return torch.stack([high, q - 256 * high], -2).to(torch.int8), scale


def index_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows of the indexer to INT8; as `per_token_int8`, but with max|row| at least 1e-8.

    Args:
        x: [..., 128] bfloat16 or float32.

    Returns:
        q [..., 128] int8 and s [...] float32.
    """
    x = x.float()
    scale = x.abs().amax(-1).clamp(min=_INDEX_FLOOR) / _INT8_MAX
    return _to_int8(x, scale), scale


def _to_int8(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale[..., None]).round().clamp(-_INT8_MAX, _INT8_MAX).to(torch.int8)


def fake_e4m3(x: Tensor, group: int = LINEAR_GROUP) -> Tensor:
    """Round to E4M3 with one power-of-two scale per `group` values: ``2^ceil(log2(max|x| / 448))``.

    The largest magnitude counts as at least 1e-4, so a group of zeros has scale 2^-22.

    Args:
        x: [..., K] bfloat16 or float32; the last group of a row may be partial.
        group: Values per scale along K: 128 for linear layers, 64 for the KV latent.

    Returns:
        [..., K] in the dtype of `x`. Four significant bits: exact in bfloat16.

    Source:
        DeepSeek-V4 ``inference/kernel.py``, ``act_quant``.
    """
    blocks = _grouped(x, group)
    # The official kernel multiplies by the float32 nearest to 1 / 448; with a division one ulp above a
    # power of two would end up in another scale.
    scale = _power_above(blocks.abs().amax(-1, keepdim=True).clamp(min=_E4M3_FLOOR) * (1 / E4M3_MAX))
    # E4M3 has no infinity, and what a cast does beyond 448 differs between versions of torch.
    codes = (blocks / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return (codes.float() * scale).flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def fake_e2m1(x: Tensor, group: int = INDEX_GROUP) -> Tensor:
    """Round to E2M1 with one power-of-two scale per `group` values: ``2^ceil(log2(max|x| / 6))``.

    Args:
        x: [..., K] bfloat16 or float32; the last group of a row may be partial.
        group: Values per scale along K.

    Returns:
        [..., K] in the dtype of `x`.

    Source:
        DeepSeek-V4 ``inference/kernel.py``, ``fp4_act_quant``.
    """
    blocks = _grouped(x, group)
    scale = _power_above(blocks.abs().amax(-1, keepdim=True).clamp(min=_E2M1_FLOOR) / E2M1_MAX)
    return (round_e2m1(blocks / scale) * scale).flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def round_e2m1(x: Tensor) -> Tensor:
    """Return the nearest of +-(0, 0.5, 1, 1.5, 2, 3, 4, 6), ties to the even code; [...] float32."""
    magnitude = x.abs()
    # The grid is 0.5 below 2, 1 below 4 and 2 from there on; on each part `round` is to even codes.
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return torch.copysign(((magnitude / step).round() * step).clamp(max=E2M1_MAX), x)


def _grouped(x: Tensor, group: int) -> Tensor:
    """Return [..., groups, group] float32, zero-padded."""
    blocks: Tensor = F.pad(x.float(), (0, -x.shape[-1] % group)).unflatten(-1, (-1, group))
    return blocks


def _power_above(x: Tensor) -> Tensor:
    """Return the smallest power of two >= x from the bits of x, a positive normal float32."""
    bits = x.view(torch.int32)
    exponent = (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0)
    power: Tensor = torch.ldexp(torch.ones_like(x), exponent)
    return power
