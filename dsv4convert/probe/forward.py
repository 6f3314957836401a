"""A sequence through a checkpoint, layer by layer, and what it answers.

The reference model does the arithmetic; here it is stepped, so that every sublayer's output can be looked at
and two checkpoints can be run side by side. Nothing is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dsv4convert.errors import Dsv4Error, finding

if TYPE_CHECKING:
    from dsv4convert.probe.draft import DraftWatch
    from kernels_ref.arithmetic import Numerics
    from kernels_ref.config import ModelConfig
    from kernels_ref.decisions import Decisions
    from kernels_ref.source import Expert, Source

#: Names of `kernels_ref.arithmetic` presets, by what users call them.
PRESETS = {"exact": "EXACT", "bf16": "BF16", "sm80": "SM80", "official": "OFFICIAL"}


def preset(name: str) -> Numerics:
    """Return the arithmetic of a name in `PRESETS`.

    Raises:
        ValueError: there is no such name.
    """
    from kernels_ref import arithmetic

    if name not in PRESETS:
        raise ValueError(f"numerics must be one of {', '.join(PRESETS)}, got {name!r}")
    found: Numerics = getattr(arithmetic, PRESETS[name])
    return found


class Sublayers(NamedTuple):
    """What a layer made of T tokens.

    Attributes:
        attention: [T, D] output of the attention, before it is written to the streams.
        middle: [T, hc, D] streams between attention and experts.
        weights: [T, k] float32 of the chosen experts.
        routed: [T, D] weighted sum of the routed experts.
        shared: [T, D] output of the shared expert, which is added to it.
        summed: [T, D] both, as they are written to the streams.
        streams: [T, hc, D] after the layer.
    """

    attention: Tensor
    middle: Tensor
    weights: Tensor
    routed: Tensor
    shared: Tensor
    summed: Tensor
    streams: Tensor


class Run:
    """One sequence through one checkpoint.

    Args:
        source: Weights.
        config: Numbers of the model.
        numerics: What is rounded.
        decisions: Records or prescribes the choice of experts and entries; None records.
        label: Prefix of the places that findings name, for a second checkpoint.
    """

    def __init__(
        self,
        source: Source,
        config: ModelConfig,
        numerics: Numerics,
        *,
        decisions: Decisions | None = None,
        label: str = "",
    ) -> None:
        from kernels_ref.decisions import Decisions
        from kernels_ref.model import Model

        self.decisions = decisions or Decisions()
        self._model = Model(config, source, numerics, decisions=self.decisions)
        self._state = self._model.state()
        self._label = label
        self.streams = torch.empty(0)
        self._ids = torch.empty(0, dtype=torch.int64)
        self._watch: DraftWatch | None = None

    @property
    def layers(self) -> int:
        """Number of trunk layers."""
        return self._model.config.layers

    def begin(self, ids: Sequence[int], pictures: Tensor | None = None) -> None:
        """Take the next tokens of the sequence in; `streams` becomes their embedding, [T, hc, D].

        Args:
            ids: Token ids, for positions of pictures their pseudo ids.
            pictures: [P, D] rows of these positions.
        """
        self._ids = torch.tensor(ids, dtype=torch.int64)
        blind = pictures is None or bool(torch.isfinite(pictures).all())
        self.streams = self._finite("embed" if blind else "vision", self._model.embed(self._ids, pictures))

    def layer(self, index: int, streams: Tensor | None = None) -> Sublayers:
        """Run one layer on the tokens of `begin`; layers are run in order.

        Args:
            index: 0-based.
            streams: [T, hc, D] to run it on instead of its own; they come from the reference.

        Raises:
            Dsv4Error: ``probe.non-finite``; a sublayer gave NaN or infinity.
        """
        block, state = self._model.blocks[index], self._state.blocks[index]
        start = state.position
        parts: dict[str, Tensor] = {}

        def finite(part: str, found: Tensor) -> Tensor:
            parts[part] = self._finite(f"{block.prefix}.{part}", found)
            return found

        def experts(x: Tensor) -> Tensor:
            chosen, parts["weights"] = block.route(x, self._ids, start)
            routed = finite("ffn.experts", block.combine(x, chosen, parts["weights"]))
            shared = finite("ffn.shared_experts", block.shared(x))
            parts["summed"] = (routed + shared.float()).to(x.dtype)
            return parts["summed"]

        h = self.streams if streams is None else streams
        middle = block.sublayer("attn", h, lambda x: finite("attn", block.attention(x, self._ids, state)))
        self.streams = finite("hc_ffn", block.sublayer("ffn", middle, experts))
        if self._watch is not None:
            self._watch(index, self.streams)
        return Sublayers(
            attention=parts["attn"],
            middle=middle,
            weights=parts["weights"],
            routed=parts["ffn.experts"],
            shared=parts["ffn.shared_experts"],
            summed=parts["summed"],
            streams=self.streams,
        )

    def mixing(self, index: int, kind: str, streams: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
        """Do what the hyper-connections of a sublayer do, without the sublayer.

        Args:
            index: Layer.
            kind: ``attn`` or ``ffn``.
            streams: [T, hc, D] before it.
            output: [T, D] that the sublayer is taken to give.

        Returns:
            What it reads, [T, D] before its norm, and the streams after `output` was written to them.
        """
        from kernels_ref.mhc import expand

        x, coefficients = self._model.blocks[index].collapse(kind, streams)
        return x, expand(output, streams, coefficients)

    def watch_draft(self) -> int:
        """Keep from now on what the draft layers see; return the guesses per step, 0 without a draft."""
        from dsv4convert.probe.draft import DraftWatch, depth

        guesses = depth(self._model)
        self._watch = DraftWatch(self._model, self._label) if guesses else None
        return guesses

    def guesses(
        self,
        ids: Sequence[int],
        starts: Sequence[int],
        *,
        seen: Run | None = None,
        decisions: Decisions | None = None,
        guessed: Tensor | None = None,
    ) -> Tensor:
        """Return the logits of the draft behind each start, see `DraftWatch.logits`; after `watch_draft`.

        Args:
            ids, starts, decisions, guessed: See `DraftWatch.logits`.
            seen: The run whose activations the draft sees, and whose `watch_draft` counts; by default this.
        """
        watch = (seen or self)._watch
        if watch is None:
            raise ValueError("no draft was watched")
        return watch.logits(ids, starts, by=self._model, decisions=decisions, guessed=guessed)

    def with_experts_of(self, lender: Run) -> Run:
        """Return a fresh run of this checkpoint, but with the routed experts of another."""
        source = _Borrowed(self._model.source, lender._model.source)
        return Run(source, self._model.config, self._model.numerics, label=self._label)

    def logits(self, streams: Tensor | None = None) -> Tensor:
        """Return the logits after the last token, [V] float32, of its own streams [T, hc, D] or of others."""
        h = self.streams if streams is None else streams
        return self._finite("head", self._model.head(h[-1:])[0])

    def _finite(self, where: str, found: Tensor) -> Tensor:
        if bool(torch.isfinite(found).all()):
            return found
        bad = ~torch.isfinite(found)
        token = (
            int(bad.reshape(len(found), -1).any(1).nonzero()[0]) if found.dim() > 1 else len(self._ids) - 1
        )
        problem = f"{int(bad.sum()):,} of {found.numel():,} activations are infinity or NaN"
        raise Dsv4Error(
            finding("probe.non-finite", self._label + where, problem, found=f"the first at token {token:,}")
        )


class _Borrowed:
    """A checkpoint with the routed experts of another one."""

    def __init__(self, own: Source, lender: Source) -> None:
        self._own = own
        self._lender = lender

    def tensor(self, name: str) -> Tensor:
        return self._own.tensor(name)

    def expert(self, prefix: str, index: int) -> Expert:
        return self._lender.expert(prefix, index)


@dataclass(frozen=True, slots=True)
class Step:
    """One answered token.

    Attributes:
        token: The most probable one; of equal ones the smallest id.
        margin: Gap between the two largest logits.
        top: The most probable tokens, best first, with the logarithm of their probability.
    """

    token: int
    margin: float
    top: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, logits: Tensor, count: int) -> Step:
        """Take the step that logits [V] decide.

        Args:
            logits: [V] float32.
            count: Tokens in `top`.
        """
        values, order = torch.sort(logits.double(), descending=True, stable=True)
        logprobs = torch.log_softmax(values, 0)
        ids: list[int] = order[: max(count, 1)].tolist()
        margin = float(values[0] - values[1]) if len(values) > 1 else 0.0
        return cls(ids[0], margin, tuple(zip(ids, logprobs[: len(ids)].tolist(), strict=True)))

    def as_dict(self, text: Callable[[Sequence[int]], str] | None) -> dict[str, Any]:
        """Return the JSON form; `text` turns ids into text, None where nothing can."""
        top = [
            {"token": token, "text": text([token]) if text else None, "logprob": logprob}
            for token, logprob in self.top
        ]
        return {"token": self.token, "margin": self.margin, "top": top}
