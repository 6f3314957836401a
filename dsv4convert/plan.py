"""Decide everything about a conversion before a byte is written.

A `Plan` holds one `Step` per output tensor, in the shards and at the offsets where it will lie, so every
total is known from headers alone. `convert` carries a plan out and decides nothing. The digest names the
decisions and the source's headers; the resume key adds the identity of the source files on this machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from dsv4convert.checkpoint import Checkpoint
from dsv4convert.errors import Refused, errors_of, finding
from dsv4convert.formats.spec import PACKING, ROUNDING, Shape, nbytes
from dsv4convert.header import TensorInfo
from dsv4convert.names import Layout, Unit, unit_kinds
from dsv4convert.survey import Survey, survey
from dsv4convert.table import Role, Storage
from dsv4convert.writer import WRITER_VERSION, encode_header, in_data_order


class Op(str, Enum):
    """What is done to make an output tensor; scales of dequantized weights make none."""

    KEEP = "keep"
    DEQUANTIZE_BF16 = "dequantize-bf16"
    REPACK_INT8_SHIFT = "repack-int8-shift"


class Step(NamedTuple):
    """One output tensor; a tuple, because there are a hundred thousand of them.

    Attributes:
        name: Tensor name in the output.
        op: What makes it.
        dtype: safetensors dtype.
        shape: Stored shape.
        start: First byte, counted from the start of the output file.
        end: One past the last byte.
        role: What the model uses it for.
        sources: Source tensors, the one it is made from first: weight and scale of a transformed weight,
            the tensor itself of a kept one (and, after a kept scale, its codes).
        block: FP8 block of a dequantized weight; (1, 32) otherwise.
    """

    name: str
    op: Op
    dtype: str
    shape: Shape
    start: int
    end: int
    role: Role
    sources: tuple[TensorInfo, ...]
    block: tuple[int, int]


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One output shard: its name, its exact header bytes, its steps in data order."""

    name: str
    header: bytes
    steps: tuple[Step, ...]

    @property
    def data_bytes(self) -> int:
        """Bytes of tensor data."""
        return self.file_bytes - len(self.header)

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return self.steps[-1].end if self.steps else len(self.header)


