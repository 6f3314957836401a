"""How far a checkpoint is from its reference, layer by layer.

What may differ decides how it is compared. Without repacked experts two layouts hold the same numbers, so the
same arithmetic gives the same bits: any difference is a fault. With repacked experts every layer is run on
the reference's own streams and with the reference's decisions; attention must still be bit-equal, and the
experts stay within a limit. Where the arithmetic rounds, decisions are replayed and the logits are judged.

Errors are relative: root of (sum of squared differences / sum of squared reference).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from dsv4convert.errors import Finding, finding
from dsv4convert.names import Layout
from dsv4convert.probe.forward import Run, Sublayers

if TYPE_CHECKING:
    from kernels_ref.decisions import Decisions


_ROUTED: Final = "ffn.experts"
_SHARED: Final = "ffn.shared_experts"


class Expectation(str, Enum):
    """What two checkpoints owe each other."""

    EQUAL = "equal"
    REPACKED = "repacked"
    ROUNDED = "rounded"


#: Largest relative error with the reference's decisions replayed: experts repacked to INT8_SHIFT, then
#: arithmetic that rounds. How far DeepSeek's own arithmetic is off is shown, not judged.
REPACKED_LIMIT: Final = 5e-2
ROUNDED_LIMITS: Final[Mapping[str, float | None]] = {"bf16": 3e-2, "sm80": 5e-2, "official": None}


def expectation(numerics: str, layout: Layout, reference: Layout) -> tuple[Expectation, float | None]:
    """Return what a checkpoint owes its reference, which runs exactly, and the limit of the errors."""
    repacked = (layout is Layout.INT8) != (reference is Layout.INT8)
    if numerics == "exact":
        return (Expectation.REPACKED, REPACKED_LIMIT) if repacked else (Expectation.EQUAL, 0.0)
    limit = ROUNDED_LIMITS[numerics]
    return Expectation.ROUNDED, max(limit, REPACKED_LIMIT) if limit and repacked else limit


class Row(NamedTuple):
    """One layer compared.

    Attributes:
        layer: ``layers.N``.
        attention, routed, shared: Error of their outputs; after a repack, on the reference's streams.
        streams: Error after the layer, everything before it included.
        chosen: Share of the reference's experts that the checkpoint chooses by itself.
        picked: The same of the indexer's entries; None where the layer has none.
    """

    layer: str
    attention: float
    routed: float
    shared: float
    streams: float
    chosen: float
    picked: float | None


@dataclass
class Comparison:
    """Two checkpoints side by side on one prompt.

    Attributes:
        theirs: The reference.
        own: The checkpoint, on its own.
        replayed: The checkpoint with the reference's decisions; `own` itself if both must be equal.
        forced: The checkpoint on the reference's streams; None unless experts were repacked.
        expected: What is owed, and the limit.
        made: Decisions of the reference and of `replayed`.
        exact_layers: Layers whose experts lost nothing in the repack, by the manifest.
        rows: What was found so far.
    """

    theirs: Run
    own: Run
    replayed: Run
    forced: Run | None
    expected: Expectation
    limit: float | None
    made: tuple[Decisions, Decisions]
    exact_layers: frozenset[str] = frozenset()
    rows: list[Row] = field(default_factory=list)
    embedded: float = 0.0
    logits: float = 0.0

    def begin(self, ids: Sequence[int]) -> None:
        """Take the prompt in."""
        for run in self._runs():
            run.begin(ids)
        self.embedded = relative_error(self.own.streams, self.theirs.streams)

    def _runs(self) -> list[Run]:
        found = [self.theirs, self.own]
        found += [self.replayed] if self.replayed is not self.own else []
        return [*found, self.forced] if self.forced else found

    def layer(self, index: int) -> None:
        """Run one layer everywhere and compare."""
        before = self.theirs.streams
        theirs, own = self.theirs.layer(index), self.own.layer(index)
        replayed = own if self.replayed is self.own else self.replayed.layer(index)
        inside = self.forced.layer(index, before) if self.forced else replayed
        self.rows.append(self._row(f"layers.{index}", theirs, inside, replayed.streams))

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

        reference, checkpoint = self.made
        if name not in reference.chosen:
            return None
        return agreement({name: checkpoint.own[name]}, {name: reference.chosen[name]})[name]

    def finish(self) -> None:
        """Compare the logits after the last token of the prompt."""
        self.logits = relative_error(self.replayed.logits(), self.theirs.logits())

    def findings(self) -> list[Finding]:
        """Return what is further off than it may be; of several consequences of one fault the first."""
        if self.expected is Expectation.ROUNDED:
            return self._rounded()
        found = list(self._equal() if self.expected is Expectation.EQUAL else self._repacked())
        return found[:1] if self.expected is Expectation.EQUAL else found

    def _equal(self) -> Iterator[Finding]:
        if self.embedded:
            yield _differs("embed", self.embedded)
        for row in self.rows:
            parts = (row.attention, row.routed, row.shared, row.streams)
            for part, error in zip(("attn", _ROUTED, _SHARED, "hc_ffn"), parts, strict=True):
                if error:
                    yield _differs(f"{row.layer}.{part}", error)
        if self.logits:
            yield _differs("head", self.logits)

    def _repacked(self) -> Iterator[Finding]:
        if self.embedded:
            yield _differs("embed", self.embedded)
        limit, found = self.limit or 0.0, False
        for row in self.rows:
            lossless = row.layer in self.exact_layers
            for part, error in (("attn", row.attention), (_ROUTED, row.routed), (_SHARED, row.shared)):
                if error and (part != _ROUTED or lossless):
                    yield _differs(f"{row.layer}.{part}", error)
                elif error > limit:
                    yield _beyond(f"{row.layer}.{part}", error, limit)
                else:
                    continue
                found = True
                break
        if not found and self.logits > limit:
            yield _beyond("head", self.logits, limit)

    def _rounded(self) -> list[Finding]:
        if self.limit is None or self.logits <= self.limit:
            return []
        return [_beyond("head", self.logits, self.limit)]

    def as_dict(self, reference: Mapping[str, Any], tokens: Sequence[int], equal: int) -> dict[str, Any]:
        """Return the JSON form.

        Args:
            reference: Name and digests of the reference.
            tokens: What the reference answers.
            equal: How many of them, from the first, the checkpoint answers too.
        """
        return {
            "reference": dict(reference),
            "expectation": self.expected.value,
            "limit": self.limit,
            "logits": self.logits,
            "tokens": list(tokens),
            "equal_tokens": equal,
            "layers": [row._asdict() for row in self.rows],
        }


def relative_error(found: Tensor, reference: Tensor) -> float:
    """Return the relative error of a tensor; exactly 0 for equal ones and for nothing else."""
    a, b = found.double(), reference.double()
    if torch.equal(a, b):
        return 0.0
    # Two tensors that differ in a subnormal must not come out as equal.
    return max(float((a - b).norm() / b.norm().clamp(min=1e-300)), 1e-300)


def _differs(where: str, error: float) -> Finding:
    problem = "is not bit-equal to the reference"
    return finding(
        "probe.differs", where, problem, expected="no difference", found=f"relative error {error:.2g}"
    )


def _beyond(where: str, error: float, limit: float) -> Finding:
    problem = "is further from the reference than it may be"
    expected, found = f"a relative error of at most {limit:g}", f"{error:.2g}"
    return finding("probe.error-limit", where, problem, expected=expected, found=found)
