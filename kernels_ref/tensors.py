"""Routed experts in INT8_SHIFT, as tensors.

Source: ``docs/formats.md``, section INT8_SHIFT.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4convert.formats.int8_shift import decode_int8_shift
from dsv4convert.formats.spec import INT8_SHIFT


class Int8Shift(NamedTuple):
    """One matrix, or a stack of them: ``weight[n, k] = channel_scale[n] * (lut2[code] << shift)``.

    Attributes:
        codes: [..., N, G * 64] uint8, packing ``g128-split64``; G = ceil(K / 128).
        shift2: [..., N, G] uint8; the shift of block b of a group at bits 2b.
        channel_scale: [..., N] float32, a power of two or, for a row of zeros, 0.
    """

    codes: Tensor
    shift2: Tensor
    channel_scale: Tensor

    def integers(self, k: int | None = None) -> Tensor:
        """Return ``lut2[code] << shift``, [..., N, K] int8 within -96..96.

        Args:
            k: Codes per row; by default everything up to the end of the last group, padding included.
        """
        width = INT8_SHIFT.group * self.shift2.shape[-1] if k is None else k
        codes, shift2 = (t.cpu().reshape(-1, t.shape[-1]).numpy() for t in (self.codes, self.shift2))
        found = torch.from_numpy(decode_int8_shift(codes, shift2, width))
        return found.reshape(*self.codes.shape[:-1], width).to(self.codes.device)

    def values(self, k: int | None = None) -> Tensor:
        """Return the weights, [..., N, K] float32; exact in float32 and in bfloat16."""
        return self.integers(k).float() * self.channel_scale[..., None]
