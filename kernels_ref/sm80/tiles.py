"""Which kernels and tiles run experts, attention and index scores, by number of tokens.

The tables are measured, not derived. `DEFAULT`, `ATTENTION` and `SCORES` hold what was fastest on the card
that they name; another card is measured with ``python -m kernels_ref.sm80.tune FILE``, and the environment
variable `VARIABLE` makes the file's tables the ones in use (`kernels_ref.sm80.table_file`). A choice depends
on shapes alone: nothing waits for the GPU, and a captured graph stays valid.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, TypeVar

#: Environment variable that names a file written by `tune`.
VARIABLE = "DSV4_SM80_TILES"


@dataclass(frozen=True, slots=True)
class Tile:
    """One product's kernel and tile.

    Attributes:
        kernel: ``few``, or ``many``.
        rows: Rows of the weight matrix in a tile: 16 * warps or more.
        warps, stages: Warps of a block, and depth of the software pipeline.
        halves: Halves of groups, 64 codes each, in a step of the loop: 1, 2, 4 or 8.
    """

    kernel: str
    rows: int
    warps: int
    stages: int
    halves: int = 2

    @property
    def label(self) -> str:
        """The tile in a few characters."""
        codes = 64 * self.halves
        return f"{self.kernel} {self.rows} rows, {self.warps} warps, {self.stages} stages of {codes} codes"


@dataclass(frozen=True, slots=True)
class Plan:
    """How a layer runs for up to `tokens` tokens.

    Attributes:
        tokens: Largest number of tokens; 0 for any number.
        arithmetic: ``w4a16`` or ``w4a8``.
        columns: Columns of a tile: tokens of a block times digits. 0: no alignment, each pair is a block.
        w13, w2: The products.
    """

    tokens: int
    arithmetic: str
    columns: int
    w13: Tile
    w2: Tile


@dataclass(frozen=True, slots=True)
class Walk:
    """How a block of attention walks over its keys.

    Attributes:
        tiles: Tiles of keys in a round, 1 or 2.
        stages: Depth of the software pipeline.
        slices: Parts that a row is multiplied in: 1, 2 or 4.
    """

    tiles: int
    stages: int
    slices: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How attention runs for up to `tokens` tokens of up to 16 heads; more heads count as more tokens.

    Attributes:
        tokens: Largest number of tokens; 0 for any number.
        split: For keys split over blocks, where a block has few tiles and the latency of one counts.
        whole: For whole lists.
        blocks: Blocks that one multiprocessor runs at a time; it decides how often keys are split.
    """

    tokens: int
    split: Walk
    whole: Walk
    blocks: int


@dataclass(frozen=True, slots=True)
class ScoresPlan:
    """How index scores run for up to `tokens` queries.

    Attributes:
        tokens: Largest number of queries; 0 for any number.
        warps, stages: Warps of a block, and depth of the software pipeline.
        pages: Pages of a block, at most.
        blocks: Blocks that one multiprocessor runs at a time.
    """

    tokens: int
    warps: int
    stages: int
    pages: int
    blocks: int


#: A rank's intermediate size -> arithmetic, or ``auto`` -> plans by ascending number of tokens.
Table = dict[int, dict[str, tuple[Plan, ...]]]
AnyPlan = TypeVar("AnyPlan", Plan, AttentionPlan, ScoresPlan)


class Tables(NamedTuple):
    """What a file holds, or what is shipped."""

    experts: Table
    attention: tuple[AttentionPlan, ...]
    scores: tuple[ScoresPlan, ...]


def _few(tokens: int, columns: int, w13: tuple[int, ...], w2: tuple[int, ...], digits: int = 2) -> Plan:
    return Plan(tokens, f"w4a{8 * digits}", columns, Tile("few", *w13), Tile("few", *w2))


def _many(tokens: int, columns: int, w13: tuple[int, ...], w2: tuple[int, ...], digits: int = 1) -> Plan:
    return Plan(tokens, f"w4a{8 * digits}", columns, Tile("many", *w13), Tile("many", *w2))


