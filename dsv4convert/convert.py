"""Carry out a plan: shard by shard, resumable, atomic; the index comes last.

Each shard is streamed into a temporary sibling, renamed, and noted in the journal. A run that stops for any
reason is continued by the same command. When all shards are done, `closing` writes everything else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from dsv4convert.checkpoint import Checkpoint, open_checkpoint
from dsv4convert.closing import close
from dsv4convert.consume import Consumer, believe_again, require_consumable, source_is_gone
from dsv4convert.device import decoder_of, device_faults, require_device
from dsv4convert.errors import EnvironmentFault, Refused, errors_of, finding
from dsv4convert.finished import finished_before
from dsv4convert.header import Shard, ShardReader, read_header
from dsv4convert.journal import INDEX, MANIFEST, Journal, ShardRecord, refuse_overlap, require_space
from dsv4convert.limits import Limits, judge, judge_again
from dsv4convert.names import Layout
from dsv4convert.plan import Plan, ShardPlan
from dsv4convert.plan import plan as make_plan
from dsv4convert.sink import Sink, shard_digest
from dsv4convert.standin import stand_ins
from dsv4convert.survey import survey
from dsv4convert.transform import STRIP, Outcome, Transformer
from dsv4convert.validate.structure import check_converted
from dsv4convert.workers import run_all
from dsv4convert.writer import PendingFile

#: Strips in flight between transform and writer; two would do, more absorb uneven disks.
_BUFFERS: Final = 4
_REPORT_BYTES: Final = 64 << 20

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Result:
    """How a conversion ended.

    Attributes:
        plan: The plan that was carried out.
        written: Shards written by this run.
        reused: Shards that were done before.
        missing: Shards that no job has finished yet.
        manifest: The manifest of a complete checkpoint, None while it is not closed.
        seconds: Wall time of this run's shards.
        consumed: Source shards that this run deleted.
    """

    plan: Plan
    written: int
    reused: int
    missing: tuple[str, ...]
    manifest: Mapping[str, Any] | None
    seconds: float
    consumed: tuple[str, ...] = ()


def convert(
    source: str | os.PathLike[str] | Checkpoint,
    destination: str | os.PathLike[str],
    *,
    experts: Layout | str = Layout.INT8,
    jobs: int = 1,
    part: tuple[int, int] | None = None,
    limits: Limits | None = None,
    progress: Progress | None = None,
    on_plan: Callable[[Plan, int], None] | None = None,
    consume: bool = False,
    device: str = "cpu",
) -> Result:
    """Convert a checkpoint, or continue an interrupted conversion.

    Args:
        source: An official checkpoint or an ``mxfp4`` output.
        destination: Empty, absent, or an interrupted conversion of the same plan.
        experts: ``int8`` or ``mxfp4``.
        jobs: Worker processes; 1 works in this process.
        part: (i, n) converts only shards i, i + n, ...; `finalize` closes the conversion afterwards.
        limits: What is still acceptable.
        progress: Called with numbers of source bytes as they are done.
        on_plan: Called before the first byte with the plan and the source bytes still to be read.
        consume: Delete each source shard when what was made of it has been read back; see `consume`.
        device: ``cpu``, or ``cuda`` for the same bytes made on a GPU.

    Returns:
        The result; the checkpoint is complete when there is a manifest.

    Raises:
        ValueError: `jobs` or `part` asks for nothing, `device` is unknown, or `consume` comes with `part` or
            without a path.
        Refused: source, destination or values are not acceptable; DST has no index.
        EnvironmentFault: disk or process trouble; the same call continues.
    """
    if jobs < 1 or (part and not 0 <= part[0] < part[1]):
        raise ValueError(f"at least one job and a part (i, n) with 0 <= i < n, got jobs={jobs}, part={part}")
    if consume and (part or isinstance(source, Checkpoint)):
        raise ValueError("`consume` needs the path of a source and all of its shards")
    require_device(device)
    # Resolved, so that `new/../dst` makes no directory `new`, and sentences have a path to show.
    root, limits = Path(destination).resolve(), limits or Limits()
    journal = Journal(root)
    gone = stand_ins(journal)
    checkpoint = source if isinstance(source, Checkpoint) else _open_source(source, journal, gone)
    plan = make_plan(survey(checkpoint), experts)
    refuse_overlap(checkpoint.root, root)
    complete = finished_before(root, plan, checkpoint.root)
    if complete is not None:
        return Result(plan, 0, len(plan.shards), (), complete, 0.0)
    if consume and not isinstance(source, Checkpoint):
        require_consumable(source, checkpoint)
    else:
        require_space(root, plan.disk_bytes - _bytes_in(root))
    journal.start(plan, checkpoint.root)
    with journal.held(shared=part is not None):
        todo = _still_to_do(_part_of(plan.shards, part), journal, checkpoint, gone)
        if on_plan:
            on_plan(plan, sum(_bytes_read(s) for s in todo) * (2 if consume else 1))
        started = time.monotonic()
        deleted: tuple[str, ...] = ()
        if consume:
            deleted = _consume(checkpoint, plan, journal, todo, jobs, limits, progress or _ignore, device)
        else:
            convert_shards(checkpoint, root, todo, jobs, limits, progress or _ignore, device=device)
        seconds = time.monotonic() - started
        missing = tuple(s.name for s in plan.shards if journal.done(s) is None)
        if missing and part is None:
            raise EnvironmentFault(finding("dst.unfinished", missing[0], "was changed by another process"))
        manifest = None
        # The jobs of an array never close: the last two could do so at the same moment.
        if not missing and part is None:
            run = {"jobs": jobs, "device": device, "seconds": round(seconds, 3)}
            manifest = close(checkpoint, plan, journal, limits, run)
    reused = len(plan.shards) - len(todo) - len(missing)
    return Result(plan, len(todo), reused, missing, manifest, seconds, deleted)


def _open_source(source: str | os.PathLike[str], journal: Journal, gone: Mapping[str, Shard]) -> Checkpoint:
    """Open the source; shards that this very conversion deleted count as present."""
    state = journal.read() if gone else None
    if state and state["source"] != os.fsdecode(os.path.realpath(source)):
        problem = "parts of the source were consumed by a conversion from another path"
        expected, found = f"`{state['source']}`", f"`{os.path.realpath(source)}`"
        raise Refused(finding("src.consumed", journal.root.name, problem, expected=expected, found=found))
    return open_checkpoint(source, gone if state else None)


def _still_to_do(
    shards: Sequence[ShardPlan], journal: Journal, checkpoint: Checkpoint, gone: Mapping[str, Shard]
) -> list[ShardPlan]:
    """Return the shards that are not done; one whose source is gone must be, and is looked at closely."""
    todo = [s for s in shards if journal.done(s) is None]
    deleted = {n: s for n, s in gone.items() if not os.path.lexists(checkpoint.root / n)}
    for shard in [s for s in todo if source_is_gone(s, deleted)]:
        believe_again(journal, shard)
        todo.remove(shard)
    return todo


def _consume(
    checkpoint: Checkpoint,
    plan: Plan,
    journal: Journal,
    todo: Sequence[ShardPlan],
    jobs: int,
    limits: Limits,
    progress: Progress,
    device: str,
) -> tuple[str, ...]:
    """Convert shards and delete the source behind them; return the names of what was deleted."""
    with Consumer(checkpoint, plan, journal) as consumer:
        before = [record for record in map(journal.done, plan.shards) if record]
        judge_again(before, limits)
        consumer.examine(todo, limits, jobs, progress)
        # Shards of earlier runs first: they may free the room for the others.
        for record in before:
            consumer.offer(record)
        shared = os.stat(journal.root).st_dev == os.stat(checkpoint.root).st_dev
        room = consumer.room(todo, jobs) if shared else sum(s.file_bytes for s in todo)
        require_space(journal.root, room + plan.disk_bytes - plan.file_bytes)

        def done(record: ShardRecord) -> None:
            journal.record(record)
            consumer.offer(record)

        convert_shards(checkpoint, journal.root, todo, jobs, limits, progress, done, device)
        return tuple(consumer.deleted)


def finalize(
    destination: str | os.PathLike[str],
    source: str | os.PathLike[str] | None = None,
    limits: Limits | None = None,
) -> Result | None:
    """Close a conversion whose shards were made by several jobs.

    Args:
        destination: Directory with a journal.
        source: The source, if it moved since; by default where the journal says.
        limits: What is still acceptable, as for `convert`; all shards are judged.

    Returns:
        The result, or None when the checkpoint was complete before.

    Raises:
        Refused: there is no conversion here, the source is another one, shards are missing, or values are not
            acceptable.
    """
    root = Path(destination).resolve()
    journal = Journal(root)
    state = journal.read()
    if state is None:
        if (root / INDEX).is_file() and (root / MANIFEST).is_file():
            journal.finish()
            faults = errors_of(check_converted(open_checkpoint(root)).findings)
            if faults:
                raise Refused(faults)
            return None
        hint = "begin one with `dsv4convert convert`"
        raise Refused(finding("dst.unfinished", root.name, "no conversion was begun here", hint=hint))
    gone = stand_ins(journal)
    if source is None and not os.path.isdir(state["source"]):
        problem, hint = "the source is not where the conversion was begun", "name its place with `--source`"
        raise Refused(finding("dir.not-found", state["source"], problem, hint=hint))
    checkpoint = _open_source(source or state["source"], journal, gone)
    plan = make_plan(survey(checkpoint), state["layout"])
    journal.start(plan, checkpoint.root)
    _still_to_do(plan.shards, journal, checkpoint, gone)
    missing = tuple(s.name for s in plan.shards if journal.done(s) is None)
    if missing:
        problem = f"{len(missing):,} of {len(plan.shards):,} shards are not done"
        raise Refused(finding("dst.unfinished", root.name, problem, found=f"the first is `{missing[0]}`"))
    with journal.held(shared=False):
        manifest = close(checkpoint, plan, journal, limits or Limits(), {"jobs": 0, "seconds": 0.0})
    return Result(plan, 0, len(plan.shards), (), manifest, 0.0)


def _ignore(count: int) -> None:
    return


def _part_of(shards: Sequence[ShardPlan], part: tuple[int, int] | None) -> list[ShardPlan]:
    return list(shards) if part is None else list(shards[part[0] :: part[1]])


def _bytes_read(shard: ShardPlan) -> int:
    """Return the source bytes of a shard, counted as `Transformer` reports them."""
    sources = {step.sources[0] for step in shard.steps} | {
        s for step in shard.steps if step.op.value != "keep" for s in step.sources
    }
    return sum(s.nbytes for s in sources)


def _bytes_in(root: Path) -> int:
    return sum(p.stat().st_size for p in root.glob("*.safetensors")) if root.is_dir() else 0


@dataclass(frozen=True, slots=True)
class _Task:
    """Everything a worker needs for one shard."""

    shard: ShardPlan
    sources: Mapping[str, Shard]
    root: Path
    limits: Limits
    device: str


def convert_shards(
    checkpoint: Checkpoint,
    root: Path,
    todo: Sequence[ShardPlan],
    jobs: int,
    limits: Limits,
    progress: Progress,
    on_done: Callable[[ShardRecord], None] | None = None,
    device: str = "cpu",
) -> None:
    """Convert shards of a begun conversion and note each in its journal.

    Args:
        checkpoint: The source.
        root: The destination; its journal has been started.
        todo: Planned shards.
        jobs: Worker processes; 1 works in this process.
        limits: What is still acceptable.
        progress: Called with numbers of source bytes as they are done.
        on_done: Called with each finished shard; by default the journal's `record`.
        device: What does the arithmetic; `require_device` has passed.

    Raises:
        Refused: values that must not or may not be converted.
        EnvironmentFault: disk or process trouble.
    """
    record = on_done or Journal(root).record
    # Workers get the shards' paths and identities, not their thousands of tensors.
    slim = {name: replace(shard, tensors=()) for name, shard in checkpoint.shards.items()}
    tasks = [_Task(s, {n: slim[n] for n in _shards_read(s)}, root, limits, device) for s in todo]
    if jobs == 1 or len(tasks) == 1:
        for task in tasks:
            record(convert_shard(task, progress))
        return
    named = [(task.shard.name, task) for task in tasks]
    run_all(convert_shard, named, jobs, record, progress)


def _shards_read(shard: ShardPlan) -> set[str]:
    return {source.shard for step in shard.steps for source in step.sources}


def convert_shard(task: _Task, progress: Progress) -> ShardRecord:
    """Convert one shard and give it its final name.

    Raises:
        Refused: values that must not or may not be converted; nothing is left of the shard.
        EnvironmentFault: reading or writing failed, or the source changed; nothing is left of the shard.
    """
    shard, final = task.shard, task.root / task.shard.name
    report = _Batched(progress)
    with ShardReader(task.sources) as reader:
        _require_unchanged(reader, task.sources)
        with PendingFile(final, Journal(task.root).path, shard.file_bytes) as pending:
            pending.write(shard.header)
            outcome, hashes = _stream(task, reader, pending.fd, report)
            accepted = judge(outcome, task.limits)
            _require_unchanged(reader, task.sources)
            status = os.fstat(pending.fd)
    report.flush()
    tensors = {step.name: hashes[step.name] for step in shard.steps}
    _check_written(final, shard)
    return ShardRecord(
        shard=shard.name,
        file_bytes=shard.file_bytes,
        digest=shard_digest(shard.header, tensors),
        tensors=tensors,
        figures=outcome.figures,
        rounded=tuple({"code": f.code, "tensor": f.where, "found": f.found} for f in accepted),
        mtime_ns=status.st_mtime_ns,
        inode=status.st_ino,
    )


class _Batched:
    """Progress in large steps, so that reporting costs nothing."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._count = progress, 0

    def __call__(self, count: int) -> None:
        self._count += count
        if self._count >= _REPORT_BYTES:
            self.flush()

    def flush(self) -> None:
        self._progress(self._count)
        self._count = 0


