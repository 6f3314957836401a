"""Attention over listed cache rows, and the store that fills such a cache.

One latent row of 512 is key and value of all heads. A cache is a table of rows; pages are a view of it, and
an index is a flat slot, ``page * page_size + offset``. What no list points to may hold anything, NaN
included, and never reaches a result: rows are masked before arithmetic, not after it.

Source: `kernels_ref.sm80.attention` computes the same; DeepSeek-V4 ``inference/model.py``, ``sparse_attn``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_ref.arithmetic import rms_norm
from kernels_ref.rotary import apply_rotary

#: Width of a latent row: 448 dims without position and 64 rotated ones.
HEAD_DIM, ROPE_DIM = 512, 64
# Query rows gathered at a time: 128 x 640 rows of 512 float32 are 168 MB.
_ROWS = 128


def sparse_attention(
    q: Tensor,
    cache: Tensor,
    indices: Tensor,
    lengths: Tensor,
    sink: Tensor,
    scale: float,
    *,
    extra_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_lengths: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend to listed rows of one cache or of two, in one softmax with a sink.

    ``o[h] = sum_j p_j row_j`` with ``p = softmax over {scale * <q[h], row_j>} and {sink[h]}``: the sink adds
    to the denominator and to nothing else. A list entry takes part iff its index is >= 0 and its place in
    the list is below the length. A query for which nothing takes part gets 0.

    Args:
        q: [T, h, 512] bfloat16, float32 or float64; rows may be strided.
        cache: [S, 512], dtype of `q`.
        indices: [T, K] int32, rows of `cache`; negative for a hole.
        lengths: [T] int32; a runtime may pass 1 where every entry is a hole.
        sink: [h] float32, a logit.
        scale: Factor of the scores, ``512^-0.5`` in the model.
        extra_cache, extra_indices, extra_lengths: The second source, [S2, 512], [T, K2] and [T]; all or none.
        out: Where to write; a new tensor by default.

    Returns:
        [T, h, 512] in the dtype of `q`; computed in float32 or, for float64, in float64, rounded once.
    """
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for start in range(0, len(q), _ROWS):
        rows = slice(start, start + _ROWS)
        keys, valid = _listed(cache, indices[rows], lengths[rows])
        if extra_cache is not None:
            if extra_indices is None or extra_lengths is None:
                raise ValueError("extra_cache needs extra_indices and extra_lengths")
            more, more_valid = _listed(extra_cache, extra_indices[rows], extra_lengths[rows])
            keys, valid = torch.cat((keys, more), 1), torch.cat((valid, more_valid), 1)
        out[rows] = _attend(q[rows], keys, valid, sink, scale)
    return out


def _listed(cache: Tensor, indices: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of the lists, [T, K, 512], zeros for what takes no part, and what does, [T, K] bool."""
    place = torch.arange(indices.shape[1], device=indices.device)
    valid = (indices >= 0) & (place < lengths[:, None])
    rows = cache[torch.where(valid, indices, 0).long()]
    return torch.where(valid[..., None], rows, torch.zeros_like(rows)), valid


def _attend(q: Tensor, keys: Tensor, valid: Tensor, sink: Tensor, scale: float) -> Tensor:
    """Return the attention output of queries [T, h, 512] over keys [T, K, 512], in the wide dtype."""
    wide = torch.promote_types(q.dtype, torch.float32)
    q, keys, sink = q.to(wide), keys.to(wide), sink.to(wide)
    scores = torch.einsum("thd,tkd->thk", q, keys) * scale
    scores = scores.masked_fill(~valid[:, None, :], -torch.inf)
    top = torch.maximum(scores.amax(-1), sink)[..., None]
    top = torch.where(top == -torch.inf, 0.0, top)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True) + (sink[:, None] - top).exp()
    # The total is 0 only without a key and with a sink of -inf; its output is 0, too.
    return torch.einsum("thk,tkd->thd", weights, keys) / torch.where(total == 0, 1.0, total)


def store_kv(
    kv: Tensor,
    weight: Tensor,
    eps: float,
    freqs: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
) -> None:
    """Normalise latents, rotate their last 64 dims and write them to their cache rows.

    ``cache[slot] = rotary(rms_norm(kv) * weight)``: float32 throughout, one rounding at the end.

    Args:
        kv: [T, 512] bfloat16; rows may be strided.
        weight: [512] bfloat16 or float32.
        eps: Added to the mean square.
        freqs: [P, 64] float32, cosine and sine interleaved (`rotary_table`), one row per position.
        positions: [T] int32 or int64, rows of `freqs`.
        slots: [T] int32 or int64, rows of `cache`; -1 skips the latent.
        cache: [S, 512] bfloat16, written in place; rows of no slot stay as they are.
    """
    kept = slots >= 0
    x = rms_norm(kv[kept].float(), weight, eps)
    x = apply_rotary(x, freqs[positions[kept].long()])
    cache[slots[kept].long()] = x.to(cache.dtype)
