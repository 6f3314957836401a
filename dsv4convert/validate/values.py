"""Checks of an official checkpoint's values: codes that are no number, holes, impossible ids, odd scales.

Reads tensors in strips and converts nothing, but what it calls an error about a quantized weight is what
`convert` refuses: both use the same decoders, the same counts and the same sentences. What a value should be
is not known here; only hashes tell that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dsv4convert.checkpoint import Checkpoint
from dsv4convert.errors import Finding, finding
from dsv4convert.formats.codes import (
    FP8_EXACT,
    MXFP4_EXACT,
    SCALE_NAN,
    count_mxfp4_overflow,
    count_nan_scales,
)
from dsv4convert.formats.fp8 import Fp8Decoder, Fp8Stats
from dsv4convert.formats.int8_shift import RepackStats
from dsv4convert.formats.repack import Repacker
from dsv4convert.formats.spec import ceil_div
from dsv4convert.header import Shard, ShardReader, TensorInfo
from dsv4convert.names import Layout, Unit, pattern_of
from dsv4convert.survey import Survey
from dsv4convert.table import Role, Storage
from dsv4convert.transform import count_e4m3_nan, e4m3_nan, inexact, low_rows, mxfp4_overflow, scale_nan
from dsv4convert.validate.content import run_tasks, selects
from dsv4convert.validate.holes import PAGE, Holes

Bytes = NDArray[np.uint8]
Progress = Callable[[int], None]

_STRIP: Final = 4 << 20
#: Scale bytes of every official weight seen so far lie in 115..122; far outside is worth a word, no more.
_USUAL: Final = (90, 140)
#: A row whose scale bytes are all below this could need a channel scale that is no normal F32.
_LOW_SCALE: Final = 8
#: Rows of these are looked up by an id, and a row that no id uses may hold anything.
_TABLES: Final = (Role.EMBEDDING, Role.HEAD, Role.IMAGE_TOKEN, Role.ENGRAM, Role.DRAFT)


@dataclass(frozen=True, slots=True)
class _Item:
    """One logical weight: the tensor with its values and, if it is quantized, the one with its scales.

    Shapes are logical, and a tensor without dimensions counts as one row.
    """

    weight: TensorInfo
    scale: TensorInfo | None
    role: Role
    storage: Storage
    shape: tuple[int, ...]
    block: tuple[int, int]
    experts: int

    @property
    def rows(self) -> int:
        """Rows of the weight."""
        return self.shape[0] if self.shape else 1

    @property
    def width(self) -> int:
        """Stored bytes of one row."""
        return self.weight.nbytes // max(self.rows, 1)


@dataclass(slots=True)
class Values:
    """What was met: findings, and a histogram of scale bytes per family of weights."""

    findings: list[Finding] = field(default_factory=list)
    scales: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    read: int = 0

    def facts(self) -> dict[str, Any]:
        """Return per family of weights: scale bytes, their range, and how many are 0."""
        result = {}
        for family, counts in sorted(self.scales.items()):
            used = np.flatnonzero(counts)
            bytes_, low, high = int(counts.sum()), int(used[0]), int(used[-1])
            result[family] = {"bytes": bytes_, "low": low, "high": high, "zero": int(counts[0])}
        return result


def check_values(seen: Survey, percent: float, jobs: int, progress: Progress) -> Values:
    """Read tensors of a structurally sound official checkpoint and report what their values show.

    Args:
        seen: What the checkpoint is; without errors.
        percent: Share of the weights to read, at least one of every kind in every shard.
        jobs: Worker processes.
        progress: Called with numbers of bytes read.

    Raises:
        EnvironmentFault: reading failed.
    """
    checkpoint = seen.checkpoint
    slim = {n: replace(s, tensors=()) for n, s in checkpoint.shards.items()}
    tasks = []
    experts = seen.geometry.experts if seen.geometry else 0
    for shard, items in _by_shard(checkpoint, seen.units, experts).items():
        tasks.append((shard, (tuple(_sample(items, percent)), slim)))
    total = Values()
    for part in run_tasks(_check_shard, tasks, jobs, progress):
        total.findings += part.findings
        total.read += part.read
        for family, counts in part.scales.items():
            total.scales[family] = total.scales.get(family, 0) + counts
    return total


def _by_shard(checkpoint: Checkpoint, units: Iterable[Unit], experts: int) -> dict[str, list[_Item]]:
    shards: dict[str, list[_Item]] = {name: [] for name in checkpoint.shards}
    for unit in units:
        names = list(unit.stored(Layout.OFFICIAL))
        weight = checkpoint.tensors[names[0]]
        scale = checkpoint.tensors[names[1]] if len(names) > 1 else None
        item = _Item(weight, scale, unit.row.role, unit.row.storage, unit.shape, unit.block, experts)
        shards[weight.shard].append(item)
    for items in shards.values():
        items.sort(key=lambda item: item.weight.start)
    return shards


def _sample(items: Iterable[_Item], percent: float) -> Iterator[_Item]:
    kinds: set[str] = set()
    for item in items:
        kind = pattern_of(item.weight.name)
        if kind not in kinds or selects(item.weight.name, percent):
            kinds.add(kind)
            yield item


def _check_shard(task: tuple[tuple[_Item, ...], Mapping[str, Shard]], progress: Progress) -> Values:
    items, shards = task
    found = Values()
    with ShardReader(shards) as reader:
        check = _Check(reader, found, progress)
        for item in items:
            check.item(item)
    return found


@dataclass(slots=True)
class _Count:
    """What was met in one weight, with the places of the firsts."""

    nan: int = 0
    first_nan: tuple[int, int] = (0, 0)
    decoded: Fp8Stats = field(default_factory=Fp8Stats)
    repacked: RepackStats = field(default_factory=RepackStats)
    overflow: int = 0
    first_overflow: tuple[int, tuple[int, int]] = (0, (0, 0))
    odd: int = 0
    first_odd: tuple[int, str] = (0, "")

    def add_odd(self, count: int, at: int, shown: str) -> None:
        """Count values that may not be, the first of them at element `at`."""
        self.first_odd = self.first_odd if self.odd else (at, shown)
        self.odd += count


class _Check:
    """Checks weights one after the other, strip by strip."""

    def __init__(self, reader: ShardReader, found: Values, progress: Progress) -> None:
        self._reader, self._found, self._progress = reader, found, progress
        self._buffer = np.empty(_STRIP, np.uint8)

    def item(self, item: _Item) -> None:
        """Check one weight and its scales."""
        scales = self._check_scales(item, item.scale) if item.scale else np.zeros(256, np.int64)
        look = self._looker(item, scales)
        holes, count = Holes(item.weight.start), _Count()
        multiple = item.block[0] if item.storage is Storage.DENSE_FP8 else 1
        for row, piece in self._strips(item.weight, item.rows, multiple):
            holes.look(piece, row * item.width)
            look(count, row, piece)
        self._note_holes(item, item.weight, holes)
        self._note(item, count)

    def _strips(self, info: TensorInfo, rows: int, multiple: int = 1) -> Iterator[tuple[int, Bytes]]:
        """Yield (first row, bytes) of each strip of whole block rows; valid until the next one."""
        width = info.nbytes // max(rows, 1)
        step = max(multiple, _STRIP // max(width, 1) // multiple * multiple)
        for row in range(0, rows, step):
            yield row, self._read(info, row * width, min(step, rows - row) * width)

    def _read(self, info: TensorInfo, start: int, count: int) -> Bytes:
        if count > self._buffer.size:
            self._buffer = np.empty(count, np.uint8)
        view = self._buffer[:count]
        self._reader.pread_into(info, start, view.data)
        self._found.read += count
        self._progress(count)
        return view

    def _check_scales(self, item: _Item, info: TensorInfo) -> NDArray[np.int64]:
        """Check all scale bytes of a weight; return their histogram."""
        counts = np.zeros(256, np.int64)
        holes = Holes(info.start, only_zero=True)
        columns, nans, first_nan = info.shape[-1], 0, (0, 0)
        for row, piece in self._strips(info, info.shape[0]):
            counts += np.bincount(piece, minlength=256)
            holes.look(piece, row * columns)
            count, first = count_nan_scales(piece.reshape(-1, columns))
            first_nan = first_nan if nans or first is None else (row + first[0], first[1])
            nans += count
        if nans:
            self._found.findings.append(scale_nan(info.name, nans, first_nan))
        self._note_holes(item, info, holes)
        self._note_statistics(item, info, counts)
        return counts

    # What to look for in the values of a weight, by the way it is stored.

    def _looker(self, item: _Item, scales: NDArray[np.int64]) -> Callable[[_Count, int, Bytes], None]:
        kind = item.weight.dtype
        if item.storage is Storage.EXPERT_MXFP4:
            return self._expert(item, scales)
        if kind == "F8_E4M3":
            outside = scales[: FP8_EXACT.low].any() or scales[FP8_EXACT.high + 1 : SCALE_NAN].any()
            return self._fp8(item, bool(outside) and item.storage is Storage.DENSE_FP8)
        if kind == "I64":
            return lambda count, row, piece: _look_at_ids(item, count, row, piece)
        return lambda count, row, piece: _look_at_floats(item, count, row, piece)

    def _scale_rows(self, item: _Item, first: int, last: int) -> Bytes:
        if item.scale is None:
            raise ValueError(f"`{item.weight.name}` has no scales")
        columns = item.scale.shape[-1]
        rows = np.empty((last - first, columns), np.uint8)
        self._reader.pread_into(item.scale, first * columns, rows.reshape(-1).data)
        return rows

    def _fp8(self, item: _Item, decode: bool) -> Callable[[_Count, int, Bytes], None]:
        """Count NaN codes and, where a scale leaves the exact window, the blocks that really round."""
        k, bn = item.shape[-1], item.block[0]
        decoder = Fp8Decoder(item.block, k) if decode else None

        def look(count: _Count, row: int, piece: Bytes) -> None:
            nans, first = count_e4m3_nan(piece)
            if nans and not count.nan:
                count.first_nan = divmod(row * k + first, k)
            count.nan += nans
            if decoder:
                codes = piece.reshape(-1, k)
                scales = self._scale_rows(item, row // bn, ceil_div(row + len(codes), bn))
                count.decoded += decoder.decode(codes, scales, np.empty(codes.shape, np.int16), row=row)

        return look

    def _expert(self, item: _Item, scales: NDArray[np.int64]) -> Callable[[_Count, int, Bytes], None]:
        """Count blocks that overflow BF16 and rows whose channel scale would be too small."""
        high, low = scales[MXFP4_EXACT.high + 1 : SCALE_NAN].any(), scales[:_LOW_SCALE].any()
        k, groups = item.shape[1], ceil_div(item.shape[1], 128)
        repacker = Repacker(k) if low else None

        def look(count: _Count, row: int, piece: Bytes) -> None:
            if not (high or low):
                return
            packed = piece.reshape(-1, k // 2)
            n = len(packed)
            part = self._scale_rows(item, row, row + n)
            over, first = count_mxfp4_overflow(packed, part)
            if first and not count.overflow:
                count.first_overflow = int(part[first]), (row + first[0], first[1])
            count.overflow += over
            if repacker:
                out = np.empty((n, groups * 64), np.uint8), np.empty((n, groups), np.uint8)
                count.repacked += repacker.repack(packed, part, *out, np.empty(n, np.float32), row=row)

        return look

    # Findings.

    def _note(self, item: _Item, count: _Count) -> None:
        name, add = item.weight.name, self._found.findings.append
        if count.nan:
            add(e4m3_nan(name, count.nan, count.first_nan))
        if count.decoded.inexact_blocks and item.scale:
            add(inexact(name, item.scale.nbytes, count.decoded))
        if count.overflow:
            add(mxfp4_overflow(name, count.overflow, *count.first_overflow))
        if count.repacked.low_rows:
            add(low_rows(name, count.repacked))
        if count.odd and item.weight.dtype == "I64":
            problem = f"{count.odd:,} ids name no expert"
            expected = f"0..{item.experts - 1}"
            add(finding("value.expert-id", name, problem, expected=expected, found=_place(item, count)))
        elif count.odd:
            problem = f"{count.odd:,} values are infinite or NaN"
            add(finding("value.non-finite", name, problem, expected="none", found=_place(item, count)))

    def _note_holes(self, item: _Item, info: TensorInfo, holes: Holes) -> None:
        if not holes.pages or (item.storage is Storage.PLAIN and len(item.shape) < 2):
            return
        table = item.role in _TABLES or info.dtype in ("F32", "I64")
        code = "value.unused-rows" if table else "value.hole"
        total = holes.pages * PAGE
        problem = f"{holes.pages:,} pages ({total:,} of {info.nbytes:,} bytes) hold one repeated pattern"
        found = f"bytes {holes.first:,} to {holes.last_end:,} of the tensor, in `{info.shard}`"
        self._found.findings.append(finding(code, info.name, problem, expected="weights", found=found))

    def _note_statistics(self, item: _Item, info: TensorInfo, counts: NDArray[np.int64]) -> None:
        family = item.role.value
        self._found.scales[family] = self._found.scales.get(family, 0) + counts
        usual = int(counts[_USUAL[0] : _USUAL[1] + 1].sum())
        # A zero block may carry any scale, 0 most likely, and a few strays say nothing.
        counted = int(counts[1:SCALE_NAN].sum())
        if 2 * usual >= counted:
            return
        seen = np.flatnonzero(counts)
        problem = f"{counted - usual:,} of {info.nbytes:,} scale bytes are far from those of official weights"
        expected = f"most within {_USUAL[0]}..{_USUAL[1]} (the few that are known lie in 115..122)"
        code, found = "value.scale-statistics", f"{seen[0]}..{seen[-1]}"
        self._found.findings.append(finding(code, info.name, problem, expected=expected, found=found))


def _look_at_ids(item: _Item, count: _Count, row: int, piece: Bytes) -> None:
    ids = piece.view("<i8")
    if len(ids) and (ids.min() < 0 or ids.max() >= item.experts):
        wrong = np.flatnonzero((ids < 0) | (ids >= item.experts))
        count.add_odd(len(wrong), row * item.width // 8 + int(wrong[0]), str(ids[wrong[0]]))


def _look_at_floats(item: _Item, count: _Count, row: int, piece: Bytes) -> None:
    words, top, size = (
        (piece.view("<u2"), 0x7F80, 2) if item.weight.dtype == "BF16" else (piece.view("<u4"), 0x7F800000, 4)
    )
    magnitudes = words & words.dtype.type(2 ** (8 * size - 1) - 1)
    if magnitudes.max(initial=0) >= top:
        wrong = np.flatnonzero(magnitudes >= top)
        count.add_odd(
            len(wrong),
            row * item.width // size + int(wrong[0]),
            "inf" if magnitudes[wrong[0]] == top else "NaN",
        )


def _place(item: _Item, count: _Count) -> str:
    at, shown = count.first_odd
    place = list(map(int, np.unravel_index(at, item.shape))) if item.shape else at
    return f"{shown}, the first at {place}"
