"""Pictures among the tokens: their pseudo ids, and what their positions see.

A position of a picture has an id from ``vocab`` on: ``vocab + 0`` begins a picture, ``vocab + 4`` ends it,
the others are what lies between, and PADs that stand before the beginning. None of them has an embedding;
their rows come from the vision tower.

Source: DeepSeek-V4-Flash-Vision-Exp ``inference/model.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

_START, _END = 0, 4


def window_positions(ids: Tensor, start: int, vocab: int, window: int) -> Tensor:
    """Return the positions whose latents each token sees, [T, K] int64, its last one first; -1 for a hole.

    A token sees the `window` positions up to its own. From its START to its END a picture sees itself whole,
    what comes later included, and to its left at least what text would see.

    Args:
        ids: [T] int64 ids of a sequence, or of a piece of it that cuts no picture.
        start: Position of the first one.
        vocab: Where pseudo ids begin.
        window: ``sliding_window``.

    Raises:
        ValueError: a picture is cut.
    """
    index = torch.arange(len(ids))
    opens, closes = ids == vocab + _START, ids == vocab + _END
    depth = opens.cumsum(0) - closes.cumsum(0)
    if int(depth.min()) < 0 or int(depth.max()) > 1 or int(depth[-1]):
        raise ValueError("a picture is cut: its positions must be computed together, from START to END")
    inside = (depth > 0) | closes
    begun = index.masked_fill(~opens, 0).cummax(0).values
    ended = index.masked_fill(~closes, len(ids)).flip(0).cummin(0).values.flip(0)
    position = start + index
    first = (position - torch.where(inside, index - begun, 0).clamp(min=window - 1)).clamp(min=0)
    last = position + torch.where(inside, ended - index, 0)
    rows = last[:, None] - torch.arange(max(window, int((last - first).max()) + 1))
    return torch.where(rows >= first[:, None], rows, -1)
