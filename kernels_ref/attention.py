"""Attention over listed cache rows, and the store that fills such a cache.

One latent row of 512 is key and value of all heads. A cache is a table of rows; pages are a view of it, and
an index is a flat slot, ``page * page_size + offset``. What no list points to may hold anything, NaN
included, and never reaches a result: rows are masked before arithmetic, not after it.

Source: `kernels_ref.sm80.attention` computes the same; DeepSeek-V4 ``inference/model.py``, ``sparse_attn``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_ref.arguments import FLOATS, INTEGERS, expect, expect_length
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
        out: Where to write; a new tensor by default. May be `q`.

    Returns:
        [T, h, 512] in the dtype of `q`; computed in float32 or, for float64, in float64, rounded once.

    Raises:
        ValueError: a tensor of another shape or dtype, or part of a second source.
    """
    extra = second_source(extra_cache, extra_indices, extra_lengths)
    check_attention(q, (cache, indices, lengths), extra, sink, out)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for start in range(0, len(q), _ROWS):
        rows = slice(start, start + _ROWS)
        keys, valid = _listed(cache, indices[rows], lengths[rows])
        if extra:
            more, more_valid = _listed(extra[0], extra[1][rows], extra[2][rows])
            keys, valid = torch.cat((keys, more), 1), torch.cat((valid, more_valid), 1)
        out[rows] = _attend(q[rows], keys, valid, sink, scale)
    return out


def second_source(*parts: Tensor | None) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return cache, indices and lengths of the second source, or None where there is none.

    Raises:
        ValueError: some of them are given and some are not.
    """
    given = [part for part in parts if part is not None]
    if not given:
        return None
    if len(given) < len(parts):
        found = ", ".join("None" if part is None else "a tensor" for part in parts)
        raise ValueError(
            f"`extra_cache`, `extra_indices`, `extra_lengths`: expected all of them or none; found {found}"
        )
    cache, indices, lengths = given
    return cache, indices, lengths


def check_attention(
    q: Tensor,
    source: tuple[Tensor, Tensor, Tensor],
    extra: tuple[Tensor, Tensor, Tensor] | None,
    sink: Tensor,
    out: Tensor | None,
    *,
    kernel: bool = False,
) -> None:
    """Refuse what `sparse_attention` cannot be given; with `kernel`, also what is laid out in another way.

    Raises:
        ValueError: a tensor of another shape, dtype or layout.
    """
    rows, packed = ("between rows", "nowhere") if kernel else ("anywhere", "anywhere")
    expect("q", q, FLOATS if kernel else (*FLOATS, torch.float64), (None, None, HEAD_DIM), gaps=rows)
    tokens, heads = q.shape[:2]
    for prefix, (cache, indices, lengths) in zip(("", "extra_"), filter(None, (source, extra)), strict=False):
        expect(f"{prefix}cache", cache, q.dtype, (None, HEAD_DIM), gaps=packed)
        expect(f"{prefix}indices", indices, INTEGERS, (tokens, None), gaps=rows)
        expect(f"{prefix}lengths", lengths, INTEGERS, (tokens,), gaps=packed)
    expect("sink", sink, FLOATS, (heads,), gaps=packed)
    if out is not None:
        expect("out", out, q.dtype, (tokens, heads, HEAD_DIM), gaps=rows)


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
    # The sink stands beside the scores, of which there may be none.
    beside = sink[:, None].expand(*scores.shape[:2], 1)
    top = torch.cat((scores, beside), -1).amax(-1, keepdim=True)
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

    Raises:
        ValueError: a tensor of another shape or dtype.
    """
    expect("cache", cache, FLOATS, (None, HEAD_DIM))
    check_store("kv", kv, HEAD_DIM, weight, freqs, positions, slots)
    kept = (slots >= 0).nonzero().flatten()
    x = rms_norm(kv[kept].float(), weight, eps)
    x = apply_rotary(x, freqs[positions[kept].long()])
    cache[slots[kept].long()] = x.to(cache.dtype)


def check_store(
    name: str, x: Tensor, width: int, weight: Tensor, freqs: Tensor, positions: Tensor, slots: Tensor
) -> None:
    """Refuse what the stores of rows [T, `width`] cannot be given.

    Slots count: `x` and `positions` may be longer, as a runtime's padded tensors are.

    Raises:
        ValueError: a tensor of another shape, dtype or layout.
    """
    expect_length("slots", slots, 0)
    expect_length("positions", positions, len(slots))
    expect(name, x, FLOATS, (None, width), gaps="between rows")
    if len(x) < len(slots):
        raise ValueError(f"`{name}`: expected at least {len(slots)} rows, one per slot; found {len(x)}")
    expect("weight", weight, FLOATS, (width,), gaps="nowhere")
    expect("freqs", freqs, torch.float32, (None, ROPE_DIM), gaps="nowhere")