# Rows, warps, stages, halves. NVIDIA H200, SM80 code, H = 4096, 256 experts, 6 a token; 2026-11-29.
_FINE_2048 = (
    _few(2, 0, (16, 1, 3, 4), (16, 1, 3, 4)),
    _few(6, 0, (32, 1, 3, 4), (32, 1, 3, 4)),
    _few(64, 8, (32, 1, 3, 4), (32, 1, 3, 4)),
)
_COARSE_2048 = (
    _few(128, 8, (32, 1, 3, 4), (32, 1, 3, 4), 1),
    _many(512, 16, (64, 2, 2, 4), (64, 2, 2, 4)),
    _many(1024, 16, (128, 4, 4, 1), (128, 2, 4, 1)),
    _many(2048, 64, (256, 8, 4, 1), (256, 8, 4, 1)),
    _many(0, 128, (256, 8, 5, 1), (256, 8, 3, 2)),
)
_FINE_512 = (
    _few(2, 0, (16, 1, 4, 4), (32, 2, 4, 2)),
    _few(8, 0, (16, 1, 3, 4), (64, 2, 4, 2)),
    _few(64, 8, (32, 1, 3, 4), (64, 2, 4, 2)),
)
_COARSE_512 = (
    _few(128, 8, (32, 1, 3, 4), (64, 2, 4, 2), 1),
    _many(512, 16, (64, 2, 2, 4), (128, 2, 4, 1)),
    _many(1024, 16, (128, 4, 4, 1), (128, 2, 4, 1)),
    _many(2048, 64, (256, 8, 4, 1), (256, 8, 4, 1)),
    _many(0, 128, (256, 8, 5, 1), (256, 8, 3, 1)),
)
_FINE_256 = (
    _few(2, 0, (16, 1, 4, 4), (16, 1, 4, 4)),
    _few(8, 0, (16, 1, 3, 4), (32, 1, 3, 4)),
    _few(128, 8, (32, 1, 3, 4), (32, 1, 3, 4)),
)
_COARSE_256 = (
    _many(1024, 16, (64, 2, 2, 4), (128, 2, 2, 4)),
    _many(2048, 64, (256, 8, 4, 1), (256, 8, 3, 1)),
    # W2: the fastest tile measured, (256, 8, 4, 1), spills when its four steps are unrolled; not this one.
    _many(0, 128, (256, 8, 5, 1), (256, 8, 2, 2)),
)
DEFAULT: Table = {
    2048: {
        "auto": _FINE_2048 + _COARSE_2048,
        "w4a16": (
            *_FINE_2048[:-1],
            _few(128, 8, (32, 1, 3, 4), (32, 1, 3, 4)),
            _many(1024, 32, (128, 4, 4, 2), (128, 4, 4, 2), 2),
            _many(0, 128, (256, 8, 3, 1), (256, 8, 3, 1), 2),
        ),
        "w4a8": (_few(8, 0, (32, 1, 3, 4), (32, 1, 3, 4), 1), *_COARSE_2048),
    },
    512: {
        "auto": _FINE_512 + _COARSE_512,
        "w4a16": (
            *_FINE_512[:-1],
            _few(128, 8, (32, 1, 3, 4), (64, 2, 4, 2)),
            _many(1024, 32, (128, 4, 4, 2), (128, 4, 4, 1), 2),
            _many(0, 128, (256, 8, 3, 1), (256, 8, 3, 1), 2),
        ),
        "w4a8": (_few(8, 0, (16, 1, 3, 4), (64, 2, 4, 2), 1), *_COARSE_512),
    },
    256: {
        "auto": _FINE_256 + _COARSE_256,
        "w4a16": (
            *_FINE_256,
            _many(1024, 32, (128, 4, 4, 2), (128, 2, 3, 4), 2),
            _many(0, 128, (256, 8, 4, 1), (256, 8, 3, 1), 2),
        ),
        "w4a8": (
            _few(8, 0, (16, 1, 4, 4), (32, 1, 3, 4), 1),
            _few(128, 8, (32, 1, 3, 4), (32, 1, 3, 4), 1),
            *_COARSE_256,
        ),
    },
}


# The same card and code; 2026-11-30. Two tiles and the queries take 81 KiB either way: exactly two blocks fit
# one multiprocessor of an A100. Few tokens have too few tiles for that: more splits would be more to join.
# One warp scores a page: sums over heads stay inside it, no block waits for itself.
_SPLIT, _WHOLE = Walk(1, 3, 2), Walk(2, 2, 4)
ATTENTION = (
    AttentionPlan(32, split=_SPLIT, whole=_WHOLE, blocks=1),
    AttentionPlan(0, split=_SPLIT, whole=_WHOLE, blocks=2),
)
SCORES = (ScoresPlan(0, warps=1, stages=3, pages=16, blocks=8),)


def choose(tokens: int, intermediate: int, arithmetic: str = "auto") -> Plan:
    """Return the plan for a number of tokens: of the nearest intermediate size that was measured."""
    table = _tables().experts
    size = min(table, key=lambda measured: (abs(measured - intermediate), measured))
    return _first(table[size][arithmetic], tokens)


def choose_attention(tokens: int) -> AttentionPlan:
    """Return the plan for a number of tokens of up to 16 heads each."""
    return _first(_tables().attention, tokens)


def choose_scores(tokens: int) -> ScoresPlan:
    """Return the plan for a number of queries."""
    return _first(_tables().scores, tokens)


def _first(plans: Sequence[AnyPlan], tokens: int) -> AnyPlan:
    return next(plan for plan in plans if not plan.tokens or tokens <= plan.tokens)


@lru_cache(maxsize=1)
def _tables() -> Tables:
    from kernels_ref.sm80.table_file import read

    path = os.environ.get(VARIABLE)
    return read(Path(path)) if path else Tables(DEFAULT, ATTENTION, SCORES)
