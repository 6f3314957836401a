"""Where in a model a tensor may be: a block, its position, and the questions the table asks about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from dsv4convert.geometry import Engram, Geometry, Vision

T = TypeVar("T")


def _required(section: T | None) -> T:
    if section is None:
        raise LookupError("a row asked for numbers that its own condition excludes")
    return section


@dataclass(frozen=True, slots=True)
class At:
    """Where a row is being asked for: the geometry and the block or tower position."""

    g: Geometry
    block: str
    index: int

    @property
    def ratio(self) -> int:
        """Compress ratio of the block; draft blocks have none."""
        return self.g.ratios[self.index] if self.block == "layers" else 0

    @property
    def has_compressor(self) -> bool:
        """Tell whether the block compresses keys and values."""
        return self.block == "layers" and self.index in self.g.kv_sources

    @property
    def has_indexer(self) -> bool:
        """Tell whether the block selects compressed positions."""
        return self.block == "layers" and self.index in self.g.index_sources

    @property
    def is_hash(self) -> bool:
        """Tell whether the block routes by token id instead of by score."""
        return self.block == "layers" and self.index < self.g.hash_layers

    @property
    def experts(self) -> int:
        """Routed experts of the block."""
        return self.g.draft.experts if self.block == "mtp" else self.g.experts

    @property
    def is_first_stage(self) -> bool:
        """Tell whether this is the first draft block."""
        return self.block == "mtp" and self.index == 0

    @property
    def is_last_stage(self) -> bool:
        """Tell whether this is the last draft block."""
        return self.block == "mtp" and self.index == self.g.draft.stages - 1

    @property
    def engram(self) -> Engram:
        """Engram numbers; only rows that require them may ask."""
        return _required(self.g.engram)

    @property
    def tower(self) -> Vision:
        """Vision numbers; only rows that require them may ask."""
        return _required(self.g.vision)


def always(at: At) -> bool:
    """Every place."""
    return True


def v4(at: At) -> bool:
    """Models of the V4 family."""
    return at.g.family == "v4"


def has_vision(at: At) -> bool:
    """Models with a vision tower."""
    return at.g.vision is not None


def has_bias(at: At) -> bool:
    """Routers with a bias."""
    # Hash layers route by token id and have no bias, except in vision releases, where pictures are scored.
    return not at.is_hash or at.g.vision is not None


def has_engram(at: At) -> bool:
    """Trunk blocks with an Engram table."""
    return at.block == "layers" and at.g.engram is not None and at.index in at.g.engram.layers


def is_dspark(at: At) -> bool:
    """Models with a DSpark draft."""
    return at.g.draft.is_dspark


def is_preview_stage(at: At) -> bool:
    """The preview's MTP block."""
    return at.block == "mtp" and not at.g.draft.is_dspark


def has_stage_end(at: At) -> bool:
    """The draft block that ends with a norm and a head."""
    return at.is_last_stage if is_dspark(at) else at.block == "mtp"
