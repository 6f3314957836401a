"""What commands show: results of the library as lines of text and as JSON objects."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv4convert.card import copied_files
from dsv4convert.cli import memory
from dsv4convert.cli.progress import duration, gib, gigabytes
from dsv4convert.errors import Finding, encodable, errors_of, finding
from dsv4convert.handoff import split_findings
from dsv4convert.header import TensorInfo
from dsv4convert.memory import Demand, GpuMemory, budgets, bytes_per_gpu, is_served, read_positions
from dsv4convert.plan import Plan
from dsv4convert.survey import Survey
from dsv4convert.validate.structure import facts, role_table

if TYPE_CHECKING:
    # At run time it would load numpy, which commands that read headers do without.
    from dsv4convert.convert import Result

#: Anonymous memory of one process that is promised; `make bench` measures a sixth of it.
MEMORY_PER_PROCESS = 350 << 20
#: Rows of the table of losses at the end of `convert`.
LOSSES_SHOWN = 5


def inspect_json(seen: Survey, tensors: Iterable[TensorInfo] | None) -> dict[str, Any]:
    """Return `inspect` as an object."""
    result: dict[str, Any] = {
        "ok": not errors_of(seen.findings),
        "title": seen.title,
        **facts(seen),
        "roles": {role.value: {"tensors": n, "bytes": size} for role, (n, size) in role_table(seen).items()},
        "side_files": list(seen.checkpoint.side_files),
    }
    if tensors is not None:
        result["listed"] = [
            {"name": t.name, "dtype": t.dtype, "shape": list(t.shape), "bytes": t.nbytes, "shard": t.shard}
            for t in tensors
        ]
    return result


def inspect_lines(seen: Survey) -> Iterator[str]:
    """Yield `inspect` as text."""
    numbers = facts(seen)
    yield f"{seen.checkpoint.root.name}: {seen.title}"
    yield f"  layout     {numbers['layout'] or 'unknown'}"
    yield f"  revision   {numbers['revision'] or 'unknown'}"
    yield f"  shards     {numbers['shards']:,}, {numbers['file_bytes']:,} bytes"
    yield f"  tensors    {numbers['tensors']:,}, {numbers['data_bytes']:,} bytes"
    dtypes = ", ".join(f"{dtype} {count:,}" for dtype, count in numbers["dtypes"].items())
    yield f"  dtypes     {dtypes}"
    if "dspark" in numbers:
        fields = ", ".join(f"{k} {v}" for k, v in numbers["dspark"].items())
        yield f"  dspark     {fields}"
    yield f"  {'role':<18}{'tensors':>10}{'bytes':>20}"
    for role, (count, size) in role_table(seen).items():
        yield f"  {role.value:<18}{count:>10,}{size:>20,}"


def tensor_lines(tensors: Iterable[TensorInfo]) -> Iterator[str]:
    """Yield one line per tensor."""
    for t in tensors:
        yield f"{t.name}  {t.dtype}  {list(t.shape)}  {t.nbytes:,}  {t.shard}"


@dataclass(frozen=True, slots=True)
class Budget:
    """What a plan costs on a machine: disk, memory, time, and weight bytes per GPU.

    Attributes:
        per_gpu: Tensor-parallel size -> weight bytes per GPU, the draft's included.
        unsplittable: Sizes that would cut a block or group.
        memory: Memory of a GPU for every size that was named and divides, if this project serves the model.
        draft: Kind of the draft, for people.
        copied: Files beside the shards that go along; `config.json` is written anew.
        free: Bytes free at the destination, None when none was named.
        write_speed: Bytes per second measured there.
        jobs: Processes assumed.
        seconds: Time to write everything at that speed.
        served: What this project's runtime says about the release.
    """

    per_gpu: dict[int, int]
    unsplittable: tuple[int, ...]
    memory: tuple[GpuMemory, ...]
    draft: str
    copied: int
    free: int | None
    write_speed: float | None
    jobs: int
    seconds: float | None
    served: str

    @classmethod
    def of(
        cls,
        seen: Survey,
        plan: Plan,
        tp: Sequence[int],
        demand: Demand,
        dst: Path | None,
        speed: float | None,
        jobs: int,
    ) -> Budget:
        """Work out the budget of a plan; `tp` holds the sizes that were named."""
        sizes, geometry = tp or (4, 8), seen.geometry
        cut = tuple(n for n in sizes if geometry and split_findings(geometry, plan.layout, n))
        model = seen.units, geometry, seen.release, plan.layout
        return cls(
            per_gpu={n: bytes_per_gpu(*model, n) for n in sizes},
            unsplittable=cut,
            memory=budgets(seen, [n for n in tp if n not in cut], demand),
            draft="DSpark" if geometry and geometry.draft.is_dspark else "NextN",
            copied=len(copied_files(seen.checkpoint.root, plan.side_files)),
            free=shutil.disk_usage(_existing(dst)).free if dst else None,
            write_speed=speed,
            jobs=jobs,
            seconds=plan.file_bytes / speed if speed else None,
            served=_served(seen),
        )

    def findings(self, plan: Plan) -> list[Finding]:
        """Return what stands in the way at the destination and on the cards."""
        # A context beyond the model's is one fault, however many sizes were named.
        serving = list(dict.fromkeys(f for m in self.memory for f in m.findings()))
        if self.free is None or self.free >= plan.disk_bytes:
            return serving
        problem = "the destination file system is too small"
        expected = f"{plan.disk_bytes:,} bytes free"
        found = f"{self.free:,}"
        return [*serving, finding("dst.no-space", "--dst", problem, expected=expected, found=found)]

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "weight_bytes_per_gpu": {str(n): size for n, size in self.per_gpu.items()},
            "tp_cuts_a_block": list(self.unsplittable),
            "gpu_memory": {str(m.tp): m.as_dict() for m in self.memory},
            "memory_bytes": MEMORY_PER_PROCESS * self.jobs,
            "jobs": self.jobs,
            "free_bytes": self.free,
            "write_bytes_per_second": self.write_speed,
            "seconds": self.seconds,
            "serving": self.served,
        }


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _served(seen: Survey) -> str:
    if not is_served(seen.geometry, seen.release):
        return "no runtime of this project serves this release: no KV budget; the result is for other loaders"
    if read_positions(seen.checkpoint.config) is None:
        return "no KV budget: `config.json` lacks the numbers about positions, window or rope"
    if seen.release is None:
        return "a derivative: served like the release it comes from, untested"
    return "`serve`, with SGLang 0.5.16 and the SM80 shim of this project; not yet run on an A100"


def plan_lines(plan: Plan, budget: Budget) -> Iterator[str]:
    """Yield a plan as text."""
    yield f"{plan.title}: {plan.source_layout.value} -> {plan.layout.value}"
    yield f"  {'role':<18}{'tensors in':>12}{'bytes in':>20}{'tensors out':>13}{'bytes out':>20}"
    for role, t in plan.roles.items():
        yield f"  {role.value:<18}{t.tensors_in:>12,}{t.bytes_in:>20,}{t.tensors_out:>13,}{t.bytes_out:>20,}"
    yield (
        f"  {len(plan.shards):,} shards, {plan.tensors:,} tensors, {plan.data_bytes:,} data bytes, "
        f"{plan.expert_weights:,} expert weights, {plan.mtp_tensors:,} mtp tensors"
    )
    others = f"{budget.copied:,} other files copied, config.json written anew"
    yield f"  files      {plan.file_bytes:,} bytes in shards, {others}"
    room = f", {budget.free:,} free" if budget.free is not None else ""
    yield f"  disk       {plan.disk_bytes:,} bytes needed at the destination{room}"
    yield f"  memory     at most {MEMORY_PER_PROCESS >> 20} MiB per process, --jobs {budget.jobs}"
    if budget.seconds is None or budget.write_speed is None:
        yield "  time       pass --dst to measure the write speed there"
    else:
        speed = budget.write_speed / 1e9
        yield f"  time       {duration(budget.seconds)} at {speed:.2f} GB/s, measured at the destination"
    for n, size in budget.per_gpu.items():
        held = f"{gib(size)} of weights per GPU"
        yield f"  TP{n:<8} {f'cannot be split: `--tp {n}` says why' if n in budget.unsplittable else held}"
    for size_memory in budget.memory:
        yield from memory.lines(size_memory, budget.draft)
    yield f"  serving    {budget.served}"
    yield f"  digest     {plan.digest}"


def result_json(result: Result, dst: Path) -> dict[str, Any]:
    """Return the result of `convert` or `finalize` as an object."""
    plan = result.plan
    return {
        "ok": True,
        "complete": result.manifest is not None,
        "destination": encodable(os.fspath(dst)),
        "layout": plan.layout.value,
        "digest": plan.digest,
        "shards": len(plan.shards),
        "written": result.written,
        "reused": result.reused,
        "missing": list(result.missing),
        "consumed": list(result.consumed),
        "tensors": plan.tensors,
        "data_bytes": plan.data_bytes,
        "seconds": round(result.seconds, 3),
        "experts": result.manifest["experts"] if result.manifest else None,
    }


def result_lines(result: Result, dst: Path, source: Path | None) -> Iterator[str]:
    """Yield the result of `convert` or `finalize` as text."""
    plan = result.plan
    if result.manifest is None:
        yield f"{dst}: {result.written:,} shards written, {len(result.missing):,} left to other jobs"
        yield f"  then: dsv4convert finalize {shlex.quote(str(dst))}"
        return
    if not result.written:
        yield f"{dst}: complete, all {result.reused:,} shards were done before"
    else:
        written = plan.file_bytes * result.written / len(plan.shards)
        # A rate over a second or less says nothing about the disk.
        rate = f" ({written / result.seconds / 1e9:.2f} GB/s)" if result.seconds > 1 and written > 1e9 else ""
        kept = f", {result.reused:,} kept from before" if result.reused else ""
        yield f"{dst}: {result.written:,} shards written in {duration(result.seconds)}{rate}{kept}"
    sizes = f"{plan.data_bytes:,} data bytes ({gigabytes(plan.file_bytes)})"
    yield f"  {len(plan.shards):,} shards, {plan.tensors:,} tensors, {sizes}"
    experts = result.manifest["experts"] if result.manifest else None
    if experts:
        exact = f"{experts['exact_matrices']:,} of {experts['matrices']:,} matrices exact"
        worst = f"worst relative error {experts['max_relative_error']:.2g}"
        yield f"  experts    {exact}, {experts['codes_changed']:,} codes rounded, {worst}"
        yield from _loss_lines(result.manifest["losses"] if result.manifest else {})
    yield "  checked    headers read back, sizes, a hash of every tensor as it was written"
    if result.consumed:
        yield f"  consumed   {len(result.consumed):,} source shards deleted, their outputs were read back"
    reference = f" --reference {shlex.quote(str(source))}" if source and not result.consumed else ""
    yield f"  next: dsv4convert converted {shlex.quote(str(dst))}{reference} --read-data"


def _loss_lines(losses: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Iterator[str]:
    """Yield the layers and projections that lost most, if any lost anything."""
    rows = [(layer, part, row) for layer, parts in losses.items() for part, row in parts.items()]
    lossy = sorted((r for r in rows if r[2]["codes_changed"]), key=lambda r: -r[2]["max_relative_error"])
    if not lossy:
        return
    yield f"  {'losses':<11}{'layer':<12}{'part':<6}{'inexact':>14}{'rounded':>13}{'error':>9}{'block':>8}"
    for layer, part, row in lossy[:LOSSES_SHOWN]:
        inexact = f"{row['matrices'] - row['exact_matrices']:,} of {row['matrices']:,}"
        numbers = f"{row['codes_changed']:>13,}{row['max_relative_error']:>9.2g}{row['worst_block']:>8.2g}"
        yield f"  {'':<11}{layer:<12}{part:<6}{inexact:>14}{numbers}"
    left = len(lossy) - LOSSES_SHOWN
    more = f"{left:,} more in `losses` of `dsv4convert.json`; " if left > 0 else ""
    yield f"  {'':<11}{more}error and block: the worst matrix and block of 32, relative"
