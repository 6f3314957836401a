"""How well a checkpoint's draft layers guess what its trunk says.

A server checks every guess, so a damaged draft costs speed and no text: nobody sees it. Here the draft runs
behind every token that the trunk has generated, and its guesses are counted against the tokens that followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsv4convert.errors import Dsv4Error, Finding, finding

if TYPE_CHECKING:
    from kernels_ref.model import Model


@dataclass(frozen=True, slots=True)
class DraftHealth:
    """Guesses against tokens.

    Attributes:
        depth: Guesses per step.
        accepted: Per start, how many guesses a server would have accepted before the first wrong one.
        reference_error: Relative error of the draft's logits against the reference's; None without one, or
            where the two have not said the same tokens.
    """

    depth: int
    accepted: tuple[int, ...]
    reference_error: float | None = None

    @property
    def length(self) -> float:
        """Tokens that a step is expected to give, 1 up to `depth` + 1; the trunk's own one counts."""
        return 1 + sum(self.accepted) / len(self.accepted)

    @property
    def shares(self) -> tuple[float, ...]:
        """For each depth, the share of starts whose guesses up to there were all right."""
        starts = len(self.accepted)
        return tuple(sum(a > depth for a in self.accepted) / starts for depth in range(self.depth))

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "depth": self.depth,
            "starts": len(self.accepted),
            "length": self.length,
            "shares": list(self.shares),
            "reference_error": self.reference_error,
        }

    def findings(self, *, equal: bool = False) -> list[Finding]:
        """Return what is wrong or strange.

        Args:
            equal: Whether the draft has to be bit-equal to the reference's.
        """
        if equal and self.reference_error:
            problem = "is not bit-equal to the reference"
            found = f"relative error {self.reference_error:.2g}"
            return [finding("probe.differs", "mtp", problem, expected="no difference", found=found)]
        if any(self.accepted):
            return []
        found = f"0 of {len(self.accepted):,} first guesses right"
        return [finding("probe.draft-idle", "mtp", "guesses nothing that the trunk says", found=found)]


class DraftWatch:
    """Keeps what the draft layers of a model see of its trunk, and runs them.

    Args:
        model: The trunk; its release has a draft (see `depth`).
        label: Prefix of the place that a finding names, for a second checkpoint.
    """

    def __init__(self, model: Model, label: str = "") -> None:
        from kernels_ref.draft import Taps

        self._model = model
        self._label = label
        self._taps = Taps(model)
        self._streams: list[Tensor] = []
        self._spark = bool(model.config.draft.targets)

    def __call__(self, layer: int, h: Tensor) -> None:
        """Look at a layer's output, [T, hc, D]; call it for every layer and position in order."""
        if self._spark:
            self._taps(layer, h)
        elif layer == self._model.config.layers - 1:
            self._streams.append(h)

    def logits(self, ids: Sequence[int], starts: Sequence[int]) -> Tensor:
        """Return the logits of the guesses behind each start, [S, depth, V] float32.

        Args:
            ids: Every token of the sequence; the trunk has run all but the last one.
            starts: Positions p; the guesses are of tokens p + 2 and following.

        Raises:
            Dsv4Error: ``probe.non-finite``.
        """
        from kernels_ref.draft import Draft, NextToken

        said, where = torch.tensor(ids), torch.tensor(starts)
        if self._spark:
            found = Draft(self._model).propose(self._taps.together(), where, said[where + 1]).logits
        else:
            layer, streams = NextToken(self._model), torch.cat(self._streams)
            found = layer(streams, said[1 : len(streams) + 1], layer.state())[where, None]
        bad = int((~torch.isfinite(found)).sum())
        if bad:
            problem = f"{bad:,} of {found.numel():,} logits of the draft are infinity or NaN"
            raise Dsv4Error(finding("probe.non-finite", f"{self._label}mtp", problem))
        return found


def depth(model: Model) -> int:
    """Return the guesses per step of a model's draft; 0 where it has none."""
    draft = model.config.draft
    return draft.block_size if draft.targets else min(draft.stages, 1)


def starts_of(prompt: int, answered: int, guesses: int) -> range:
    """Return the positions behind which a whole step of guesses can be judged.

    Args:
        prompt: Tokens of the prompt.
        answered: Tokens generated after it.
        guesses: See `depth`.
    """
    return range(prompt - 1, prompt - 1 + answered - guesses)


def accepted(logits: Tensor, ids: Sequence[int], starts: Sequence[int]) -> tuple[int, ...]:
    """Count the right guesses before the first wrong one.

    Args:
        logits: [S, depth, V] of `DraftWatch.logits`.
        ids: Every token of the sequence.
        starts: Its positions.
    """
    where = torch.tensor(starts)[:, None] + 2 + torch.arange(logits.shape[1])
    right = logits.argmax(-1) == torch.tensor(ids)[where]
    return tuple(right.int().cumprod(1).sum(1).tolist())
