"""Where pictures stand: sizes and blocks against hand-typed values and a second reading of the rules."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from dsv4convert import releases
from dsv4convert.vision.config import VisionConfig
from dsv4convert.vision.layout import (
    Block,
    Grid,
    Span,
    expand,
    lead_pads,
    place,
    plan_size,
    salted_hash,
    spans,
    step_back,
    visible,
    visible_range,
)

START, PAD, IMAGE, NEWLINE, END = range(5)


# ---- config


def test_a_text_checkpoint_has_no_pictures() -> None:
    config = releases.config("deepseek-v4-flash-0731")
    assert VisionConfig.from_config(config) is None
    assert VisionConfig.from_config(config | {"vision_n_layers": 0}) is None
    assert VisionConfig.from_config(releases.config("deepseek-v4.1-flash")) is None


def test_the_numbers_are_those_of_the_config(released: VisionConfig) -> None:
    assert (released.layers, released.dim, released.heads, released.inter) == (32, 1024, 16, 2816)
    assert (released.patch, released.theta, released.downsample, released.cell) == (14, 10000.0, 3, 42)
    assert (released.max_tokens, released.min_pixels, released.max_ratio) == (384, 384 * 384, 8)
    assert (released.hidden, released.vocab, released.window) == (4096, 129280, 128)


@pytest.mark.parametrize(
    ("key", "wrong", "legal"),
    [
        ("vision_dim", None, 1088),
        ("vision_dim", 1056, 1024),
        ("vision_patch_size", 0, 1),
        ("vision_patch_size", True, 16),
        ("vision_max_n_token", 8, 9),
        ("vision_min_pixels", 2.5, 2),
        ("vision_rope_theta", 0, 0.5),
        ("vision_rope_theta", "10000", 10000.0),
        ("hidden_size", -1, 4096),
    ],
)
def test_an_unusable_number_is_named(key: str, wrong: Any, legal: Any) -> None:
    config = releases.config("deepseek-v4-flash-vision-exp")
    with pytest.raises(ValueError, match=key):
        VisionConfig.from_config(config | {key: wrong})
    assert VisionConfig.from_config(config | {key: legal}) is not None


# ---- size

#: Picture -> pixels it is resized to, cells, tokens from START to END. Published values of the official code.
SIZES = {
    (640, 640): (644, 644, 16, 16, 274),
    (800, 450): (812, 462, 11, 20, 254),
    (450, 800): (462, 812, 20, 11, 242),
    (200, 150): (448, 336, 8, 11, 98),
    (3000, 2000): (882, 588, 14, 21, 310),
    (2000, 120): (1092, 140, 4, 26, 110),
    (60, 1500): (84, 1932, 46, 2, 142),
    (1000, 333): (1008, 336, 8, 24, 202),
    (1920, 1080): (1036, 588, 14, 25, 366),
    (1024, 1024): (756, 756, 18, 18, 346),
    (560, 266): (560, 266, 7, 14, 122),
}


@pytest.mark.parametrize("size", SIZES)
def test_a_size_is_the_official_one(size: tuple[int, int], released: VisionConfig) -> None:
    grid = plan_size(*size, released)
    assert (grid.width, grid.height, grid.rows, grid.cols, grid.tokens) == SIZES[size]
    assert grid == Grid.of(grid.width, grid.height, released)
    assert (grid.patch_cols, grid.patch_rows) == (grid.width // 14, grid.height // 14)


def second_reading(width: int, height: int) -> tuple[int, int]:
    """Plan a size again: in height and width, with the numbers of the release written out."""

    def count(high: int, wide: int) -> int:
        rows, cols = -(-(high // 14) // 3), -(-(wide // 14) // 3)
        slots = (rows + rows % 2) * (cols + 1)
        return slots + slots % 4 + 2

    high, wide = float(height), float(min(width, 8 * height))
    if high * wide < 147456:
        factor = (147456 / (high * wide)) ** 0.5
        high, wide = float(int(high * factor)), float(int(wide * factor))
    best = (int(-(-high // 14)) * 14, int(-(-wide // 14)) * 14)
    budget = 381
    while count(*best) > 381:
        aspect = high / wide
        columns = ((budget - 2) / aspect + 0.25) ** 0.5 - 0.5
        lines = columns * aspect
        if columns < 1:
            best = ((budget - 2) // 4 * 2 * 42, 42)
        elif lines < 2:
            best = (84, ((budget - 2) // 2 - 1) * 42)
        else:
            scale = min(int(columns) * 42 / wide, int(lines) // 2 * 2 * 42 / high)
            best = (int(high * scale / 14) * 14, int(wide * scale / 14) * 14)
        budget -= 1
    return best


def test_sizes_of_30000_pictures_obey_every_rule(released: VisionConfig) -> None:
    rng = random.Random(9)
    sides = [(rng.randint(1, 5000), rng.randint(1, 5000)) for _ in range(20_000)]
    # Pictures of any shape: sides that are equally often of each order of magnitude.
    sides += [(int(10 ** rng.uniform(0, 4.3)), int(10 ** rng.uniform(0, 4.3))) for _ in range(10_000)]
    tokens, patches = set(), set()
    for width, height in sides:
        grid = plan_size(width, height, released)
        assert (grid.height, grid.width) == second_reading(width, height), (width, height)
        assert grid.width % 14 == grid.height % 14 == 0
        tokens.add(grid.tokens)
        patches.add(grid.patches)
    assert all(n % 4 == 2 for n in tokens)
    assert (min(tokens), max(tokens)) == (90, 378) and max(patches) <= 3312


def test_the_largest_tower_input_is_of_the_widest_picture(released: VisionConfig) -> None:
    grid = plan_size(1931, 332, released)
    assert (grid.patches, grid.tokens, grid.rows, grid.cols) == (24 * 138, 378, 8, 46)


def test_extreme_pictures_have_a_size(released: VisionConfig) -> None:
    assert plan_size(1, 1, released) == Grid.of(392, 392, released)
    tall, wide = plan_size(1, 4000, released), plan_size(4000, 1, released)
    assert (tall.rows, tall.cols) == (188, 1) and tall.tokens == 378
    # Planned as if it were eight times as wide as high.
    assert wide == plan_size(8, 1, released) and wide.cols > 8 * wide.rows / 2
    for size in ((0, 5), (5, 0)):
        with pytest.raises(ValueError, match="no area"):
            plan_size(*size, released)


# ---- blocks


def slots(rows: int, cols: int) -> list[tuple[int, int]]:
    """Return row and column of every position between START and END, the filler excepted; by its number."""
    pair = 2 * (cols + 1)
    return [(s // pair * 2 + s % 2, s % pair // 2) for s in range((rows + rows % 2) * (cols + 1))]


@pytest.mark.parametrize(
    ("rows", "cols"), [(1, 1), (2, 1), (2, 2), (3, 4), (4, 3), (7, 14), (8, 11), (47, 2)]
)
@pytest.mark.parametrize("start", [0, 1, 2, 3, 128, 1001])
def test_a_block_is_read_in_pairs_of_rows(rows: int, cols: int, start: int) -> None:
    grid = Grid(cols * 42, rows * 42, rows * 3, cols * 3, rows, cols)
    block = place(grid, start)
    kinds = block.kinds[block.lead :]
    assert block.kinds[: block.lead] == (PAD,) * block.lead and block.lead == lead_pads(start)
    assert (kinds[0], kinds[-1]) == (START, END) and len(kinds) == grid.tokens
    assert block.span == Span(block.start + block.lead, block.start + len(block.kinds) - 1)
    assert block.span.first % 4 == 3 and block.span.last % 4 == 0
    body, places = kinds[1:-1], slots(rows, cols)
    assert len(body) % 4 == 0 and body[len(places) :] == (PAD,) * (len(places) % 4)
    expected = [PAD if row == rows else NEWLINE if col == cols else IMAGE for row, col in places]
    assert list(body[: len(places)]) == expected
    # Column by column, the upper cell first; each cell of the picture stands in one place.
    images = [(row, col) for row, col in places if row < rows and col < cols]
    assert list(block.perm) == [row * cols + col for row, col in images]
    assert sorted(block.perm) == list(range(rows * cols))


def test_a_small_block_as_it_is_written() -> None:
    """2 x 2 cells from position 5: two PADs, then pairs from top to bottom, and two PADs to fill up."""
    block = place(Grid(84, 84, 6, 6, 2, 2), 5)
    assert block.kinds == (PAD, PAD, START, *[IMAGE] * 4, NEWLINE, NEWLINE, PAD, PAD, END)
    assert block.perm == (0, 2, 1, 3)
    assert (block.start, block.lead, block.stop, block.span) == (5, 2, 17, (7, 16))
    assert block.pseudo_ids(500)[:4] == (501, 501, 500, 502)


def test_a_compressed_entry_is_a_cell_of_four() -> None:
    """Four positions from a multiple of 4 are two columns of a pair of rows."""
    grid = Grid(42 * 5, 42 * 6, 18, 15, 6, 5)
    for start in range(4):
        block = place(grid, start)
        first = block.span.first + 1
        for group in range(0, 36, 4):
            rows, cols = zip(*slots(6, 5)[group : group + 4], strict=True)
            assert (first + group) % 4 == 0
            assert rows[0] % 2 == 0 and rows == (rows[0], rows[0] + 1) * 2
            assert cols == (cols[0], cols[0], cols[0] + 1, cols[0] + 1)


def test_a_row_comes_back_through_the_permutation(released: VisionConfig) -> None:
    rng = random.Random(4)
    for _ in range(200):
        grid = plan_size(rng.randint(1, 3000), rng.randint(1, 3000), released)
        block = place(grid, rng.randrange(10_000))
        assert len(block.kinds) <= 381
        images = iter(block.perm)
        found: dict[int, int] = {}
        for position, kind in enumerate(block.kinds):
            if kind == IMAGE:
                found[next(images)] = position
        assert sorted(found) == list(range(grid.cells))
        # Down a column of a pair of rows is one step; along a row are two.
        if grid.rows > 1 and grid.cols > 1:
            assert found[grid.cols] - found[0] == 1 and found[1] - found[0] == 2


# ---- expansion


def test_every_placeholder_becomes_a_block() -> None:
    one, two = Grid(84, 84, 6, 6, 2, 2), Grid(42, 42, 3, 3, 1, 1)
    done = expand([9, 6, 6, 8], [one, two], 6, 500)
    first, second = done.blocks
    assert (first.start, first.lead) == (1, 2) and first == place(one, 1)
    assert second == place(two, first.stop) and second.start == first.stop
    assert done.ids == (9, *first.pseudo_ids(500), *second.pseudo_ids(500), 8)
    assert spans(done.ids, 500) == (first.span, second.span)
    assert expand([9, 8], [], 6, 500) == expand(iter([9, 8]), [], 6, 500)


@pytest.mark.parametrize(("ids", "pictures"), [([9, 6], 0), ([9, 6], 2), ([9], 1), ([6, 6], 1)])
def test_pictures_and_placeholders_are_counted(ids: list[int], pictures: int) -> None:
    grid = Grid(42, 42, 3, 3, 1, 1)
    with pytest.raises(ValueError, match=f"{ids.count(6)} places for a picture, and {pictures} pictures"):
        expand(ids, [grid] * pictures, 6, 500)
    assert len(expand(ids, [grid] * ids.count(6), 6, 500).blocks) == ids.count(6)


@pytest.mark.parametrize("ids", [[500], [504], [500, 500, 504], [500, 504, 504], [1, 504, 500]])
def test_an_open_span_is_no_span(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="block of a picture"):
        spans(ids, 500)
    assert spans([1, 501, 500, 502, 504, 2], 500) == ((2, 4),)


# ---- visibility


def official_bounds(ids: np.ndarray, vocab: int, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Return first and last key of every position: the official functions, restated on whole arrays.

    What is left and right of a position within its picture comes from running sums and extrema over the
    ids; a picture that is longer than the window to the left widens it by what it has more.
    """
    place_of = np.arange(len(ids))
    opens, closes = ids == vocab + START, ids == vocab + END
    inside = (np.cumsum(opens) > np.cumsum(closes)) | closes
    begun = np.maximum.accumulate(np.where(opens, place_of, 0))
    ended = np.minimum.accumulate(np.where(closes, place_of, len(ids))[::-1])[::-1]
    left = np.minimum((place_of - begun) * inside, 383)
    right = np.minimum((ended - place_of) * inside, 384)
    first = place_of - (window - 1) - np.maximum(0, left - (window - 1))
    return np.maximum(0, first), place_of + right


