"""Rotary position embedding of the last 64 dims, and the Hadamard rotation of the indexer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels_ref.config import ModelConfig, Yarn


def frequencies(rope_dim: int, base: float, yarn: Yarn | None = None) -> Tensor:
    """Return the angle per position of each rotated pair, [rope_dim / 2] float32.

    Without YaRN ``base^(-2i / rope_dim)``. With YaRN the slow pairs are divided by `yarn.factor`, the fast
    ones stay, and a linear ramp lies between. It holds at every position, and there is no factor on the
    result (no "mscale").

    Args:
        rope_dim: Rotated dims; even.
        base: ``rope_theta`` or ``compress_rope_theta``.
        yarn: Parameters of the extension; None for layers that attend to the window only.
    """
    pairs = torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim
    plain = 1.0 / (base**pairs)
    if yarn is None:
        return plain

    def pair_of(rotations: float) -> float:
        """Return the index of the pair that turns this often within the original context."""
        return rope_dim * math.log(yarn.original_length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = float(max(math.floor(pair_of(yarn.beta_fast)), 0))
    high = float(min(math.ceil(pair_of(yarn.beta_slow)), rope_dim - 1))
    high += 0.001 if low == high else 0.0
    slow = ((torch.arange(rope_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / yarn.factor * slow + plain * (1 - slow)


def layer_frequencies(config: ModelConfig, ratio: int) -> Tensor:
    """Return the frequencies of a layer, [rope_dim / 2] float32.

    A layer with compressed keys (`ratio` > 0) uses ``compress_rope_theta`` with YaRN for everything it
    rotates: queries, window latents, compressed entries, indexer. The others use ``rope_theta`` alone.
    """
    if ratio:
        return frequencies(config.rope_dim, config.compress_theta, config.yarn)
    return frequencies(config.rope_dim, config.rope_theta)


def rotary_table(freqs: Tensor, positions: Tensor) -> Tensor:
    """Return cosine and sine of every angle, the float32 view of complex numbers on the unit circle.

    Args:
        freqs: [rope_dim / 2] float32.
        positions: [T] integer.

    Returns:
        [T, rope_dim] float32: cos 0, sin 0, cos 1, sin 1, ...
    """
    angles = positions.float()[:, None] * freqs
    return torch.stack((angles.cos(), angles.sin()), -1).flatten(1)


def apply_rotary(x: Tensor, table: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the last ``rope_dim`` dims as interleaved pairs (2i, 2i + 1); the dims before them stay.

    Args:
        x: [T, ..., D] bfloat16 or float32.
        table: [T, rope_dim] of `rotary_table`, one row per row of `x`.
        inverse: Rotate back.

    Returns:
        [T, ..., D] in the dtype of `x`; computed in float32, rounded once.
    """
    dims = table.shape[-1]
    table = table.reshape(len(table), *(1,) * (x.ndim - 2), dims)
    cos, sin = table[..., 0::2], table[..., 1::2]
    sin = -sin if inverse else sin
    even, odd = x[..., -dims::2].float(), x[..., 1 - dims :: 2].float()
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((x[..., :-dims], rotated.to(x.dtype)), -1)


def hadamard(x: Tensor) -> Tensor:
    """Multiply by the orthonormal Hadamard matrix in Sylvester order, ``x @ H / sqrt(n)``.

    Args:
        x: [..., n] bfloat16 or float32; n a power of two.

    Returns:
        [..., n] in the dtype of `x`; computed in float32, rounded once. Its own inverse.
    """
    n = x.shape[-1]
    y = x.float()
    half = 1
    while half < n:
        pair = y.unflatten(-1, (n // (2 * half), 2, half))
        a, b = pair.unbind(-2)
        y = torch.stack((a + b, a - b), -2).flatten(-3)
        half *= 2
    rotated: Tensor = (y * n**-0.5).to(x.dtype)
    return rotated
