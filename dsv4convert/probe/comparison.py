"""Two checkpoints side by side: which runs a comparison takes, and what of them is compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dsv4convert.errors import Finding
from dsv4convert.probe.agreement import Kept, Owed, Pass, Row, relative_error
from dsv4convert.probe.forward import Run, Sublayers


@dataclass
class Comparison:
    """Two checkpoints on one prompt and the tokens that follow it.

    Attributes:
        theirs: The reference.
        own: The checkpoint, on its own.
        replayed: The checkpoint with the reference's decisions; `own` itself if both must be equal.
        forced: The checkpoint on the reference's streams, too; None unless experts were repacked.
        owed: How they are compared.
        passes: What was found so far: over the prompt, then for each further token.
    """

    theirs: Run
    own: Run
    replayed: Run
    forced: Run | None
    owed: Owed
    passes: list[Pass] = field(default_factory=list)

    def begin(
        self, ids: Sequence[int], pictures: Tensor | None = None, reference: Tensor | None = None
    ) -> None:
        """Take the prompt or a further token in.

        Args:
            ids: See `Run.begin`.
            pictures: Rows that the checkpoint's vision tower made of the pictures; None without pictures.
            reference: Those of the reference's.
        """
        self.theirs.begin(ids, reference)
        runs = [self.own]
        runs += [self.replayed] if self.replayed is not self.own else []
        for run in [*runs, self.forced] if self.forced else runs:
            run.begin(ids, pictures)
        seen = 0.0 if pictures is None or reference is None else relative_error(pictures, reference)
        embedded = relative_error(self.own.streams, self.theirs.streams)
        self.passes.append(Pass(seen=seen, embedded=embedded))

    def layer(self, index: int) -> None:
        """Run one layer everywhere and compare."""
        before = self.theirs.streams
        theirs, own = self.theirs.layer(index), self.own.layer(index)
        replayed = own if self.replayed is self.own else self.replayed.layer(index)
        inside = self.forced.layer(index, before) if self.forced else replayed
        now = self.passes[-1]
        now.rows.append(self._row(f"layers.{index}", theirs, inside, replayed.streams))
        if self.forced:
            now.kept.append(self._kept(self.forced, index, before, theirs, inside))

    def _row(self, layer: str, theirs: Sublayers, inside: Sublayers, streams: Tensor) -> Row:
        return Row(
            layer,
            relative_error(inside.attention, theirs.attention),
            relative_error(inside.routed, theirs.routed),
            relative_error(inside.shared, theirs.shared),
            relative_error(streams, theirs.streams),
            self._overlap(f"{layer}.ffn.gate") or 0.0,
            self._overlap(f"{layer}.attn.indexer"),
        )

    def _overlap(self, name: str) -> float | None:
        from kernels_ref.decisions import agreement

        reference, checkpoint = self.theirs.decisions.chosen, self.replayed.decisions.own
        if name not in reference:
            return None
        return agreement({name: checkpoint[name]}, {name: reference[name]})[name]

    def _kept(self, forced: Run, index: int, before: Tensor, theirs: Sublayers, inside: Sublayers) -> Kept:
        def mixing(kind: str, streams: Tensor, output: Tensor) -> float:
            both = (run.mixing(index, kind, streams, output) for run in (forced, self.theirs))
            return max(relative_error(a, b) for a, b in zip(*both, strict=True))

        return Kept(
            hc_attn=mixing("attn", before, theirs.attention),
            picks=self._other_choices(forced, f"layers.{index}.attn.indexer", len(before)),
            hc_ffn=mixing("ffn", theirs.middle, theirs.summed),
            choices=self._other_choices(forced, f"layers.{index}.ffn.gate", len(before)),
            weights=relative_error(inside.weights, theirs.weights),
        )

    def _other_choices(self, forced: Run, name: str, tokens: int) -> float:
        """Return the share of the last tokens whose choices are not the reference's, in whatever order."""
        if name not in forced.decisions.own:
            return 0.0
        pair = (forced.decisions.own[name], self.theirs.decisions.chosen[name])
        own, theirs = (torch.sort(rows[-tokens:], dim=-1).values for rows in pair)
        return float((own != theirs).any(-1).double().mean())

    def finish(self) -> Tensor:
        """Compare the logits after the last token; return the reference's, [V] float32."""
        now, logits = self.passes[-1], self.theirs.logits()
        now.logits = relative_error(self.replayed.logits(), logits)
        if self.forced:
            now.head = relative_error(self.forced.logits(self.theirs.streams), logits)
        return logits

    def findings(self) -> list[Finding]:
        """Return what is wrong in the first pass where something is; what follows it shows the same fault."""
        for number, done in enumerate(self.passes, 1):
            found = done.findings(self.owed)
            if found and number > 1:
                where = f"token {number:,}"
                return [replace(f, where=where, problem=f"`{f.where}` {f.problem}") for f in found]
            if found:
                return found
        return []

    def as_dict(self, reference: Mapping[str, Any], tokens: Sequence[int], equal: int) -> dict[str, Any]:
        """Return the JSON form; figures are those over the prompt.

        Args:
            reference: Name and digests of the reference.
            tokens: What the reference answers.
            equal: How many of them, from the first, the checkpoint answers too.
        """
        prompt = self.passes[0]
        return {
            "reference": dict(reference),
            "expectation": self.owed.expected.value,
            "limit": self.owed.limit,
            "logits": prompt.logits,
            "tokens": list(tokens),
            "equal_tokens": equal,
            "layers": [row._asdict() for row in prompt.rows],
        }
