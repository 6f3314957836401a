"""Manifold-constrained hyper-connections: how a sublayer reads from and writes to the residual streams.

All coefficients are float32; a sum over streams and outputs is taken in float32 and rounded once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels_ref.config import ModelConfig


class Mixing(NamedTuple):
    """Coefficients of one sublayer.

    Attributes:
        post: [T, hc] float32, 0..2: how much of the sublayer's output each stream receives.
        comb: [T, hc, hc] float32, doubly stochastic: ``comb[j, k]`` goes from old stream j to new stream k.
    """

    post: Tensor
    comb: Tensor


def collapse(
    h: Tensor, fn: Tensor, scale: Tensor, base: Tensor, config: ModelConfig
) -> tuple[Tensor, Mixing]:
    """Make a sublayer's input from the streams, and the coefficients for its output.

    Args:
        h: [T, hc, D] streams.
        fn: [(2 + hc) * hc, hc * D] float32, rows: pre, post, comb row by row.
        scale: [3] float32, for pre, post, comb.
        base: [(2 + hc) * hc] float32.
        config: Gives hc, iterations and epsilons.

    Returns:
        x [T, D] in the dtype of `h`, and the coefficients.
    """
    hc, eps = config.hc_mult, config.hc_eps
    pre, post, comb = _mixes(h, fn, config.norm_eps).split([hc, hc, hc * hc], -1)
    pre_base, post_base, comb_base = base.split([hc, hc, hc * hc])
    pre = torch.sigmoid(pre * scale[0] + pre_base) + eps
    post = 2 * torch.sigmoid(post * scale[1] + post_base)
    comb = (comb * scale[2] + comb_base).unflatten(-1, (hc, hc))
    return _weighted_sum(pre, h), Mixing(post, sinkhorn(comb, config.hc_iters, eps))


def sinkhorn(comb: Tensor, iterations: int, eps: float) -> Tensor:
    """Turn logits into matrices whose rows and columns sum to 1, nearly.

    Args:
        comb: [..., hc, hc] float32 logits.
        iterations: Column normalisations; the first follows a softmax over rows, the others a division.
        eps: Added to the softmax and to every divisor.

    Returns:
        [..., hc, hc] float32; the columns were normalised last.
    """
    comb = torch.softmax(comb, -1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def expand(y: Tensor, h: Tensor, mixing: Mixing) -> Tensor:
    """Write a sublayer's output to the streams: ``new[k] = post[k] * y + sum_j comb[j, k] * h[j]``.

    Args:
        y: [T, D] output of the sublayer.
        h: [T, hc, D] streams that its input was made from.
        mixing: From `collapse`.

    Returns:
        [T, hc, D] in the dtype of `h`.
    """
    kept = torch.zeros(h.shape, dtype=torch.float32, device=h.device)
    # One old stream at a time: all at once would need hc times the memory of the streams.
    for old, row in zip(h.unbind(1), mixing.comb.unbind(1), strict=True):
        kept += row[..., None] * old.float()[:, None]
    return (mixing.post[..., None] * y.float()[:, None] + kept).to(h.dtype)


def collapse_head(h: Tensor, fn: Tensor, scale: Tensor, base: Tensor, config: ModelConfig) -> Tensor:
    """Collapse the streams before the final norm.

    Args:
        h: [T, hc, D] streams.
        fn: [hc, hc * D] float32.
        scale: [1] float32.
        base: [hc] float32.
        config: Gives the epsilons.

    Returns:
        [T, D] in the dtype of `h`.
    """
    mixes = _mixes(h, fn, config.norm_eps)
    return _weighted_sum(torch.sigmoid(mixes * scale[0] + base) + config.hc_eps, h)


def _mixes(h: Tensor, fn: Tensor, eps: float) -> Tensor:
    """Return [T, rows] float32: one RMS statistic per token over all streams, no weight."""
    flat = h.flatten(1).float()
    return (flat @ fn.float().T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)


def _weighted_sum(weight: Tensor, h: Tensor) -> Tensor:
    return (weight[..., None] * h.float()).sum(1).to(h.dtype)