@dataclass(frozen=True, slots=True)
class RoleTotal:
    """Tensors and bytes of one role, before and after."""

    tensors_in: int
    bytes_in: int
    tensors_out: int
    bytes_out: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything decided about one conversion. See `plan`."""

    release: str | None
    title: str
    source_layout: Layout
    layout: Layout
    revision: str | None
    shards: tuple[ShardPlan, ...]
    roles: Mapping[Role, RoleTotal]
    side_files: tuple[str, ...]
    side_bytes: int
    source_headers: Mapping[str, str]
    source_bytes: int
    digest: str
    resume_key: str

    @property
    def tensors(self) -> int:
        """Number of output tensors."""
        return sum(len(s.steps) for s in self.shards)

    @property
    def data_bytes(self) -> int:
        """Bytes of tensor data, the `total_size` of the index."""
        return sum(s.data_bytes for s in self.shards)

    @property
    def file_bytes(self) -> int:
        """Bytes of all shard files."""
        return sum(s.file_bytes for s in self.shards)

    @property
    def expert_weights(self) -> int:
        """Number of routed expert matrices, however many tensors store each."""
        codes = (".weight", ".weight_codes")
        return sum(
            s.role is Role.ROUTED_EXPERT and s.name.endswith(codes) for p in self.shards for s in p.steps
        )

    @property
    def mtp_tensors(self) -> int:
        """Number of output tensors of the draft layers."""
        return sum(s.name.startswith("mtp.") for p in self.shards for s in p.steps)

    @property
    def disk_bytes(self) -> int:
        """Room the output needs: shards, side files, and an allowance for index and manifest."""
        return self.file_bytes + self.side_bytes + 512 * self.tensors + (1 << 20)

    def as_dict(self, *, steps: bool = False) -> dict[str, Any]:
        """Return the JSON form; `steps` adds one object per output tensor."""
        result: dict[str, Any] = {
            "release": self.release,
            "title": self.title,
            "source_layout": self.source_layout.value,
            "layout": self.layout.value,
            "packing": PACKING if self.layout is Layout.INT8 else None,
            "rounding": ROUNDING if self.layout is Layout.INT8 else None,
            "writer_version": WRITER_VERSION,
            "digest": self.digest,
            "shards": len(self.shards),
            "tensors": self.tensors,
            "data_bytes": self.data_bytes,
            "file_bytes": self.file_bytes,
            "disk_bytes": self.disk_bytes,
            "expert_weights": self.expert_weights,
            "mtp_tensors": self.mtp_tensors,
            "source": {
                "revision": self.revision,
                "file_bytes": self.source_bytes,
                "headers": dict(self.source_headers),
            },
            "roles": {role.value: _fields(total) for role, total in self.roles.items()},
            "side_files": list(self.side_files),
        }
        if steps:
            result["steps"] = [_step_dict(s, p.name) for p in self.shards for s in p.steps]
        return result


def _fields(total: RoleTotal) -> dict[str, int]:
    return {name: getattr(total, name) for name in RoleTotal.__slots__}


def _step_dict(step: Step, shard: str) -> dict[str, Any]:
    return {
        "name": step.name,
        "op": step.op.value,
        "dtype": step.dtype,
        "shape": list(step.shape),
        "shard": shard,
        "offsets": [step.start, step.end],
        "sources": [s.name for s in step.sources],
    }


def plan(source: Checkpoint | Survey, layout: Layout | str = Layout.INT8) -> Plan:
    """Plan the conversion of a checkpoint.

    Args:
        source: An official checkpoint or an ``mxfp4`` output.
        layout: ``int8`` or ``mxfp4``: what becomes of the routed experts.

    Returns:
        The plan; the same source headers and layout give the same digest on every machine.

    Raises:
        Refused: the source has errors; all of them are reported together.
    """
    seen = source if isinstance(source, Survey) else survey(source)
    target = Layout(layout)
    faults = list(errors_of(seen.findings))
    if target is Layout.OFFICIAL:
        raise ValueError("a plan makes `int8` or `mxfp4`, never the official layout")
    if seen.layout is Layout.INT8:
        problem = "the source stores its experts as INT8_SHIFT already"
        faults.append(finding("src.converted", seen.checkpoint.root.name, problem))
    if faults or seen.layout is None:
        raise Refused(faults)
    return _build(seen, seen.layout, target)


def _build(seen: Survey, source_layout: Layout, target: Layout) -> Plan:
    checkpoint = seen.checkpoint
    headers = {name: shard.header_sha256 for name, shard in sorted(checkpoint.shards.items())}
    metadata = shard_metadata(target, headers)
    by_shard: dict[str, dict[str, tuple[Unit, Output]]] = {name: {} for name in headers}
    for unit in seen.units:
        stored_in = [checkpoint.tensors[name] for name in unit.stored(source_layout)]
        for output in _outputs(unit, stored_in, target):
            # What is kept stays in its shard; what is made lies where the weight was.
            by_shard[output[4][0].shard][output[0]] = unit, output
    shards = tuple(_plan_shard(name, outputs, metadata) for name, outputs in by_shard.items())
    digest = _digest(seen, source_layout, target, headers, shards)
    return Plan(
        release=seen.release.key if seen.release else None,
        title=seen.title,
        source_layout=source_layout,
        layout=target,
        revision=checkpoint.revision,
        shards=shards,
        roles=_role_totals(seen.units, source_layout, target),
        side_files=checkpoint.side_files,
        side_bytes=sum((checkpoint.root / f).stat().st_size for f in checkpoint.side_files),
        source_headers=headers,
        source_bytes=sum(s.size for s in checkpoint.shards.values()),
        digest=digest,
        resume_key=_resume_key(digest, checkpoint),
    )


Output = tuple[str, Op, str, Shape, tuple[TensorInfo, ...]]


def _outputs(unit: Unit, stored_in: list[TensorInfo], target: Layout) -> Iterable[Output]:
    storage = unit.row.storage
    pair = tuple(stored_in)
    if storage is Storage.EXPERT_MXFP4 and target is Layout.INT8:
        op = Op.REPACK_INT8_SHIFT
        return [(name, op, dtype, shape, pair) for name, (dtype, shape) in unit.stored(target).items()]
    if storage is Storage.DENSE_FP8 and len(pair) == 2:
        return [(f"{unit.base}.weight", Op.DEQUANTIZE_BF16, "BF16", unit.shape, pair)]
    # Kept tensors keep their stored dtype: packed codes may be I8, U8 or F4 in the source. A kept scale
    # names its codes too, because only the two together tell whether a block overflows.
    return [(t.name, Op.KEEP, t.dtype, t.shape, (t, *pair[:i])) for i, t in enumerate(pair)]


def _plan_shard(
    name: str, outputs: Mapping[str, tuple[Unit, Output]], metadata: Mapping[str, str]
) -> ShardPlan:
    entries = in_data_order((tensor, dtype, shape) for _, (tensor, _, dtype, shape, _) in outputs.values())
    header = encode_header(entries, metadata)
    position = len(header)
    steps = []
    for tensor, dtype, shape in entries:
        unit, (_, op, _, _, sources) = outputs[tensor]
        end = position + nbytes(dtype, shape)
        steps.append(Step(tensor, op, dtype, shape, position, end, unit.row.role, sources, unit.block))
        position = end
    return ShardPlan(name, header, tuple(steps))


def source_digest(headers: Mapping[str, str]) -> str:
    """Return one digest over the header hashes of all source shards, as shard metadata carries it."""
    source = hashlib.sha256()
    for name, digest in sorted(headers.items()):
        # A name of a damaged manifest may be no text.
        source.update(f"{name} {digest}\n".encode("utf-8", "surrogatepass"))
    return source.hexdigest()


def shard_metadata(layout: Layout, source_headers: Mapping[str, str]) -> dict[str, str]:
    """Return the `__metadata__` of every output shard: the same on every machine, no time stamps."""
    metadata = {
        "dsv4convert.layout": layout.value,
        "dsv4convert.source": source_digest(source_headers),
        "dsv4convert.writer": WRITER_VERSION,
        # Loaders of the torch family refuse or skip shards without it.
        "format": "pt",
    }
    if layout is Layout.INT8:
        metadata |= {"dsv4convert.packing": PACKING, "dsv4convert.rounding": ROUNDING}
    return dict(sorted(metadata.items()))


def _role_totals(units: Iterable[Unit], source: Layout, target: Layout) -> dict[Role, RoleTotal]:
    totals: dict[Role, list[int]] = {}
    for unit, count in unit_kinds(units):
        row = totals.setdefault(unit.row.role, [0, 0, 0, 0])
        for at, layout in ((0, source), (2, target)):
            row[at] += count * len(unit.stored(layout))
            row[at + 1] += count * unit.nbytes(layout)
    return {role: RoleTotal(*row) for role, row in totals.items()}


def _digest(
    seen: Survey, source: Layout, target: Layout, headers: Mapping[str, str], shards: Iterable[ShardPlan]
) -> str:
    decisions = {
        "release": seen.release.key if seen.release else None,
        "layouts": [source.value, target.value],
        "packing": PACKING,
        "rounding": ROUNDING,
        "writer": WRITER_VERSION,
        "source": [[n, seen.checkpoint.shards[n].size, h] for n, h in headers.items()],
        "shards": [[s.name, s.file_bytes, hashlib.sha256(s.header).hexdigest()] for s in shards],
    }
    return hashlib.sha256(json.dumps(decisions, sort_keys=True).encode()).hexdigest()


def _resume_key(digest: str, checkpoint: Checkpoint) -> str:
    """Return the digest joined with what tells an edited source file from the one planned for."""
    files = sorted(checkpoint.shards.values(), key=lambda s: s.name)
    identity = [[s.name, s.size, s.mtime_ns, s.inode] for s in files]
    return hashlib.sha256(json.dumps([digest, identity]).encode()).hexdigest()
