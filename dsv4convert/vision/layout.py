"""Where a picture stands among the tokens: its size, its positions, and what sees them. No torch, no numpy.

    grid = plan_size(width, height, vision)     # pixels it is resized to, patches, cells, tokens
    block = place(grid, start)                  # positions from `start` in the expanded prompt: kinds, order
    prompt = expand(ids, grids, placeholder, vision.vocab)  # every placeholder -> a block; counts must agree
    first, last = visible(position, span, vision.window)    # keys that a position sees; span or None
    end = step_back(end, prompt.blocks)         # the last place not inside a block where a prefill may stop
    key = salted_hash(patch_bytes, grid, block.lead)

A block is `lead` PADs, START, the body, END. Its layout depends on where it starts, so on everything before
it: START stands at a position that is 3 modulo 4, so that a compressed entry of ratio 4 is a cell of 2 x 2
tokens.

Source: DeepSeek-V4-Flash-Vision-Exp ``inference/image_processor.py`` and ``inference/model.py``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Final, NamedTuple

from dsv4convert.vision.config import ENDS, MOST_LEAD, VisionConfig

#: The text that stands for one picture in a prompt; one special token of the official tokenizer.
PLACEHOLDER: Final = "<｜deepseek_image｜>"


class Kind(IntEnum):
    """What stands at a position of a block; ``vocab + kind`` is its official pseudo id."""

    START = 0
    PAD = 1
    IMAGE = 2
    NEWLINE = 3
    END = 4


# ---- size


@dataclass(frozen=True, slots=True)
class Grid:
    """A planned picture.

    Attributes:
        width, height: Pixels it is resized to; multiples of the patch side.
        patch_rows, patch_cols: Patches, what the tower sees.
        rows, cols: Cells, what the language model sees.
    """

    width: int
    height: int
    patch_rows: int
    patch_cols: int
    rows: int
    cols: int

    @classmethod
    def of(cls, width: int, height: int, vision: VisionConfig) -> Grid:
        """Return the grid of a picture that has its final size already."""
        down, cols = vision.downsample, width // vision.patch
        rows = height // vision.patch
        return cls(width, height, rows, cols, -(-rows // down), -(-cols // down))

    @property
    def patches(self) -> int:
        """Number of patches."""
        return self.patch_rows * self.patch_cols

    @property
    def cells(self) -> int:
        """Number of cells: rows that the aligner gives."""
        return self.rows * self.cols

    @property
    def tokens(self) -> int:
        """Positions from START to END; 2 modulo 4."""
        row = self.cols + 1
        pad_row = row if self.rows % 2 else 0
        filler = 2 if (self.rows + 1) // 2 * row % 2 else 0
        return self.rows * row + pad_row + filler + ENDS


def plan_size(width: int, height: int, vision: VisionConfig) -> Grid:
    """Return what a picture is resized to. The arithmetic is official to the order of its operations.

    Args:
        width, height: Pixels of the decoded picture.
        vision: Numbers of the model.

    Raises:
        ValueError: the picture has no pixels.
    """
    if width < 1 or height < 1:
        raise ValueError(f"a picture of {width} x {height} pixels has no area")
    p = vision.patch
    w, h = min(width, vision.max_ratio * height), height
    if w * h < vision.min_pixels:
        # A power, as in the official code: of some areas the last bit is not that of `math.sqrt`.
        q = (vision.min_pixels / (w * h)) ** 0.5
        w, h = int(w * q), int(h * q)
    grid = Grid.of(math.ceil(w / p) * p, math.ceil(h / p) * p, vision)
    # The first attempt has the whole budget; rounding to cells may still exceed it.
    most = vision.max_tokens - MOST_LEAD
    budget = most
    while grid.tokens > most:
        grid = _fit(w, h, budget, vision)
        budget -= 1
    return grid


def _fit(w: int, h: int, budget: int, vision: VisionConfig) -> Grid:
    """Return the grid of nearly the same shape whose cells fit into a budget of tokens."""
    cell, p, free = vision.cell, vision.patch, budget - ENDS
    ratio = h / w
    cols = math.sqrt(free / ratio + 1 / 4) - 1 / 2
    rows = cols * ratio
    if cols < 1:
        return Grid.of(cell, free // 2 // 2 * 2 * cell, vision)
    if rows < 2:
        return Grid.of((free // 2 - 1) * cell, 2 * cell, vision)
    scale = min(math.floor(cols) * cell / w, math.floor(rows) // 2 * 2 * cell / h)
    return Grid.of(math.floor(w * scale / p) * p, math.floor(h * scale / p) * p, vision)


# ---- positions


class Span(NamedTuple):
    """Positions START and END of a block; what lies between, both included, sees itself whole."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Block:
    """The positions of one picture.

    Attributes:
        start: Position of its first token in the expanded prompt: the first lead PAD, or START.
        lead: PADs before START, 0..3.
        kinds: `Kind` of every position, lead PADs included.
        perm: For each IMAGE position in order, its row of the aligner's output; a permutation.
    """

    start: int
    lead: int
    kinds: tuple[int, ...]
    perm: tuple[int, ...]

    @property
    def stop(self) -> int:
        """Position after END."""
        return self.start + len(self.kinds)

    @property
    def span(self) -> Span:
        """START and END."""
        return Span(self.start + self.lead, self.stop - 1)

    def pseudo_ids(self, vocab: int) -> tuple[int, ...]:
        """Return the official ids of the positions, ``vocab + kind``: none has an embedding."""
        return tuple(vocab + kind for kind in self.kinds)


