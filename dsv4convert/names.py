"""What a model's tensors are called and how they are stored, derived from the table.

`expected_units` lists the logical weights that a geometry requires; `Unit.stored` says which tensors hold
one in each layout; `lookup` says what a bare name means; `official_shard` where the official release
puts it. Files are not known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import NamedTuple

from dsv4convert.formats.spec import INT8_SHIFT, MXFP4, BlockFormat, Shape, Stored, fp8_block, nbytes
from dsv4convert.geometry import Geometry
from dsv4convert.place import At
from dsv4convert.table import TABLE, Role, Row, Storage


class Layout(str, Enum):
    """How the routed experts and the dense weights of a checkpoint are stored."""

    OFFICIAL = "official"
    MXFP4 = "mxfp4"
    INT8 = "int8"


_TABLE_BLOCK = (1, 32)  # Engram tables carry one scale per 32 columns of each row, not the dense block.


class Unit(NamedTuple):
    """One logical weight of a model: what all layouts store, each in its own tensors.

    Attributes:
        base: Full tensor name of a plain weight; the name without suffix of a quantized one.
        row: The table row it comes from.
        shape: Logical shape; ``[N, K]`` for quantized weights.
        block: FP8 block of a quantized dense weight or table, MXFP4 block of an expert.
    """

    base: str
    row: Row
    shape: Shape
    block: tuple[int, int]

    def stored(self, layout: Layout) -> dict[str, Stored]:
        """Return full tensor name -> (dtype, stored shape) in a layout.

        Raises:
            ValueError: K of a packed weight is no whole number of blocks.
        """
        storage = self.row.storage
        if storage is Storage.PLAIN:
            return {self.base: (self.row.dtype, self.shape)}
        if storage is Storage.DENSE_FP8 and layout is not Layout.OFFICIAL:
            return {f"{self.base}.weight": ("BF16", self.shape)}
        if storage is Storage.EXPERT_MXFP4 and layout is Layout.INT8:
            return {self.base + suffix: part for suffix, part in _int8_parts(self.shape).items()}
        return {self.base + suffix: part for suffix, part in _parts(storage, self.block, self.shape).items()}

    def nbytes(self, layout: Layout) -> int:
        """Return the stored bytes of the unit in a layout."""
        return sum(nbytes(dtype, shape) for dtype, shape in self.stored(layout).values())


def unit_kinds(units: Iterable[Unit]) -> list[tuple[Unit, int]]:
    """Return one unit of every (pattern, shape) and how many there are.

    Tens of thousands of units are of a few dozen kinds, so totals are worked out kind by kind.
    """
    kinds: dict[tuple[str, Shape], list[Unit]] = {}
    for unit in units:
        kinds.setdefault((unit.row.pattern, unit.shape), []).append(unit)
    return [(members[0], len(members)) for members in kinds.values()]


def _block_format(storage: Storage, block: tuple[int, int]) -> BlockFormat | None:
    if storage is Storage.PLAIN:
        return None
    return MXFP4 if storage is Storage.EXPERT_MXFP4 else fp8_block(*block)


# A model has tens of thousands of experts and a handful of shapes.
@cache
def _parts(storage: Storage, block: tuple[int, int], shape: Shape) -> Mapping[str, Stored]:
    fmt = _block_format(storage, block)
    return fmt.parts(shape) if fmt else {}


@cache
def _int8_parts(shape: Shape) -> Mapping[str, Stored]:
    return INT8_SHIFT.parts(shape)


def expected_units(g: Geometry) -> Iterator[Unit]:
    """Yield every weight that a model of this geometry has, block by block."""
    yield from _units_at(_scope_rows("model"), At(g, "", 0), "")
    for index in range(g.vision.layers if g.vision else 0):
        yield from _units_at(_scope_rows("tower"), At(g, "", index), str(index))
    for block, count in (("layers", g.layers), ("mtp", g.draft.stages)):
        for index in range(count):
            yield from _units_at(_scope_rows("block"), At(g, block, index), str(index))


@cache
def _scope_rows(scope: str) -> tuple[Row, ...]:
    def scope_of(row: Row) -> str:
        if row.pattern.startswith("{b}"):
            return "block"
        return "tower" if "#" in row.pattern else "model"

    return tuple(row for row in TABLE if scope_of(row) == scope)


def _units_at(rows: tuple[Row, ...], at: At, index: str) -> Iterator[Unit]:
    for row in rows:
        if not row.when(at):
            continue
        shape = row.shape(at)
        block = _TABLE_BLOCK if row.storage is Storage.TABLE_FP8 else at.g.block
        if row.storage is Storage.EXPERT_MXFP4:
            block = MXFP4.block
        base = row.pattern.replace("{b}", at.block).replace("#", index, 1)
        if "#" in base:
            head, tail = base.split("#")
            for expert in range(at.experts):
                yield Unit(f"{head}{expert}{tail}", row, shape, block)
        else:
            yield Unit(base, row, shape, block)


@dataclass(frozen=True, slots=True)
class Match:
    """What the table says about a name alone, whatever the model: its row and the suffix after it."""

    row: Row
    suffix: str
    pattern: str


_SUFFIXES = {
    Storage.PLAIN: ("",),
    Storage.DENSE_FP8: (".weight", ".scale"),
    Storage.TABLE_FP8: (".weight", ".scale"),
    Storage.EXPERT_MXFP4: (".weight", ".scale", *INT8_SHIFT.parts((1, 128))),
}


@cache
def _by_pattern() -> Mapping[str, Match]:
    # Several rows may share a pattern (V4 and V4.1 compressors); the first one names the role.
    found: dict[str, Match] = {}
    for row in TABLE:
        for suffix in _SUFFIXES[row.storage]:
            pattern = row.pattern + suffix
            found.setdefault(pattern, Match(row, suffix, pattern))
    return found


def pattern_of(name: str) -> str:
    """Return a tensor name with its numbers replaced by ``#`` and ``layers`` / ``mtp`` by ``{b}``."""
    parts = ["#" if p.isdecimal() and p.isascii() and str(int(p[:9])) == p else p for p in name.split(".")]
    if len(parts) > 1 and parts[0] in ("layers", "mtp") and parts[1] == "#":
        parts[0] = "{b}"
    return ".".join(parts)


def lookup(name: str) -> Match | None:
    """Return what the table says about a tensor name, or None if no row knows it."""
    return _by_pattern().get(pattern_of(name))


def official_shard_count(g: Geometry) -> int:
    """Return the number of shards of an official release with this geometry."""
    return _first_layer_shard(g) + g.layers + g.draft.stages + (len(g.engram.layers) if g.engram else 0)


def official_shard(g: Geometry, unit: Unit) -> int:
    """Return the number, from 1, of the shard in which an official release stores a unit.

    Every layer and every draft stage has a shard of its own, the embedding comes first, the head follows
    the last layer. V4.1 puts the vision tower before the embedding and each Engram after the draft.
    """
    first = _first_layer_shard(g)
    parts = unit.base.split(".")
    if unit.row.role is Role.ENGRAM and g.engram:
        return first + g.layers + g.draft.stages + 1 + g.engram.layers.index(int(parts[1]))
    if parts[0] == "layers":
        return first + int(parts[1])
    if parts[0] == "mtp":
        return first + g.layers + 1 + int(parts[1])
    if unit.row.role in (Role.VISION, Role.ALIGNER):
        return 1
    if unit.row.role in (Role.EMBEDDING, Role.IMAGE_TOKEN):
        return first - 1
    return first + g.layers


def _first_layer_shard(g: Geometry) -> int:
    return 3 if g.family == "v41" and g.vision else 2
