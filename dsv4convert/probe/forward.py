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
from dsv4convert.probe.source import CheckpointSource

if TYPE_CHECKING:
    from dsv4convert.probe.draft import DraftWatch
    from kernels_ref.arithmetic import Numerics
    from kernels_ref.config import ModelConfig
    from kernels_ref.decisions import Decisions

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
        routed: [T, D] weighted sum of the routed experts.
        shared: [T, D] output of the shared expert, which is added to it.
        streams: [T, hc, D] after the layer.
    """

    attention: Tensor
    routed: Tensor
    shared: Tensor
    streams: Tensor


class Run:
    """One sequence through one checkpoint.

    Args:
        source: Weights.
        config: Numbers of the model.
        numerics: What is rounded.
        decisions: Records or prescribes the choice of experts and entries.
        label: Prefix of the places that findings name, for a second checkpoint.
    """

    def __init__(
        self,
        source: CheckpointSource,
        config: ModelConfig,
        numerics: Numerics,
        *,
        decisions: Decisions | None = None,
        label: str = "",
    ) -> None:
        from kernels_ref.model import Model

        self._model = Model(config, source, numerics, decisions=decisions)
        self._state = self._model.state()
        self._label = label
        self.streams = torch.empty(0)
        self._ids = torch.empty(0, dtype=torch.int64)
        self._watch: DraftWatch | None = None

    @property
    def layers(self) -> int:
        """Number of trunk layers."""
        return self._model.config.layers

    def begin(self, ids: Sequence[int]) -> None:
        """Take the next tokens of the sequence in; `streams` becomes their embedding, [T, hc, D]."""
        self._ids = torch.tensor(ids, dtype=torch.int64)
        self.streams = self._finite("embed", self._model.embed(self._ids))

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
            routed = finite("ffn.experts", block.routed(x, self._ids, start))
            return (routed + finite("ffn.shared_experts", block.shared(x)).float()).to(x.dtype)

        h = self.streams if streams is None else streams
        h = block.sublayer("attn", h, lambda x: finite("attn", block.attention(x, state)))
        self.streams = finite("hc_ffn", block.sublayer("ffn", h, experts))
        if self._watch is not None:
            self._watch(index, self.streams)
        return Sublayers(parts["attn"], parts["ffn.experts"], parts["ffn.shared_experts"], self.streams)

    def watch_draft(self) -> int:
        """Keep from now on what the draft layers see; return the guesses per step, 0 without a draft."""
        from dsv4convert.probe.draft import DraftWatch, depth

        guesses = depth(self._model)
        self._watch = DraftWatch(self._model, self._label) if guesses else None
        return guesses

    def guesses(self, ids: Sequence[int], starts: Sequence[int]) -> Tensor:
        """Return the logits of the draft behind each start, see `DraftWatch.logits`; after `watch_draft`."""
        if self._watch is None:
            raise ValueError("no draft was watched")
        return self._watch.logits(ids, starts)

    def logits(self) -> Tensor:
        """Return the logits after the last token, [V] float32."""
        return self._finite("head", self._model.head(self.streams[-1:])[0])

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
