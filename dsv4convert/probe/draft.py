"""How well a checkpoint's draft layers guess what its trunk says.

A server checks every guess, so a damaged draft costs speed and no text: nobody sees it. Here the draft runs
behind every token that the trunk has generated, and its guesses are counted against the tokens that followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dsv4convert.errors import Dsv4Error, Finding, finding
from dsv4convert.probe.agreement import Expectation, beyond, differs, relative_error

if TYPE_CHECKING:
    from dsv4convert.probe.forward import Run
    from kernels_ref.decisions import Decisions
    from kernels_ref.model import Model


class DraftErrors(NamedTuple):
    """How far a checkpoint's draft is from the reference's, both on the reference's activations.

    Attributes:
        logits: Relative error of its logits; unless bits must be equal, with the reference's choices of
            experts and with the Markov head told the reference's guesses.
        unpacked: The same of what has to be bit-equal: the draft, of repacked experts the reference's own.
    """

    logits: float
    unpacked: float


def compare_drafts(
    own: Run, theirs: Run, expected: Expectation, ids: Sequence[int], starts: Sequence[int]
) -> DraftErrors:
    """Run the drafts of a checkpoint and of its reference behind the same tokens.

    Args:
        own: The checkpoint.
        theirs: The reference; its `watch_draft` counts for both.
        expected: What they owe each other.
        ids, starts: See `DraftWatch.logits`.
    """
    from kernels_ref.decisions import Decisions

    record = Decisions()
    wanted = theirs.guesses(ids, starts, decisions=record)
    if expected is Expectation.EQUAL:
        error = relative_error(own.guesses(ids, starts, seen=theirs), wanted)
        return DraftErrors(error, error)
    replay = Decisions.replay(record.chosen)
    found = own.guesses(ids, starts, seen=theirs, decisions=replay, guessed=wanted.argmax(-1))
    unpacked = 0.0
    if expected is Expectation.REPACKED:
        mended = own.with_experts_of(theirs).guesses(ids, starts, seen=theirs)
        unpacked = relative_error(mended, wanted)
    return DraftErrors(relative_error(found, wanted), unpacked)


@dataclass(frozen=True, slots=True)
class DraftHealth:
    """Guesses against tokens.

    Attributes:
        depth: Guesses per step.
        accepted: Per start, how many guesses a server would have accepted before the first wrong one.
        beside: How far it is from the reference's; None without one, or where too few tokens are the same.
    """

    depth: int
    accepted: tuple[int, ...]
    beside: DraftErrors | None = None

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
            "reference_error": self.beside.logits if self.beside else None,
        }

    def findings(self, limit: float | None = None) -> list[Finding]:
        """Return what is wrong or strange.

        Args:
            limit: Largest error of the draft's logits; None where they are not judged.
        """
        if self.beside and limit is not None:
            if self.beside.unpacked:
                return [differs("mtp", self.beside.unpacked)]
            if self.beside.logits > limit:
                return [beyond("mtp", self.beside.logits, limit)]
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

    def logits(
        self,
        ids: Sequence[int],
        starts: Sequence[int],
        *,
        by: Model | None = None,
        decisions: Decisions | None = None,
        guessed: Tensor | None = None,
    ) -> Tensor:
        """Return the logits of the guesses behind each start, [S, depth, V] float32.

        Args:
            ids: Tokens of the sequence; the trunk has run all but the last one, perhaps more.
            starts: Positions p; the guesses are of tokens p + 2 and following.
            by: The model whose draft looks at the trunk that was watched; by default that one's own.
            decisions: Record or replay the choice of experts; None for neither.
            guessed: [S, depth] int64, what a Markov head is told of the guesses before; None for its own.

        Raises:
            Dsv4Error: ``probe.non-finite``.
        """
        from kernels_ref.draft import Draft, NextToken

        model, said, where = by or self._model, torch.tensor(ids), torch.tensor(starts)
        dtype = model.numerics.dtype
        if self._spark:
            taps = self._taps.together().to(dtype)
            found = Draft(model, decisions).propose(taps, where, said[where + 1], guessed).logits
        else:
            layer, streams = NextToken(model, decisions), torch.cat(self._streams)[: len(said) - 1]
            found = layer(streams.to(dtype), said[1:], layer.state())[where, None]
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
