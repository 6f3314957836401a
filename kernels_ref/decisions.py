"""The discrete decisions of a run, recorded or prescribed.

Rounding noise flips choices of experts and of compressed entries, and one flip moves the logits more than all
rounding does. So numerics are compared with the decisions of one run replayed in the other, and decisions are
compared on their own (`agreement`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Decisions:
    """Chosen experts and picked entries of every layer, by position.

    A new object records; `replay` makes one that prescribes.

    Attributes:
        chosen: ``"layers.3.ffn.gate"`` or ``"layers.2.attn.indexer"`` -> [positions, k] int64; -1 where
            fewer than k entries were visible. The order within a row has no meaning.
        own: The same of what the layers would have decided themselves; in a recording run it is `chosen`.
    """

    def __init__(self) -> None:
        self.own: dict[str, Tensor] = {}
        self.chosen: Mapping[str, Tensor] = self.own

    @classmethod
    def replay(cls, chosen: Mapping[str, Tensor]) -> Decisions:
        """Prescribe the decisions of another run, its `chosen`, which may still be under way."""
        made = cls()
        made.chosen = chosen
        return made

    def settle(self, name: str, start: int, found: Tensor) -> Tensor:
        """Record what a layer decided, or return what it has to decide.

        Args:
            name: The router or indexer.
            start: Position of the first row.
            found: [T, k] int64, the layer's own decision.

        Returns:
            [T, k] int64 to go on with.

        Raises:
            ValueError: the recorded run does not cover these positions.
        """
        before = self.own.get(name, found[:0])
        if len(before) < start:
            raise ValueError(f"{name}: recorded {len(before)} positions, cannot go on at {start}")
        self.own[name] = torch.cat((before[:start], found))
        known, end = self.chosen.get(name, found[:0]), start + len(found)
        if len(known) < end:
            raise ValueError(f"{name}: positions {start}..{end - 1} to be replayed, {len(known)} recorded")
        return known[start:end]


def agreement(run: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, float]:
    """Return per router and indexer the share of the reference's choices that a run made too.

    Args:
        run, reference: `Decisions.chosen` of two runs over the same tokens.

    Returns:
        Name -> 0..1, in the order of `reference`; 1 where there was nothing to choose.
    """
    shares = {}
    for name, wanted in reference.items():
        real = wanted >= 0
        # One number per position and choice, so that rows do not mix.
        offset = torch.arange(len(wanted))[:, None] << 32
        kept = torch.isin(wanted + offset, run[name] + offset) & real
        shares[name] = float(kept.sum() / real.sum()) if real.any() else 1.0
    return shares