def _stream(task: _Task, reader: ShardReader, fd: int, progress: Progress) -> tuple[Outcome, dict[str, str]]:
    with device_faults(task.shard.name):
        decoder = decoder_of(task.device)
        sink = Sink(fd, _BUFFERS, STRIP, decoder.allocate)
        try:
            outcome = Transformer(reader, sink, progress, decoder).run(task.shard.steps)
            return outcome, sink.finish()
        except BaseException:
            sink.abort()
            raise


def _require_unchanged(reader: ShardReader, sources: Mapping[str, Shard]) -> None:
    for name, shard in sources.items():
        status = os.fstat(reader.fileno(name))
        if (status.st_size, status.st_mtime_ns) != (shard.size, shard.mtime_ns):
            problem = "the source shard changed since the conversion was planned"
            raise Refused(finding("src.changed", name, problem))


def _check_written(final: Path, shard: ShardPlan) -> None:
    """Read the header back through the strict parser and compare it with the plan."""
    written, faults = read_header(final, shard.name)
    if faults:
        raise EnvironmentFault(faults)
    planned = [(s.name, s.dtype, s.shape, s.start, s.end) for s in shard.steps]
    if written is None or [(t.name, t.dtype, t.shape, t.start, t.end) for t in written.tensors] != planned:
        problem = "the header read back is not the one that was written"
        raise EnvironmentFault(finding("io.write", shard.name, problem))