def conversation(alignment: int, vision: VisionConfig) -> tuple[tuple[int, ...], tuple[Block, ...]]:
    """Return about 10,000 positions of text and pictures of every shape, some pictures back to back."""
    rng = random.Random(alignment)
    ids, grids = [7] * (alignment + 4), []
    while sum(grid.tokens for grid in grids) + len(ids) < 10_000:
        for _ in range(rng.choice((1, 1, 2))):
            ids.append(6)
            grids.append(plan_size(int(10 ** rng.uniform(0, 4)), int(10 ** rng.uniform(0, 4)), vision))
        ids += [7] * rng.choice((0, 1, 5, 130, 300))
    done = expand(ids, grids, 6, vision.vocab)
    return done.ids, done.blocks


@pytest.mark.parametrize("alignment", range(4))
def test_what_a_position_sees_is_the_official_rule(alignment: int, released: VisionConfig) -> None:
    """Trap: a window that is widened from the lead PAD, or not at all. 40,000 rows at four alignments."""
    ids, blocks = conversation(alignment, released)
    assert len(ids) >= 10_000 and blocks[0].lead == 3 - alignment
    first, last = official_bounds(np.array(ids), released.vocab, 128)
    found = visible_range(0, len(ids), spans(ids, released.vocab))
    assert found == list(zip(first.tolist(), last.tolist(), strict=True))
    assert max(b - a + 1 for a, b in found) <= 128 + 384
    # In pieces it is the same, wherever they begin.
    for start, stop in pairwise((0, 1, 999, 5000, len(ids))):
        assert visible_range(start, stop, [b.span for b in blocks]) == found[start:stop]


