"""Plans: what the digest covers, what steps cover, and the bytes of a header."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dsv4convert.checkpoint import open_checkpoint
from dsv4convert.errors import Refused
from dsv4convert.formats.spec import nbytes
from dsv4convert.names import Layout
from dsv4convert.plan import Op, Plan, plan, shard_metadata
from dsv4convert.writer import encode_header, in_data_order
from tests.shardfile import rows

KINDS = ["plain", "ragged", "preview", "vision", "v41"]
TARGETS = [Layout.INT8, Layout.MXFP4]
Sample = Callable[[str], Path]


def make(root: Path, layout: Layout = Layout.INT8) -> Plan:
    return plan(open_checkpoint(root), layout)


# ---- digest and resume key


def test_digest_of_a_copy_is_the_same_and_its_resume_key_another(sample: Sample, tmp_path: Path) -> None:
    """The digest names decisions, the same on every machine; the resume key names these very files."""
    shutil.copytree(sample("short"), tmp_path / "elsewhere")
    for path in (tmp_path / "elsewhere").glob("*.safetensors"):
        os.utime(path, ns=(1, 1))
    ours, theirs = make(sample("short")), make(tmp_path / "elsewhere")
    assert ours.digest == theirs.digest
    assert ours.resume_key != theirs.resume_key
    assert [s.header for s in ours.shards] == [s.header for s in theirs.shards]


def test_digest_and_resume_key_of_the_same_files_are_stable(sample: Sample) -> None:
    first, second = make(sample("short")), make(sample("short"))
    assert (first.digest, first.resume_key) == (second.digest, second.resume_key)
    assert first == second


def test_digest_depends_on_the_layout(sample: Sample) -> None:
    assert make(sample("short"), Layout.INT8).digest != make(sample("short"), Layout.MXFP4).digest


def test_digest_depends_on_a_source_header(sample: Sample, tmp_path: Path) -> None:
    """One space more of padding: the same tensors, another header, another source."""
    shutil.copytree(sample("short"), tmp_path / "copy")
    path = tmp_path / "copy" / "model-00001-of-00008.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length] + b" " * 8
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])
    assert make(sample("short")).digest != make(tmp_path / "copy").digest


@pytest.mark.parametrize("moved", ["mtime", "inode", "none"])
def test_resume_key_changes_with_the_identity_of_a_source_file(
    sample: Sample, tmp_path: Path, moved: str
) -> None:
    root = tmp_path / "copy"
    shutil.copytree(sample("short"), root)
    before = make(root).resume_key
    path = root / "model-00003-of-00008.safetensors"
    status = path.stat()
    if moved == "mtime":
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    if moved == "inode":
        shutil.copy2(path, tmp_path / "twin")
        os.replace(tmp_path / "twin", path)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (make(root).resume_key != before) is (moved != "none")


# ---- steps


@pytest.mark.parametrize("layout", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_cover_every_byte_of_the_output_and_every_tensor_of_the_source(
    sample: Sample, kind: str, layout: Layout
) -> None:
    checkpoint = open_checkpoint(sample(kind))
    made = plan(checkpoint, layout)
    for shard in made.shards:
        position = len(shard.header)
        for step in shard.steps:
            assert (step.start, step.end) == (position, position + nbytes(step.dtype, step.shape))
            position = step.end
        assert shard.file_bytes == position
    used = {source.name for shard in made.shards for step in shard.steps for source in step.sources}
    assert used == set(checkpoint.tensors)
    names = [step.name for shard in made.shards for step in shard.steps]
    assert len(set(names)) == len(names) == made.tensors
    assert {role: total.tensors_out for role, total in made.roles.items()} == {
        role: sum(step.role is role for shard in made.shards for step in shard.steps) for role in made.roles
    }
    assert sum(t.bytes_out for t in made.roles.values()) == made.data_bytes
    assert sum(t.bytes_in for t in made.roles.values()) == sum(t.nbytes for t in checkpoint.tensors.values())


@pytest.mark.parametrize("layout", TARGETS)
def test_steps_lie_in_the_shard_of_their_source(sample: Sample, layout: Layout) -> None:
    for shard in make(sample("vision"), layout).shards:
        assert {source.shard for step in shard.steps for source in step.sources} == {shard.name}


def test_plan_from_an_mxfp4_output_keeps_its_bf16_tensors(sample: Sample, tmp_path: Path) -> None:
    from dsv4convert.convert import convert

    convert(sample("short"), tmp_path / "mxfp4", experts="mxfp4")
    made = make(tmp_path / "mxfp4")
    ops = {step.op for shard in made.shards for step in shard.steps}
    assert made.source_layout is Layout.MXFP4
    assert ops == {Op.KEEP, Op.REPACK_INT8_SHIFT}


def test_plan_to_the_official_layout_is_a_programming_error(sample: Sample) -> None:
    with pytest.raises(ValueError, match="never the official layout"):
        make(sample("short"), Layout.OFFICIAL)


def test_plan_of_an_int8_output_is_refused(sample: Sample, tmp_path: Path) -> None:
    from dsv4convert.convert import convert

    convert(sample("short"), tmp_path / "int8")
    with pytest.raises(Refused) as caught:
        make(tmp_path / "int8", Layout.MXFP4)
    assert [f.code for f in caught.value.findings] == ["src.converted"]


# ---- JSON


def test_plan_as_json_says_the_same_after_a_round_trip(sample: Sample) -> None:
    made = make(sample("short"))
    data = json.loads(json.dumps(made.as_dict(steps=True)))
    assert data == made.as_dict(steps=True)
    assert {k: v for k, v in data.items() if k != "steps"} == json.loads(json.dumps(made.as_dict()))
    assert len(data["steps"]) == data["tensors"] == made.tensors
    assert sum(e - s for s, e in (row["offsets"] for row in data["steps"])) == data["data_bytes"]
    assert data["digest"] == made.digest


# ---- header bytes


def test_header_of_three_tensors_is_these_bytes() -> None:
    """Rank decides before the name: I64, F32, BF16; 2 x 8 + 3 x 4 + 2 x 2 x 2 = 36 bytes of data."""
    entries = in_data_order([("b", "BF16", (2, 2)), ("a.x", "F32", (3,)), ("z", "I64", (2,))])
    text = (
        b'{"__metadata__":{"dsv4convert.layout":"mxfp4","format":"pt"},'
        b'"z":{"dtype":"I64","shape":[2],"data_offsets":[0,16]},'
        b'"a.x":{"dtype":"F32","shape":[3],"data_offsets":[16,28]},'
        b'"b":{"dtype":"BF16","shape":[2,2],"data_offsets":[28,36]}}'
    )
    assert len(text) == 230
    wanted = b"\xe8\x00\x00\x00\x00\x00\x00\x00" + text + b"  "
    metadata = {"dsv4convert.layout": "mxfp4", "format": "pt"}
    assert encode_header(entries, metadata) == wanted


def test_header_that_fills_eight_bytes_gets_no_padding_and_no_metadata_key() -> None:
    text = b'{"abcdefgh":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}'
    padded = text + b" " * (-len(text) % 8)
    assert encode_header([("abcdefgh", "U8", ())]) == len(padded).to_bytes(8, "little") + padded
    exact = b'{"abcdefghijklm":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}'
    assert len(exact) == 64
    assert encode_header([("abcdefghijklm", "U8", ())]) == b"\x40" + bytes(7) + exact


def test_header_escapes_names_like_json() -> None:
    header = encode_header([('a"\\ü', "U8", (1,))])
    assert list(json.loads(header[8:])) == ['a"\\ü']
    assert "ü".encode() in header, "the stock serializer writes UTF-8, not escapes"


def test_metadata_of_shards_is_sorted_and_names_the_source_by_its_headers() -> None:
    """sha256 of the lines `NAME HEADER-SHA256`, in the order of names."""
    metadata = shard_metadata(Layout.INT8, {"b": "2", "a": "1"})
    assert metadata == {
        "dsv4convert.layout": "int8",
        "dsv4convert.packing": "g128-split64",
        "dsv4convert.rounding": "nearest-ties-to-smaller",
        "dsv4convert.source": "2951835de33689a441bfa61bc7af99b1f0305ca8ec0ab4dd508f14f57b27ca23",
        "dsv4convert.writer": "1",
        "format": "pt",
    }
    assert list(metadata) == sorted(metadata)


DTYPES = {
    "I64": torch.int64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
}


def test_data_order_is_that_of_the_stock_serializer(tmp_path: Path) -> None:
    names = ["experts.2.w1", "experts.10.w1", "B", "a", "ü", "a.b"]
    wanted = {f"{name}.{dtype}": (dtype, (2, 4)) for dtype in DTYPES for name in names}
    save_file(
        {n: torch.zeros(shape, dtype=torch.uint8).to(DTYPES[dtype]) for n, (dtype, shape) in wanted.items()},
        tmp_path / "stock.safetensors",
        metadata={"format": "pt"},
    )
    stock = [(name, dtype, shape) for name, dtype, shape, _ in rows(tmp_path / "stock.safetensors")]
    ours = in_data_order((n, dtype, shape) for n, (dtype, shape) in wanted.items())
    assert ours == stock
    header = encode_header(ours, {"format": "pt"})
    assert (tmp_path / "stock.safetensors").read_bytes()[: len(header)] == header


@pytest.mark.parametrize("layout", TARGETS)
def test_header_of_a_planned_shard_is_what_the_stock_serializer_writes(
    sample: Sample, tmp_path: Path, layout: Layout
) -> None:
    """Only `__metadata__` differs: the stock serializer orders its keys by a hash."""
    shard = make(sample("short"), layout).shards[2]
    save_file(
        {s.name: torch.zeros(s.shape, dtype=torch.uint8).to(DTYPES[s.dtype]) for s in shard.steps},
        tmp_path / "stock.safetensors",
    )
    raw = (tmp_path / "stock.safetensors").read_bytes()
    bare = encode_header((s.name, s.dtype, s.shape) for s in shard.steps)
    assert raw[: len(bare)] == bare
    assert len(raw) - len(bare) == shard.data_bytes