def lead_pads(start: int) -> int:
    """Return how many PADs stand before START of a block that begins at a position."""
    return 3 - start % 4


def place(grid: Grid, start: int) -> Block:
    """Return the block of a picture that begins at a position of the expanded prompt."""
    kinds, perm = _body(grid.rows, grid.cols)
    lead = lead_pads(start)
    return Block(start, lead, (*[int(Kind.PAD)] * lead, int(Kind.START), *kinds, int(Kind.END)), perm)


@lru_cache(maxsize=256)
def _body(rows: int, cols: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return types and permutation between START and END.

    Rows end in NEWLINE, and an odd last row is followed by a row of PADs. They are read in pairs, column by
    column, the upper cell before the lower one; two PADs then make the length a multiple of four.
    """

    def at(row: int, col: int) -> tuple[int, int]:
        if row == rows:
            return Kind.PAD, -1
        return (Kind.IMAGE, row * cols + col) if col < cols else (Kind.NEWLINE, -1)

    cells = [
        at(row, col) for upper in range(0, rows, 2) for col in range(cols + 1) for row in (upper, upper + 1)
    ]
    filler = [int(Kind.PAD)] * (len(cells) % 4)
    return (*(int(kind) for kind, _ in cells), *filler), tuple(row for _, row in cells if row >= 0)


@dataclass(frozen=True, slots=True)
class Expanded:
    """A prompt whose pictures have their positions.

    Attributes:
        ids: Token ids; pseudo ids ``vocab + kind`` within blocks.
        blocks: One per picture, in order.
    """

    ids: tuple[int, ...]
    blocks: tuple[Block, ...]


def expand(ids: Iterable[int], grids: Sequence[Grid], placeholder: int, vocab: int) -> Expanded:
    """Replace every placeholder by the block of the next picture.

    Args:
        ids: Token ids.
        grids: One per picture.
        placeholder: Id that stands for one picture.
        vocab: Pseudo ids begin here.

    Raises:
        ValueError: there are more or fewer placeholders than pictures; the message counts both.
    """
    ids = tuple(ids)
    found = ids.count(placeholder)
    if found != len(grids):
        raise ValueError(f"the prompt has {found} places for a picture, and {len(grids)} pictures were given")
    result: list[int] = []
    blocks: list[Block] = []
    for token in ids:
        if token != placeholder:
            result.append(token)
            continue
        blocks.append(place(grids[len(blocks)], len(result)))
        result += blocks[-1].pseudo_ids(vocab)
    return Expanded(tuple(result), tuple(blocks))


# ---- what is seen, and where a prefill may stop


def spans(ids: Iterable[int], vocab: int) -> tuple[Span, ...]:
    """Return the spans of an expanded prompt by its pseudo ids; one per END, in order.

    Args:
        ids: Token ids with pseudo ids ``vocab + kind`` within blocks.
        vocab: Where they begin.

    Raises:
        ValueError: a START has no END, or the other way round.
    """
    found, first = [], None
    for position, token in enumerate(ids):
        if token not in (vocab + Kind.START, vocab + Kind.END):
            continue
        if (token == vocab + Kind.START) != (first is None):
            raise ValueError(f"the block of a picture is not closed at position {position}")
        if first is None:
            first = position
        else:
            found.append(Span(first, position))
            first = None
    if first is not None:
        raise ValueError(f"the block of a picture that starts at position {first} has no end")
    return tuple(found)


def visible(position: int, span: Span | None, window: int = 128) -> tuple[int, int]:
    """Return the first and the last key that a position sees uncompressed.

    Text sees the window that ends at itself. A position of a picture from START to END sees the whole
    picture, and to its left at least the window; lead PADs are text here. For arrays the rule is
    ``max(0, min(p - window + 1, first))`` and ``last``, with ``first = last = p`` outside of spans. This
    holds in the pass that takes the picture in; later tokens are text.

    Args:
        position: In the expanded prompt.
        span: Of the picture that the position belongs to; None outside, and for lead PADs.
        window: ``sliding_window``.
    """
    first, last = span if span else (position, position)
    return max(0, min(position - window + 1, first)), last


def visible_range(start: int, stop: int, found: Iterable[Span], window: int = 128) -> list[tuple[int, int]]:
    """Return `visible` of the positions ``start .. stop - 1``.

    Args:
        start, stop: Positions.
        found: Spans of the prompt, in any order; only those that meet the range matter.
        window: ``sliding_window``.
    """
    rows = [visible(position, None, window) for position in range(start, stop)]
    for span in found:
        for position in range(max(start, span.first), min(stop, span.last + 1)):
            rows[position - start] = visible(position, span, window)
    return rows


def step_back(end: int, blocks: Iterable[Block]) -> int:
    """Return the largest position <= `end` that is not inside a block: between its first token and its stop.

    A prefill that stops there leaves every picture whole on one side.
    """
    for block in blocks:
        if block.start < end < block.stop:
            return block.start
    return end


def salted_hash(pixels: bytes | bytearray | memoryview, grid: Grid, lead: int) -> int:
    """Return 64 bits that stand for a picture at an alignment.

    Equal bytes on another grid are another picture, and a picture after another number of lead PADs has other
    rows: both must differ wherever results are kept by hash.

    Args:
        pixels: Bytes of its patches.
        grid: Its grid.
        lead: Lead PADs of its block.
    """
    digest = hashlib.sha256(f"{grid.patch_rows}x{grid.patch_cols}+{lead}:".encode())
    digest.update(pixels)
    return int.from_bytes(digest.digest()[:8], "big")