def test_lead_pads_see_what_text_sees(released: VisionConfig) -> None:
    block = place(plan_size(640, 640, released), 1000)
    assert block.lead == 3 and block.span == (1003, 1003 + 273)
    rows = visible_range(998, block.stop + 2, [block.span])
    assert rows[:5] == [(p - 127, p) for p in range(998, 1003)]
    assert rows[5] == (1003 - 127, 1276) and rows[5 + 127] == (1003, 1276)
    assert rows[5 + 128] == (1003, 1276) and rows[5 + 273] == (1003, 1276)
    assert rows[-2:] == [(p - 127, p) for p in (1277, 1278)]
    assert visible(1003, None) == (876, 1003) and visible(5, Span(3, 9)) == (0, 9)
    assert visible(20, Span(18, 30), window=16) == (5, 30)


def naive_step_back(end: int, blocks: Iterable[Block]) -> int:
    inside = {p for b in blocks for p in range(b.start + 1, b.stop)}
    while end in inside:
        end -= 1
    return end


def test_a_prefill_stops_outside_of_blocks(released: VisionConfig) -> None:
    ids, blocks = conversation(2, released)
    for end in range(len(ids) + 1):
        assert step_back(end, blocks) == naive_step_back(end, [b for b in blocks if b.start <= end <= b.stop])


# ---- hash


def test_the_hash_tells_grids_and_alignments_apart(released: VisionConfig) -> None:
    """Trap: plain pictures of two shapes have equal bytes; a picture after other text has other rows."""
    flat, tall = Grid.of(28, 14, released), Grid.of(14, 28, released)
    white = bytes([128, 63]) * (2 * 3 * 14 * 14)
    keys = [salted_hash(white, grid, lead) for grid in (flat, tall) for lead in range(4)]
    keys += [salted_hash(white[:-1] + b"\x40", flat, 0)]
    assert len(set(keys)) == len(keys) and all(0 <= key < 1 << 64 for key in keys)
    assert salted_hash(memoryview(bytearray(white)), replace(flat), 2) == keys[2]
