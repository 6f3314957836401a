"""Checks that read tensor data: against the manifest's hashes, or recomputed from a reference.

The recomputation shares no code with the conversion: kept tensors are compared byte for byte; BF16 tensors
with the product of decoded code and scale; INT8_SHIFT experts are decoded to numbers and compared with the
numbers of the MXFP4 source, where a rounded code must be the nearest one its block can express.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from dsv4convert.checkpoint import Checkpoint
from dsv4convert.errors import Finding, finding
from dsv4convert.formats.codes import LUT2, unpack_e2m1
from dsv4convert.formats.int8_shift import decode_int8_shift, unpack_codes
from dsv4convert.formats.spec import ceil_div
from dsv4convert.header import Shard, ShardReader, TensorInfo
from dsv4convert.journal import MANIFEST
from dsv4convert.names import pattern_of
from dsv4convert.origin import recorded_sha256
from dsv4convert.plan import Op, Plan, ShardPlan, Step
from dsv4convert.sink import shard_digest
from dsv4convert.transform import group_steps
from dsv4convert.workers import run_all
from dsv4convert.writer import WRITER_VERSION

U8 = NDArray[np.uint8]
Progress = Callable[[int], None]

_STRIP: Final = 1 << 20


def selects(name: str, percent: float) -> bool:
    """Tell whether a sample of `percent` includes a weight: a fixed choice by its name."""
    return zlib.crc32(name.encode()) % 10_000 < percent * 100


def check_source(
    plan: Plan, source: Checkpoint, checkpoint: Checkpoint, manifest: Mapping[str, Any] | None
) -> tuple[Finding, ...]:
    """Check that a reference is the source of a conversion: same headers, same tensors.

    Args:
        plan: The plan that makes the checkpoint's layout from the reference.
        source: The reference.
        checkpoint: The converted checkpoint.
        manifest: Its manifest, None for a checkpoint of other origin.
    """
    if manifest and manifest["source"]["header_sha256"] != dict(plan.source_headers):
        recorded, there = manifest["source"]["header_sha256"], plan.source_headers
        name = next((n for n in sorted({*recorded, *there}) if recorded.get(n) != there.get(n)), "")
        problem = "not the checkpoint that was converted: this shard's header is another one"
        return (finding("reference.other", name, problem),)
    known = recorded_sha256(source.root, plan.source_headers)
    recorded = manifest["source"]["content_sha256"] if manifest else {}
    for name, value in known.items():
        if recorded.get(name, value) != value:
            problem = "not the checkpoint that was converted: the download client recorded another content"
            expected, found = f"sha256 {recorded[name][:12]}…", f"{value[:12]}…"
            return (finding("reference.other", name, problem, expected=expected, found=found),)
    planned = {s.name: (s.dtype, s.shape) for p in plan.shards for s in p.steps}
    stored = {n: (t.dtype, t.shape) for n, t in checkpoint.tensors.items()}
    different = [n for n in planned.keys() | stored.keys() if planned.get(n) != stored.get(n)]
    if different:
        problem = f"{len(different):,} tensors are not those the reference gives"
        return (finding("reference.other", min(different), problem),)
    return tuple(_plan_findings(plan, manifest)) if manifest else ()


def _plan_findings(plan: Plan, manifest: Mapping[str, Any]) -> Iterator[Finding]:
    """Compare what the manifest records about the source with a plan made from the source itself."""
    wanted: dict[str, object] = {
        "source.file_bytes": plan.source_bytes,
        "source.layout": plan.source_layout.value,
    }
    # Another writer version decides otherwise, and has another digest.
    if manifest["plan"]["writer_version"] == WRITER_VERSION:
        wanted["plan.digest"] = plan.digest
    for key, value in wanted.items():
        part, _, name = key.partition(".")
        if manifest[part][name] != value:
            expected, found = f"`{value}`", f"`{str(manifest[part][name])[:80]}`"
            problem = f"`{key}` is not what the reference gives"
            yield finding("manifest.mismatch", MANIFEST, problem, expected=expected, found=found)


@dataclass(frozen=True, slots=True)
class _Task:
    """What a worker needs to check one shard of the plan against what is stored."""

    shard: ShardPlan
    stored: Mapping[str, TensorInfo]
    source: Mapping[str, Shard]
    output: Mapping[str, Shard]


def check_reference(
    plan: Plan, source: Checkpoint, output: Checkpoint, percent: float, jobs: int, progress: Progress
) -> tuple[Finding, ...]:
    """Recompute tensors from their source and compare them with what is stored.

    Args:
        plan: The plan from `source` to the layout of `output`.
        source: The checkpoint that was converted.
        output: The conversion.
        percent: Share of the weights to compare, at least one of every kind in every shard.
        jobs: Worker processes.
        progress: Called with the number of stored bytes compared.

    Raises:
        EnvironmentFault: reading failed.
    """
    slim_source = {n: replace(s, tensors=()) for n, s in source.shards.items()}
    slim_output = {n: replace(s, tensors=()) for n, s in output.shards.items()}
    tasks = []
    for shard in plan.shards:
        steps = tuple(_sample(shard.steps, percent))
        stored = {s.name: output.tensors[s.name] for s in steps}
        tasks.append((shard.name, _Task(replace(shard, steps=steps), stored, slim_source, slim_output)))
    return tuple(chain.from_iterable(run_tasks(_compare_shard, tasks, jobs, progress)))


def run_tasks(
    function: Callable[[Any, Progress], Any], tasks: Sequence[tuple[str, Any]], jobs: int, progress: Progress
) -> list[Any]:
    """Return ``function(task, progress)`` of every task in any order; one job needs no process."""
    results: list[Any] = []
    if jobs == 1 or len(tasks) == 1:
        results += [function(task, progress) for _, task in tasks]
    else:
        run_all(function, tasks, jobs, results.append, progress)
    return results


def _sample(steps: Iterable[Step], percent: float) -> Iterator[Step]:
    seen: set[str] = set()
    for step in steps:
        # All outputs of one weight are chosen together, by the weight they are made from.
        weight = step.sources[0].name
        pattern = pattern_of(step.name)
        if pattern not in seen or selects(weight, percent):
            seen.add(pattern)
            yield step


def _compare_shard(task: _Task, progress: Progress) -> list[Finding]:
    import torch

    torch.set_num_threads(1)
    findings: list[Finding] = []
    with ShardReader(task.source) as source, ShardReader(task.output) as output:
        compare = _Comparison(source, output, task.stored, findings, progress)
        for group in group_steps(task.shard.steps):
            op = group[0].op
            if op is Op.KEEP:
                for step in group:
                    compare.kept(step)
            elif op is Op.DEQUANTIZE_BF16:
                compare.dequantized(group[0])
            else:
                compare.repacked(group)
    return findings


class _Comparison:
    """Compares what is stored with what a step's sources give, strip by strip."""

    def __init__(
        self,
        source: ShardReader,
        output: ShardReader,
        stored: Mapping[str, TensorInfo],
        findings: list[Finding],
        progress: Progress,
    ) -> None:
        self._source, self._output, self._stored = source, output, stored
        self._findings, self._progress = findings, progress

    def kept(self, step: Step) -> None:
        info, wrong, first = self._stored[step.name], 0, -1
        for start in range(0, info.nbytes, _STRIP):
            count = min(_STRIP, info.nbytes - start)
            ours, theirs = (
                self._read_output(info, start, count),
                _read(self._source, step.sources[0], start, count),
            )
            if ours.tobytes() != theirs.tobytes():
                different = np.flatnonzero(ours != theirs)
                first = start + int(different[0]) if first < 0 else first
                wrong += len(different)
        if wrong:
            problem = f"{wrong:,} of {info.nbytes:,} kept bytes differ from the reference"
            self._report(step.name, problem, found=f"the first at byte {first:,}")

    def dequantized(self, step: Step) -> None:
        weight, scale = step.sources
        info = self._stored[step.name]
        (n, k), (bn, bk) = weight.shape, step.block
        scales = _read(self._source, scale, 0, scale.nbytes).reshape(scale.shape)
        wrong, first = 0, None
        rows = max(bn, _STRIP // max(k, 1) // bn * bn)
        for row in range(0, n, rows):
            count = min(rows, n - row)
            codes = _read(self._source, weight, row * k, count * k).reshape(count, k)
            ours = self._read_output(info, 2 * row * k, 2 * count * k).view("<u2").reshape(count, k)
            theirs = _bf16_products(codes, scales[row // bn : ceil_div(row + count, bn)], bn, bk)
            if not np.array_equal(ours, theirs):
                places = np.argwhere(ours != theirs)
                first = first or (int(places[0, 0]) + row, int(places[0, 1]), ours, theirs)
                wrong += len(places)
        if first:
            problem = f"{wrong:,} of {n * k:,} BF16 values differ from code times scale"
            self._report(step.name, problem, found=f"the first at [{first[0]}, {first[1]}]")

    def repacked(self, group: Sequence[Step]) -> None:
        weight, scale = group[0].sources
        base = weight.name.removesuffix(".weight")
        codes, shift, channel = (
            self._stored[base + s] for s in (".weight_codes", ".weight_shift2", ".channel_scale")
        )
        (n, blocks), width, groups = scale.shape, codes.shape[1], shift.shape[1]
        k = blocks * 32
        scales = _read(self._source, scale, 0, scale.nbytes).reshape(n, blocks)
        shifts = self._read_output(shift, 0, shift.nbytes).reshape(n, groups)
        channels = self._read_output(channel, 0, channel.nbytes).view("<f4")
        wrong, first, unused = 0, None, 0
        rows = max(1, _STRIP // max(width, 1))
        for row in range(0, n, rows):
            part = slice(row, min(n, row + rows))
            count = part.stop - row
            packed = _read(self._source, weight, row * k // 2, count * k // 2).reshape(count, k // 2)
            stored = self._read_output(codes, row * width, count * width).reshape(count, width)
            bad = _wrong_codes(packed, scales[part], stored, shifts[part], channels[part])
            if bad.any():
                places = np.argwhere(bad)
                first = first or (int(places[0, 0]) + row, int(places[0, 1]))
                wrong += len(places)
            unused += _not_plain_zero(packed, stored, shifts[part])
        if unused and not first:
            problem = f"{unused:,} codes or shifts that stand for zero are not stored as 0"
            self._report(base, problem, found="kernels read padding and zeros too")
        if first:
            problem = f"{wrong:,} of {n * k:,} decoded weights are not the nearest to the source"
            # Numbers are compared, so which of the three tensors is wrong is not known.
            self._report(base, problem, found=f"the first at [{first[0]}, {first[1]}]")

    def _read_output(self, info: TensorInfo, start: int, count: int) -> U8:
        self._progress(count)
        return _read(self._output, info, start, count)

    def _report(self, name: str, problem: str, found: str) -> None:
        self._findings.append(finding("reference.bytes", name, problem, found=found))


def _read(reader: ShardReader, info: TensorInfo, start: int, count: int) -> U8:
    data = np.empty(count, np.uint8)
    reader.pread_into(info, start, data.data)
    return data


def _bf16_products(codes: U8, scales: U8, bn: int, bk: int) -> NDArray[np.uint16]:
    """Return BF16 bits of code times scale, by the definition, for whole block rows."""
    import torch

    from dsv4convert.formats.block import dequantize_fp8_block

    weights = dequantize_fp8_block(torch.from_numpy(codes), torch.from_numpy(scales), (bn, bk))
    bits: NDArray[np.uint16] = weights.view(torch.int16).numpy().view(np.uint16)
    return bits


@cache
def _nearest_doubled() -> NDArray[np.int16]:
    """Return [delta - 4, magnitude code] -> the table value nearest to ``lut2[code] / 2 ** (delta - 3)``."""
    table = np.zeros((5, 8), np.int16)
    for delta in range(4, 9):
        for code in range(8):
            target = int(LUT2[code]) / 2 ** (delta - 3)
            table[delta - 4, code] = min(map(int, LUT2[:8]), key=lambda v: (abs(v - target), v))
    return table


def _wrong_codes(
    packed: U8, scales: U8, codes: U8, shifts: U8, channels: NDArray[np.float32]
) -> NDArray[np.bool_]:
    """Return [R, K]: where a decoded INT8_SHIFT weight is neither exact nor the nearest possible.

    Everything is compared as numbers: stored integer times channel scale against E2M1 value times UE8M0.
    """
    k = packed.shape[1] * 2
    source = unpack_e2m1(packed)
    stored = decode_int8_shift(codes, shifts, k).astype(np.int16)
    doubled = LUT2[source].astype(np.int16)
    nonzero: NDArray[np.bool_] = np.abs(doubled).reshape(len(packed), -1, 32).max(axis=2) > 0
    # channel_scale = 2^(e_max - 131) is a power of two; an all-zero row has none.
    exponent = np.frexp(channels)[1].astype(np.int32) + 130
    delta = exponent[:, None] - scales.astype(np.int32)
    steps = np.repeat(delta, 32, axis=1)
    exact = np.left_shift(doubled, np.clip(3 - steps, 0, 6).astype(np.int16))
    nearest = _nearest_doubled()[np.clip(steps - 4, 0, 4), source & 7] * np.sign(doubled)
    wanted = np.where(np.repeat(nonzero, 32, axis=1), np.where(steps <= 3, exact, nearest), 0)
    bad: NDArray[np.bool_] = stored != wanted
    # The channel scale itself must be the one number the definition gives, or zero for an all-zero row.
    powers = np.where(nonzero.any(axis=1), np.ldexp(1.0, exponent - 131), 0.0)
    bad |= (channels != powers)[:, None]
    return bad | (_too_large(delta, doubled, nonzero))[:, None]


def _not_plain_zero(packed: U8, codes: U8, shifts: U8) -> int:
    """Count -0 codes, codes of the padding, and shifts of blocks without a weight, none of which may be."""
    k, width = packed.shape[1] * 2, codes.shape[1] * 2
    stored = unpack_codes(codes, width)
    zero = np.ones((len(packed), width // 32), np.bool_)
    zero[:, : k // 32] = ((unpack_e2m1(packed) & 7) == 0).reshape(len(packed), -1, 32).all(axis=2)
    per_block = (shifts[:, :, None] >> np.arange(0, 8, 2, dtype=np.uint8)) & np.uint8(3)
    wrong = (stored == 8).sum() + (stored[:, k:] & 7 != 0).sum()
    return int(wrong + (per_block.reshape(zero.shape)[zero] != 0).sum())


def _too_large(
    delta: NDArray[np.int32], doubled: NDArray[np.int16], nonzero: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Return rows whose channel scale is not the smallest that keeps the row's largest block exact."""
    largest = np.abs(doubled).reshape(*delta.shape, 32).max(axis=2)
    # Doubled magnitudes of 8 and more cannot double within the table, 4..6 once, 2..3 twice, 1 three times.
    spare = np.digitize(largest, [8, 4, 2])
    effective = np.where(nonzero, delta + spare, 1 << 20).min(axis=1)
    result: NDArray[np.bool_] = nonzero.any(axis=1) & (effective != 0)
    return result


def check_hashes(
    checkpoint: Checkpoint, manifest: Mapping[str, Any], percent: float, jobs: int, progress: Progress
) -> tuple[Finding, ...]:
    """Compare stored tensors with the hashes of the manifest.

    Args:
        checkpoint: The converted checkpoint.
        manifest: Its manifest.
        percent: Share of the tensors to read; 100 also compares the digests of whole shards.
        jobs: Worker processes.
        progress: Called with the number of bytes read.

    Raises:
        EnvironmentFault: reading failed.
    """
    tasks = []
    for name, shard in checkpoint.shards.items():
        tensors = tuple(t for t in shard.tensors if selects(t.name, percent))
        hashes = {
            t.name: manifest["tensors"][t.name]["xxh3_128"] for t in tensors if t.name in manifest["tensors"]
        }
        digest = manifest["output"]["shards"].get(name, {}).get("digest") if percent >= 100 else None
        tasks.append((name, (replace(shard, tensors=tensors), hashes, digest)))
    return tuple(chain.from_iterable(run_tasks(_hash_shard, tasks, jobs, progress)))


def _hash_shard(task: tuple[Shard, Mapping[str, str], str | None], progress: Progress) -> list[Finding]:
    shard, hashes, digest = task
    findings: list[Finding] = []
    found: dict[str, str] = {}
    buffer = memoryview(bytearray(4 * _STRIP))
    with ShardReader({shard.name: shard}) as reader:
        for tensor in shard.tensors:
            value = xxhash.xxh3_128()
            for start in range(0, tensor.nbytes, len(buffer)):
                view = buffer[: min(len(buffer), tensor.nbytes - start)]
                reader.pread_into(tensor, start, view)
                value.update(view)
                progress(len(view))
            found[tensor.name] = value.hexdigest()
            if hashes.get(tensor.name) != found[tensor.name]:
                problem = f"stored bytes do not have the hash that `{MANIFEST}` records"
                expected = f"xxh3 {hashes.get(tensor.name, 'nothing')[:12]}…"
                code, seen = "content.hash", f"{found[tensor.name][:12]}…"
                findings.append(finding(code, tensor.name, problem, expected=expected, found=seen))
        if digest and not findings:
            header = os.pread(reader.fileno(shard.name), shard.data_start, 0)
            if shard_digest(header, found) != digest:
                findings.append(finding("content.hash", shard.name, "the header is not the recorded one"))
    return findings
