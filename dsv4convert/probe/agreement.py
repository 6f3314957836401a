"""How far a checkpoint is from its reference, layer by layer.

What may differ decides how it is compared. Without repacked experts two layouts hold the same numbers, so the
same arithmetic gives the same bits: any difference is a fault. With repacked experts every layer is run on
the reference's own streams and with the reference's decisions. Everything but the routed experts must then
still be bit-equal, decisions included, and they stay within a limit. Where the arithmetic rounds, decisions
are replayed and the logits are judged.

Errors are relative: root of (sum of squared differences / sum of squared reference).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

import torch
from torch import Tensor

from dsv4convert.errors import Finding, finding
from dsv4convert.names import Layout

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


class Kept(NamedTuple):
    """What the repack of a layer's experts leaves as it was, on the reference's streams; 0 is owed.

    Attributes:
        hc_attn, hc_ffn: Error of what the hyper-connections of a sublayer read, or write for the
            reference's output of it.
        picks: Share of the tokens whose indexer picks other entries.
        choices: Share of the tokens that go to other experts.
        weights: Error of the weights of the reference's experts.
    """

    hc_attn: float
    picks: float
    hc_ffn: float
    choices: float
    weights: float


class Owed(NamedTuple):
    """What a checkpoint owes its reference.

    Attributes:
        expected: How they are compared.
        limit: Of the errors, None where nothing is judged.
        exact_layers: Layers whose experts lost nothing in the repack, by the manifest.
    """

    expected: Expectation
    limit: float | None
    exact_layers: frozenset[str] = frozenset()


@dataclass
class Pass:
    """The prompt, or one further token, through all layers of both checkpoints.

    Attributes:
        rows: One per layer.
        kept: The same; none unless experts were repacked.
        seen: Error of the vision tower's rows; it runs in float32 everywhere, so 0 is owed.
        embedded: Error of the embedding.
        head: Error of the head's logits on the reference's streams; 0 unless experts were repacked.
        logits: Error of the logits after the last token.
    """

    rows: list[Row] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    seen: float = 0.0
    embedded: float = 0.0
    head: float = 0.0
    logits: float = 0.0

    def findings(self, owed: Owed) -> list[Finding]:
        """Return what is further off than it may be; of several consequences of one fault the first."""
        if self.seen:
            return [differs("vision", self.seen)]
        if owed.expected is Expectation.EQUAL:
            return list(self._equal())[:1]
        if owed.expected is Expectation.REPACKED:
            return list(self._repacked(owed))
        return list(self._head(owed.limit))

    def _equal(self) -> Iterator[Finding]:
        if self.embedded:
            yield differs("embed", self.embedded)
        for row in self.rows:
            parts = (row.attention, row.routed, row.shared, row.streams)
            for part, error in zip(("attn", _ROUTED, _SHARED, "hc_ffn"), parts, strict=True):
                if error:
                    yield differs(f"{row.layer}.{part}", error)
        if self.logits:
            yield differs("head", self.logits)

    def _repacked(self, owed: Owed) -> Iterator[Finding]:
        if self.embedded:
            yield differs("embed", self.embedded)
        layers = (_layer(row, kept, owed) for row, kept in zip(self.rows, self.kept, strict=True))
        found = [fault for fault in layers if fault]
        yield from found
        if self.head:
            yield differs("head", self.head)
        elif not found and not self.embedded:
            yield from self._head(owed.limit)

    def _head(self, limit: float | None) -> Iterator[Finding]:
        if limit is not None and self.logits > limit:
            yield beyond("head", self.logits, limit)


def _layer(row: Row, kept: Kept, owed: Owed) -> Finding | None:
    """Return the first fault of a layer on the reference's streams, in the order of computation."""
    limit = 0.0 if row.layer in owed.exact_layers else owed.limit or 0.0
    if kept.hc_attn or row.attention:
        return differs(f"{row.layer}.{'hc_attn' if kept.hc_attn else 'attn'}", kept.hc_attn or row.attention)
    if kept.picks:
        return _chooses(f"{row.layer}.attn.indexer", kept.picks)
    if kept.hc_ffn or row.shared:
        return differs(f"{row.layer}.{'hc_ffn' if kept.hc_ffn else _SHARED}", kept.hc_ffn or row.shared)
    if kept.choices:
        return _chooses(f"{row.layer}.ffn.gate", kept.choices)
    if kept.weights:
        return differs(f"{row.layer}.ffn.gate", kept.weights)
    if row.routed > limit:
        where = f"{row.layer}.{_ROUTED}"
        return beyond(where, row.routed, limit) if limit else differs(where, row.routed)
    return None


def relative_error(found: Tensor, reference: Tensor) -> float:
    """Return the relative error of a tensor; exactly 0 for equal ones and for nothing else."""
    a, b = found.double(), reference.double()
    if torch.equal(a, b):
        return 0.0
    # Two tensors that differ in a subnormal must not come out as equal.
    return max(float((a - b).norm() / b.norm().clamp(min=1e-300)), 1e-300)


def differs(where: str, error: float) -> Finding:
    """Return the finding about a difference where none may be."""
    problem = "is not bit-equal to the reference"
    return finding(
        "probe.differs", where, problem, expected="no difference", found=f"relative error {error:.2g}"
    )


def beyond(where: str, error: float, limit: float) -> Finding:
    """Return the finding about an error above its limit."""
    problem = "is further from the reference than it may be"
    expected, found = f"a relative error of at most {limit:g}", f"{error:.2g}"
    return finding("probe.error-limit", where, problem, expected=expected, found=found)


def _chooses(where: str, share: float) -> Finding:
    problem = "chooses otherwise than the reference, on the reference's streams"
    found = f"others for {share:.1%} of the tokens"
    return finding("probe.differs", where, problem, expected="the same choices", found=found)
