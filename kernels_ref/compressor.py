"""The compressor: one key for 4 or 128 tokens, in pieces of any length.

A layer with ratio 128 pools groups of 128 tokens. One with ratio 4 pools 8 tokens for every 4: each token has
two candidates, of which the second belongs to the entry of its own group and the first to the next one.

Prefill and decode are the same function: the state holds the rows that no complete group has used up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels_ref.arithmetic import rms_norm
from kernels_ref.rotary import apply_rotary, rotary_table

#: The ratio whose groups overlap.
OVERLAPPING = 4


class CompressorWeights(NamedTuple):
    """Tensors of a compressor of output width dd; c = 2 for ratio 4, otherwise 1.

    Attributes:
        wkv, wgate: [c * dd, D] bfloat16.
        ape: [ratio, c * dd] float32, added to the gate by position within the group.
        norm: [dd] bfloat16.
    """

    wkv: Tensor
    wgate: Tensor
    ape: Tensor
    norm: Tensor


@dataclass
class CompressorState:
    """What is left over between two calls.

    Attributes:
        kv, gate: [n, c * dd] float32, `ape` already in `gate`. For ratio 4 the first four rows are the last
            complete group (before the first one: gate -inf, which weighs nothing). The rest, fewer than a
            group, waits to be completed.
        position: Tokens seen.
    """

    kv: Tensor
    gate: Tensor
    position: int = 0

    @classmethod
    def fresh(cls, ratio: int, width: int) -> CompressorState:
        """Return the state before the first token.

        Args:
            ratio: 4 or 128.
            width: Output width dd.
        """
        if ratio != OVERLAPPING:
            return cls(torch.zeros(0, width), torch.zeros(0, width))
        rows = (ratio, 2 * width)
        return cls(torch.zeros(rows), torch.full(rows, -torch.inf))


def compress(
    x: Tensor, weights: CompressorWeights, state: CompressorState, ratio: int, freqs: Tensor, eps: float
) -> Tensor:
    """Take tokens in, return the entries they complete, and keep the remainder in `state`.

    An entry is normed and rotated to the position of the first token of its group. The projections are
    float32 matrix products in any case; the pooled entry is rounded to the dtype of `x` before the norm.

    Args:
        x: [T, D] inputs of the layer at positions ``state.position`` and following.
        weights: Tensors of the compressor.
        state: Changed in place.
        ratio: 4 or 128.
        freqs: [rope_dim / 2] float32 of `rotary.layer_frequencies`.
        eps: ``rms_norm_eps``.

    Returns:
        [n, dd] in the dtype of `x`, n >= 0.
    """
    positions = torch.arange(state.position, state.position + len(x))
    gate = x.float() @ weights.wgate.float().T + weights.ape.float()[positions % ratio]
    first = state.position // ratio
    state.kv = torch.cat((state.kv, x.float() @ weights.wkv.float().T))
    state.gate = torch.cat((state.gate, gate))
    state.position += len(x)
    pooled = _pool_complete(state, ratio).to(x.dtype)
    starts = torch.arange(first, first + len(pooled)) * ratio
    return apply_rotary(rms_norm(pooled, weights.norm, eps), rotary_table(freqs, starts))


def _pool_complete(state: CompressorState, ratio: int) -> Tensor:
    """Pool every complete group, [n, dd] float32, and drop from the state what will not be needed again."""
    overlap = ratio if ratio == OVERLAPPING else 0
    count = (len(state.kv) - overlap) // ratio
    used = count * ratio
    kv, gate = (_slots(rows[: used + overlap], ratio, overlap) for rows in (state.kv, state.gate))
    state.kv, state.gate = state.kv[used:], state.gate[used:]
    return (torch.softmax(gate, 1) * kv).sum(1)


def _slots(rows: Tensor, ratio: int, overlap: int) -> Tensor:
    """Return what each entry pools, [n, slots, dd]."""
    if not overlap:
        return rows.unflatten(0, (-1, ratio)) if len(rows) else rows.new_zeros(0, ratio, rows.shape[1])
    groups = rows.unflatten(0, (-1, ratio))
    for_next, for_own = groups.chunk(2, -1)
    return torch.cat((for_next[:-1], for_own[1:]), 1)
