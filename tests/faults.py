"""One table: how a checkpoint is broken, which command must say so, by which code, at which place.

Ids are those of a survey of public issue threads (F01 truncated shard, F57 exit status, ...); ``C``, ``D`` and ``M``
are faults of config, destination and manifest. `NEIGHBOURS` holds, for every id, something close by that is legal
and must pass: a check that refuses too much is as useless as one that refuses too little.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.shardfile import Row, rows, write_shard
from tests.toy import CONFIG, INDEX, MANIFEST, Toy

Change = Callable[[Toy], object]

# Command lines and the exit status they must end with. A value in braces is a path of the toy.
SOURCE = {"original {src}": 1, "plan {src}": 1, "convert {src} {out}": 3}
CONVERT = {"convert {src} {out}": 3}
CONVERT_BOTH = {"convert {src} {out}": 3, "convert {src} {out} --experts mxfp4": 3}
READ = {"original {src} --read-data": 1}
HASHED = {"original {src} --checksums auto": 1}
OUTPUT = {"converted {src}": 1}
PROVED = {"converted {src} --reference {ref} --read-data": 1}

# The same for what must pass, in this order.
SOUND = ("original {src}",)
MADE = ("convert {src} {out}", "converted {out} --reference {src} --read-data")
MADE_MXFP4 = ("convert {src} {out} --experts mxfp4", "converted {out} --reference {src} --read-data")
VALID = ("converted {src}",)
VERIFIED = ("original {src} --checksums auto",)
LOOKED_AT = ("original {src} --read-data",)

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 3500000000\n"
HTML = b"<!DOCTYPE html><html><title>403</title></html>"


def S(number: int) -> str:
    """Return the name of a shard of the 0731 toy."""
    return f"model-{number:05d}-of-00008.safetensors"


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to break a checkpoint.

    Attributes:
        id: Number of the report, and the variant.
        base: Toy to break.
        harm: What breaks it.
        code: Code of every error it may cause.
        where: The place of each error, in any order; one fault has one.
        runs: Command line -> exit status.
        warnings: Warnings that may come with it.
    """

    id: str
    base: str
    harm: Change
    code: str
    where: tuple[str, ...]
    runs: Mapping[str, int]
    warnings: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Something legal beside a fault.

    Attributes:
        id: Number of the report, and the variant.
        base: Toy to change.
        change: What is done to it.
        runs: Command lines that must end with 0.
        warnings: The warnings the last of them must give, no more and no less.
        check: Looks at the result.
    """

    id: str
    base: str
    change: Change
    runs: tuple[str, ...]
    warnings: frozenset[str] = frozenset()
    check: Change | None = None


# How to break things --------------------------------------------------------------------------------------


def nothing(k: Toy) -> None:
    return


def cut(number: int, size: int) -> Change:
    return lambda k: os.truncate(k.S(number), k.S(number).stat().st_size - size)


def cut_to_header(k: Toy) -> None:
    with open(k.S(2), "rb") as file:
        end = 8 + int.from_bytes(file.read(8), "little")
    os.truncate(k.S(2), end)


def put(name: str, content: bytes | str) -> Change:
    return lambda k: k.put(name, content)


def replace_shard(number: int, content: bytes) -> Change:
    return lambda k: k.S(number).write_bytes(content)


def remove(*names: str) -> Change:
    def change(k: Toy) -> None:
        for name in names:
            path = k.root / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def both(*changes: Change) -> Change:
    def change(k: Toy) -> None:
        for one in changes:
            one(k)

    return change


def poke(name: str, offset: int, *data: int) -> Change:
    return lambda k: k.poke(name, offset, bytes(data))


def flip(name: str, offset: int = 0, mask: int = 1) -> Change:
    return lambda k: k.flip(name, offset, mask)


def retype(name: str, dtype: str) -> Change:
    """Change the dtype in the header of a tensor, not its bytes."""
    return lambda k: k.edit(name, lambda r: [(r[0], dtype, *r[2:])])


def resize(name: str, shape: tuple[int, ...], size: int) -> Change:
    """Change the shape of a tensor; its bytes are cut or repeated to `size`."""
    return lambda k: k.edit(name, lambda r: [(*r[:2], shape, (r[3] * 4)[:size])])


def cfg(**values: Any) -> Change:
    return lambda k: k.cfg(lambda c: c.update(values))


def quantization(**values: Any) -> Change:
    return lambda k: k.cfg(lambda c: c["quantization_config"].update(values))


def uncfg(*names: str) -> Change:
    return lambda k: k.cfg(lambda c: [c.pop(n) for n in names])


def idx(**values: Any) -> Change:
    return lambda k: k.idx(lambda o: o.update(values))


def mapped(name: str, shard: Any) -> Change:
    return lambda k: k.idx(lambda o: o["weight_map"].update({name: shard}))


def drop(*names: str) -> Change:
    return lambda k: k.drop(*names)


def link_farm(k: Toy) -> None:
    """Turn the checkpoint into what a Hugging Face cache looks like."""
    blobs = k.root.parent / "blobs"
    blobs.mkdir()
    for i, path in enumerate(
        [*sorted(k.root.glob("*.safetensors")), k.root / CONFIG, k.root / "tokenizer.json"]
    ):
        blob = blobs / f"{i:064x}"
        shutil.move(path, blob)
        path.symlink_to(os.path.relpath(blob, k.root))


def lose_blob(k: Toy) -> None:
    link_farm(k)
    (k.root.parent / "blobs" / f"{1:064x}").unlink()


def link_outside(k: Toy) -> None:
    shutil.move(k.S(2), k.root.parent / "elsewhere.safetensors")
    (k.root / S(2)).symlink_to(k.root.parent / "elsewhere.safetensors")


def is_expert(name: str, part: str = ".weight") -> bool:
    return ".ffn.experts." in name and name.endswith(part)


def as_floats(row: Row) -> list[Row]:
    """Store scale bytes as the numbers they are not: F32 120.0 for byte 120."""
    return [(row[0], "F32", row[2], np.frombuffer(row[3], np.uint8).astype("<f4").tobytes())]


def experts_as_fp8(k: Toy) -> None:
    k.remap(lambda r: [(r[0], "F8_E4M3", *r[2:])] if is_expert(r[0]) else [r])


def experts_as_f4(k: Toy) -> None:
    k.remap(lambda r: [(r[0], "F4", (r[2][0], 2 * r[2][1]), r[3])] if is_expert(r[0]) else [r])


def as_base(k: Toy) -> None:
    """Store the experts as a Base release does: one E4M3 code per weight, an F32 scale per 128x128 block."""

    def change(r: Row) -> list[Row]:
        name, _, (n, half), data = r if len(r[2]) == 2 else (*r[:2], (0, 0), r[3])
        if is_expert(name):
            return [(name, "F8_E4M3", (n, 2 * half), data * 2)]
        if is_expert(name, ".scale"):
            return [(name, "F32", (1, 1), bytes(4))]
        return [r]

    k.remap(change)
    k.cfg(lambda c: c.pop("expert_dtype"))


def rename(pattern: Callable[[str], str]) -> Change:
    return lambda k: k.remap(lambda r: [(pattern(r[0]), *r[1:])])


def put_twice(k: Toy) -> None:
    name, dtype, shape, data = k.row("norm.weight")
    twin = name, dtype, shape, bytes(len(data))
    k.edit("embed.weight", lambda r: [r, twin])


def without_index_entry(*names: str) -> Change:
    return lambda k: k.idx(lambda o: [o["weight_map"].pop(n) for n in names])


def cut_index(k: Toy) -> None:
    os.truncate(k.root / INDEX, (k.root / INDEX).stat().st_size - 200)


def raw(number: int, entries: Mapping[str, tuple[str, list[int], list[int]]], size: int) -> Change:
    header = {n: {"dtype": d, "shape": s, "data_offsets": o} for n, (d, s, o) in entries.items()}
    return lambda k: k.rawhdr(number, header, bytes(size))


def odd_names(k: Toy) -> None:
    """Give all shards a name that only looks like a path."""
    for path in sorted(k.root.glob("model-*.safetensors")):
        path.rename(path.with_name(f"模型 x..{path.name.removeprefix('model')}"))
    k.idx(
        lambda o: o.update(
            weight_map={n: f"模型 x..{s.removeprefix('model')}" for n, s in o["weight_map"].items()}
        )
    )


def single_file(k: Toy) -> None:
    everything = list(k.tensors().values())
    for path in k.root.glob("model*"):
        path.unlink()
    write_shard(k.root / "model.safetensors", everything)


def only_pickles(k: Toy) -> None:
    for path in k.root.glob("model*"):
        path.unlink()
    k.put("pytorch_model.bin", pickle.dumps({"a": 1}))


def leave_backups(k: Toy) -> None:
    k.put("pytorch_model.bin", pickle.dumps({"a": 1}))
    shutil.copy(k.S(1), k.root / f"{S(1)}.bak")
    shutil.copy(k.S(1), k.root / "consolidated.safetensors")


def prune(k: Toy) -> None:
    """Keep two of four experts in the tensors; the config does not know."""

    def change(r: Row) -> list[Row]:
        if ".ffn.experts." in r[0] and int(r[0].split(".")[4]) >= 2:
            return []
        if ".ffn.gate." in r[0] and "tid2eid" not in r[0]:
            return [(*r[:2], (2, *r[2][1:]), r[3][: len(r[3]) // 2])]
        return [r]

    k.remap(change)


def restore_config(k: Toy) -> None:
    shutil.copyfile(k.ref / CONFIG, k.root / CONFIG)


def restore_draft_projection(k: Toy) -> None:
    """Put the FP8 pair of the source back into a conversion."""
    source = Toy(k.ref)
    name = "mtp.0.main_proj"
    pair = [source.row(f"{name}.weight"), source.row(f"{name}.scale")]
    k.edit(f"{name}.weight", lambda r: pair)
    k.reindex()


def unskip(*names: str) -> Change:
    def change(c: dict[str, Any]) -> None:
        for key in ("ignored_layers", "modules_to_not_convert"):
            entries = c["quantization_config"][key]
            c["quantization_config"][key] = [e for e in entries if e not in names]

    # One list is enough for a loader, and a fault of two lists is two faults.
    return lambda k: (k.cfg(change), k.cfg(lambda c: c["quantization_config"].pop("modules_to_not_convert")))


WRONG_SPACE = ["model.layers.0.attn.wq_a", "layers.0.attn.wkv", "layers.9.attn.wkv", "re:.*head.*"]


def wrong_name_space(k: Toy) -> None:
    k.cfg(lambda c: c["quantization_config"].pop("modules_to_not_convert"))
    k.cfg(lambda c: c["quantization_config"].update(ignored_layers=WRONG_SPACE))


def forget_origin(k: Toy) -> None:
    """Make a conversion look like one of another tool."""
    (k.root / MANIFEST).unlink()


def without_metadata(k: Toy) -> None:
    for path in sorted(k.root.glob("*.safetensors")):
        write_shard(path, rows(path))


def read_only(k: Toy) -> None:
    for path in k.root.rglob("*.json"):
        path.chmod(0o444)


def manifest(change: Callable[[Any], object]) -> Change:
    return lambda k: k.json(MANIFEST, change)


def begun(**state: str | None) -> Change:
    """Leave a journal in the destination, as an interrupted conversion of something else would."""

    def change(k: Toy) -> None:
        values = {"resume_key": "0", "digest": "0" * 64, "layout": "int8", "source": "/"} | state
        journal = k.out / ".dsv4convert"
        journal.mkdir(parents=True)
        k.put(os.path.relpath(journal / "plan.json", k.root), repr(values).replace("'", '"'))

    return change


def unfinished(k: Toy) -> None:
    for name in (INDEX, CONFIG, MANIFEST):
        (k.root / name).unlink()
    (k.root / ".dsv4convert").mkdir()


def occupy(k: Toy) -> None:
    k.out.mkdir()
    (k.out / "thesis.txt").write_text("x")


WQ_A, SHARED = "layers.0.attn.wq_a", "layers.0.ffn.shared_experts.w1"
EXPERT, WIDE = "layers.0.ffn.experts.0.w1", "layers.1.ffn.experts.1.w1"


def zero_block(k: Toy) -> None:
    """Make a block of a dense weight zero and give it the smallest scale: 0 * 2^-127 is exact."""
    n, columns = k.row(f"{WQ_A}.weight")[2]
    for row in range(min(n, 128)):
        k.poke(f"{WQ_A}.weight", row * columns, bytes(128))
    k.poke(f"{WQ_A}.scale", 0, b"\0")


def wide_row(k: Toy) -> None:
    """Spread the exponents of one row further than two shift bits reach."""
    k.flatten()
    k.poke(f"{WIDE}.scale", 0, bytes([127, 124, 121, 110]))


def stale_scale(k: Toy) -> None:
    """Make a block zero and leave it a huge scale: it must not count for its row."""
    k.flatten()
    k.poke(f"{WIDE}.weight", 16, bytes(16))
    k.poke(f"{WIDE}.scale", 1, bytes([252]))


def low_row(k: Toy) -> None:
    """Give a row scales so small that its channel scale would be an F32 subnormal."""
    k.flatten()
    k.poke(f"{EXPERT}.scale", 0, bytes(8))


def golden(k: Toy) -> None:
    """Store 0.5, 1.0, 6.0, -6.0 at the start of a row of zeros."""
    k.poke(f"{EXPERT}.weight", 0, bytes([0x21, 0xF7]) + bytes(126))
    k.poke(f"{EXPERT}.scale", 0, bytes([127] * 8))


def large_code(k: Toy) -> None:
    """Put code 6 under scale byte 254: 4 * 2^127 is no BF16 number."""
    k.poke(f"{EXPERT}.weight", 0, b"\x66")
    k.poke(f"{EXPERT}.scale", 0, b"\xfe")


def add_side_files(k: Toy) -> None:
    k.cfg(lambda c: c.update(future_field={"b": [1, 2], "a": "模型"}))
    k.put("NOTICE", "x")
    k.put("assets/a.png", b"\x89PNG")
    k.put("assets/deep/run.py", "raise SystemExit('never executed')")


# Lists of hashes ------------------------------------------------------------------------------------------

COMMIT, OTHER_COMMIT = "7" * 40, "9" * 40


def files_of(k: Toy) -> dict[str, Path]:
    """Return relative name -> path of every file, bookkeeping left out."""
    names = {p.relative_to(k.root).as_posix(): p for p in sorted(k.root.rglob("*")) if p.is_file()}
    return {n: p for n, p in names.items() if not n.startswith(".") and n != "SHA256SUMS"}


def etag(name: str, content: bytes) -> str:
    """Return what the Hub calls a file: SHA-256 of a large one, the git blob of a small one."""
    if name.endswith((".safetensors", "tokenizer.json")):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def sums(k: Toy) -> None:
    """Write what `sha256sum *` prints."""
    lines = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {n}\n" for n, p in files_of(k).items()]
    k.put("SHA256SUMS", "".join(lines))


def sums_of(*names: str) -> Change:
    def change(k: Toy) -> None:
        sums(k)
        lines = (k.root / "SHA256SUMS").read_text().splitlines(keepends=True)
        k.put("SHA256SUMS", "".join(x for x in lines if x.split()[1] in names))

    return change


def sums_in(style: Callable[[str, str], str], place: str = "list.txt") -> Change:
    def change(k: Toy) -> None:
        text = "".join(style(hashlib.sha256(p.read_bytes()).hexdigest(), n) for n, p in files_of(k).items())
        (k.root.parent / place).write_text(text)

    return change


def record(k: Toy, name: str, commit: str = COMMIT) -> None:
    """Leave what `hf download --local-dir` leaves about one file."""
    line = f"{commit}\n{etag(name, (k.root / name).read_bytes())}\n1785000000.0\n"
    k.put(f".cache/huggingface/download/{name}.metadata", line)


def records(k: Toy) -> None:
    for name in files_of(k):
        record(k, name)


def fetched_from_another_commit(k: Toy) -> None:
    """Fetch one shard of a sibling revision over the right one; the client's record follows."""
    reverse(k, 4)
    record(k, S(4), OTHER_COMMIT)


def reverse(k: Toy, number: int) -> None:
    """Give a shard other weights under the same header."""
    k.rewrite(k.S(number), lambda r: [(*r[:3], r[3][::-1])])


def sibling(number: int) -> Change:
    return lambda k: reverse(k, number)


def hashed_farm(k: Toy) -> None:
    """Turn the checkpoint into a cache whose blobs bear their true hashes."""
    blobs = k.root.parent / "blobs"
    blobs.mkdir()
    for name, path in files_of(k).items():
        blob = blobs / etag(name, path.read_bytes())
        shutil.move(path, blob)
        path.symlink_to(os.path.relpath(blob, path.parent))


def append(name: str, content: bytes) -> Change:
    return lambda k: k.put(name, (k.root / name).read_bytes() + content)


def json_list(k: Toy) -> None:
    rows = {
        n: {"bytes": p.stat().st_size, "sha256": hashlib.sha256(p.read_bytes()).hexdigest()}
        for n, p in files_of(k).items()
    }
    page = {"repo": "owner/name", "revision": COMMIT, "files": rows}
    (k.root.parent / "list.json").write_text(json.dumps(page))


# Values ---------------------------------------------------------------------------------------------------

_NOISE = np.random.default_rng(5).integers(0, 256, 4096, np.uint8).tobytes()


def fill(name: str, offset: int, content: bytes) -> Change:
    return lambda k: k.poke(name, offset, content)


def zero(name: str) -> Change:
    return lambda k: k.poke(name, 0, bytes(len(k.row(name)[3])))


def all_bytes(name: str, value: int) -> Change:
    return lambda k: k.poke(name, 0, bytes([value]) * len(k.row(name)[3]))


# What a result must look like -----------------------------------------------------------------------------


def no_links(k: Toy) -> None:
    links = [p for p in k.out.rglob("*") if p.is_symlink()]
    assert not links
    assert (k.out / "tokenizer.json").read_bytes() == (k.root / "tokenizer.json").read_bytes()


def side_files_kept(k: Toy) -> None:
    for name in ("NOTICE", "assets/a.png", "assets/deep/run.py", "tokenizer.json", "inference/config.json"):
        assert (k.out / name).read_bytes() == (k.root / name).read_bytes()
    before, after = k.read(CONFIG), k.result().read(CONFIG)
    assert list(after) == [*before, "dsv4convert"], "key order"
    assert after["future_field"] == {"b": [1, 2], "a": "模型"}


def vision_kept(k: Toy) -> None:
    """Every vision tensor, and nothing less, is there byte for byte."""
    before, after = k.tensors(), k.result().tensors()
    vision = [n for n in before if n.startswith(("vision.", "aligner.", "image_")) or n.endswith(".bias_vl")]
    assert len(vision) > 20
    assert all(after[n] == before[n] for n in vision)


def zero_sign_kept(k: Toy) -> None:
    assert k.result().row(f"{WQ_A}.weight")[3][:2] == b"\x00\x80", "BF16 -0.0"


def zero_block_decoded(k: Toy) -> None:
    assert k.result().row(f"{WQ_A}.weight")[3][:256] == bytes(256)


def golden_int8(k: Toy) -> None:
    out = k.result()
    # k = 0..3 are the low four nibbles of the first word, k = 64..67 the high four.
    assert out.row(f"{EXPERT}.weight_codes")[3][:4] == bytes([0x21, 0xF7, 0, 0])
    # The only block that counts is the first: shift 3 at bits 0 and 1, 2^(127-127-3) / 2 per row.
    assert out.row(f"{EXPERT}.weight_shift2")[3][:2] == bytes([3, 0])
    scale = np.frombuffer(out.row(f"{EXPERT}.channel_scale")[3], "<f4")[0]
    lut2 = np.array([1, 2, 12, -12])
    assert list((lut2 << 3) * scale) == [0.5, 1.0, 6.0, -6.0]


def golden_mxfp4(k: Toy) -> None:
    assert k.result().row(f"{EXPERT}.weight") == k.row(f"{EXPERT}.weight")
    assert k.result().row(f"{EXPERT}.scale") == k.row(f"{EXPERT}.scale")


def figures(k: Toy, name: str) -> dict[str, Any]:
    found: dict[str, Any] = k.result().read(MANIFEST)["tensors"][f"{name}.weight_codes"]["figures"]
    return found


def wide_row_reported(k: Toy) -> None:
    seen = figures(k, WIDE)
    assert seen["codes_changed"] > 0
    assert 0 < seen["relative_error"] < 1
    assert k.result().read(MANIFEST)["experts"]["exact_matrices"] == 6 * 4 * 3 - 1


def all_exact(k: Toy) -> None:
    totals = k.result().read(MANIFEST)["experts"]
    assert totals["codes_changed"] == 0 and totals["exact_matrices"] == totals["matrices"]


def same_as_pristine(k: Toy) -> None:
    """The output holds what the unchanged toy gives."""
    from dsv4convert.convert import convert

    place = k.root.parent / "pristine-out"
    convert(k.root.parent / "pristine", place)
    assert k.result().tensors() == Toy(place).tensors()


def keep_pristine(change: Change) -> Change:
    def changed(k: Toy) -> None:
        shutil.copytree(k.root, k.root.parent / "pristine")
        change(k)

    return changed


def modes_not_copied(k: Toy) -> None:
    umask = os.umask(0)
    os.umask(umask)
    modes = {p.name: p.stat().st_mode & 0o777 for p in k.out.rglob("*") if p.is_file()}
    assert set(modes.values()) == {0o666 & ~umask}, modes


def has_metadata(k: Toy) -> None:
    for path in k.out.glob("*.safetensors"):
        raw_bytes = path.read_bytes()
        assert b'"format":"pt"' in raw_bytes[:2000] and b'"dsv4convert.source"' in raw_bytes[:2000]


def exact_total(k: Toy) -> None:
    out = k.result()
    total = sum(len(r[3]) for r in out.tensors().values())
    assert out.read(INDEX)["metadata"] == {"total_size": total}


def pickles_left_behind(k: Toy) -> None:
    names = {p.name for p in k.out.iterdir()}
    assert not names & {"pytorch_model.bin", f"{S(1)}.bak", "consolidated.safetensors"}


def nothing_counted_twice(k: Toy) -> None:
    assert set(k.result().tensors()) == set(k.result().weight_map)


def sums_left_behind(k: Toy) -> None:
    """A list of the source says nothing about the result."""
    assert not (k.out / "SHA256SUMS").exists()


# The table ------------------------------------------------------------------------------------------------

_DSPARK = ("dspark_block_size", "dspark_noise_token_id", "dspark_target_layer_ids", "dspark_markov_rank")
_BAD_NAMES = {"up": "../secret.safetensors", "absolute": "/etc/hostname", "empty": "", "number": 7}
_BAD_NAMES |= {"nul": "x\0.safetensors", "drive": "C:x.safetensors", "list": ["a"], "pickle": "x.bin"}
_ODD_COUNTS = {"huge": 10**6, "absurd": 10**40, "negative": -1, "bool": True, "float": 3.0, "string": "3"}
_ODD_COUNTS |= {"null": None, "list": [3]}
_LISTED = ("original {src} --checksums {parent}/list.txt",)
_TO_KEEP, _TO_DECODE = "layers.0.attn_norm.weight", f"{WQ_A}.weight"
_FLIPS = {
    "kept": (_TO_KEEP, _TO_KEEP),
    "bf16": (_TO_DECODE, _TO_DECODE),
    "codes": (f"{EXPERT}.weight_codes", EXPERT),
    "shift": (f"{EXPERT}.weight_shift2", EXPERT),
    "channel-scale": (f"{EXPERT}.channel_scale", EXPERT),
}

# fmt: off
FAULTS: tuple[Fault, ...] = (
    # Files.
    Fault("F01-one-byte", "0731", cut(2, 1), "shard.truncated", (S(2),), SOURCE),
    Fault("F01-one-page", "0731", cut(2, 4096), "shard.truncated", (S(2),), SOURCE),
    Fault("F01-header-only", "0731", cut_to_header, "shard.truncated", (S(2),), SOURCE),
    Fault("F01-converted", "int8", cut(2, 1), "shard.truncated", (S(2),), OUTPUT),
    Fault("F02-one", "0731", remove(S(1)), "shard.missing", (S(1),), SOURCE),
    Fault("F02-all-named", "0731", remove(S(1), S(3)), "shard.missing", (S(1), S(3)), SOURCE),
    Fault("F02-converted", "int8", remove(S(3)), "shard.missing", (S(3),), OUTPUT),
    Fault("F04-pointer", "0731", replace_shard(1, LFS), "file.lfs-pointer", (S(1),), SOURCE),
    Fault("F04-html", "0731", replace_shard(2, HTML), "file.html-page", (S(2),), SOURCE),
    Fault("F04-tokenizer", "0731", put("tokenizer.json", LFS), "file.lfs-pointer", ("tokenizer.json",), SOURCE),
    Fault("F04-config", "0731", put(CONFIG, HTML), "file.html-page", (CONFIG,), SOURCE),
    Fault("F04-index", "0731", put(INDEX, LFS), "file.lfs-pointer", (INDEX,), SOURCE),
    Fault("F07-dangling", "0731", lose_blob, "file.dangling-link", (S(2),), SOURCE),
    Fault("F07-outside", "0731", link_outside, "file.outside-link", (S(2),), SOURCE),
    # Dtypes, names, shapes.
    Fault("F12-u8", "0731", retype("layers.0.attn.wkv.scale", "U8"), "unit.scale-dtype", ("layers.0.attn.wkv.scale",), SOURCE),
    Fault("F12-f32", "0731", lambda k: k.edit(f"{EXPERT}.scale", as_floats), "unit.scale-dtype", (f"{EXPERT}.scale",), SOURCE, frozenset({"index.total-size"})),
    Fault("F12-converted", "mxfp4", retype(f"{EXPERT}.scale", "U8"), "unit.scale-dtype", (f"{EXPERT}.scale",), OUTPUT),
    Fault("F13-a", "0731", experts_as_fp8, "unit.dtype", (f"{EXPERT}.weight",), SOURCE),
    Fault("F13-b-contradiction", "0731", cfg(expert_dtype="fp8"), "release.base", ("expert_dtype",), SOURCE),
    Fault("F13-base", "0731", as_base, "release.base", (f"{EXPERT}.weight",), SOURCE),
    Fault("F14-inv", "0731", rename(lambda n: n.replace(".scale", ".weight_scale_inv")), "name.scale-suffix", ("layers.0.attn.wkv.weight_scale_inv",), SOURCE),
    Fault("F14-ct", "0731", rename(lambda n: n.replace(".scale", ".weight_scale")), "name.scale-suffix", ("layers.0.attn.wkv.weight_scale",), SOURCE),
    Fault("F14-no-scale", "0731", drop(f"{WQ_A}.scale"), "unit.missing-scale", (f"{WQ_A}.weight",), SOURCE),
    Fault("F14-orphan", "0731", drop(f"{WQ_A}.weight"), "unit.orphan-scale", (f"{WQ_A}.scale",), SOURCE),
    Fault("F14-lost", "0731", drop(f"{WQ_A}.weight", f"{WQ_A}.scale"), "unit.missing-tensor", (f"{WQ_A}.weight",), SOURCE),
    Fault("F14-plain-lost", "0731", drop("norm.weight"), "unit.missing-tensor", ("norm.weight",), SOURCE),
    Fault("F16-floor", "ragged", resize("layers.0.attn.wkv.scale", (1, 2), 2), "unit.scale-grid", ("layers.0.attn.wkv.scale",), SOURCE, frozenset({"index.total-size"})),
    Fault("F16-padded", "ragged", resize("layers.1.attn.wkv.scale", (1, 4), 4), "unit.scale-grid", ("layers.1.attn.wkv.scale",), SOURCE, frozenset({"index.total-size"})),
    Fault("F36-unknown", "0731", retype(f"{EXPERT}.weight", "F8_E3M4"), "shard.dtype", (S(2),), SOURCE),
    Fault("F37-model", "0731", rename(lambda n: f"model.{n}"), "name.resaved", ("model.embed.weight",), SOURCE),
    # Index.
    Fault("F23-wrong-shard", "0731", mapped("norm.weight", S(1)), "index.wrong-shard", ("norm.weight",), SOURCE),
    Fault("F23-ghost", "0731", mapped("ghost.weight", S(2)), "index.ghost-tensor", ("ghost.weight",), SOURCE),
    Fault("F23-converted", "int8", mapped("ghost.weight", S(2)), "index.ghost-tensor", ("ghost.weight",), OUTPUT),
    Fault("F24-twice", "0731", put_twice, "tensor.twice", ("norm.weight",), SOURCE),
    Fault("F24-converted", "int8", put_twice, "tensor.twice", ("norm.weight",), OUTPUT),
    Fault("F24-unindexed", "0731", without_index_entry("norm.weight"), "index.unindexed-tensor", ("norm.weight",), SOURCE),
    Fault("F39-null-hides-nothing", "0731", both(idx(metadata={"total_size": None}), remove(S(2))), "shard.missing", (S(2),), SOURCE),
    Fault("F40-cut", "0731", cut_index, "index.not-json", (INDEX,), SOURCE),
    Fault("F40-gone", "0731", remove(INDEX), "index.missing", (INDEX,), SOURCE),
    Fault("F40-list", "0731", put(INDEX, "[]"), "index.not-json", (INDEX,), SOURCE),
    Fault("F40-empty-map", "0731", put(INDEX, '{"weight_map": {}}'), "index.not-json", (INDEX,), SOURCE),
    Fault("F40-no-map", "0731", put(INDEX, "{}"), "index.not-json", (INDEX,), SOURCE),
    Fault("F40-stale", "0731", without_index_entry(f"{WQ_A}.weight", f"{WQ_A}.scale"), "index.unindexed-tensor", (f"{WQ_A}.weight", f"{WQ_A}.scale"), SOURCE),
    Fault("F40-single-file", "0731", single_file, "dir.single-file", ("model.safetensors",), SOURCE),
    Fault("F41-overlap", "0731", raw(1, {"a": ("U8", [8], [0, 8]), "b": ("U8", [8], [4, 12])}, 12), "shard.offsets", (S(1),), SOURCE),
    Fault("F41-size", "0731", raw(2, {"a": ("F32", [8], [0, 8])}, 8), "shard.offsets", (S(2),), SOURCE),
    Fault("F41-far", "0731", raw(3, {"a": ("U8", [8], [1 << 40, (1 << 40) + 8])}, 8), "shard.offsets", (S(3),), SOURCE),
    Fault("F41-trailing", "0731", lambda k: k.S(4).write_bytes(k.S(4).read_bytes() + b"\0"), "shard.trailing-bytes", (S(4),), SOURCE),
    *(Fault(f"F43-{kind}", "0731", mapped("norm.weight", name), "index.bad-shard-name", (INDEX,), SOURCE) for kind, name in _BAD_NAMES.items()),
    Fault("F46-only-pickles", "0731", only_pickles, "dir.no-weights", ("0731",), SOURCE),
    # Config.
    Fault("F17-section-gone", "mxfp4", uncfg("quantization_config"), "config.quantization", ("quantization_config",), OUTPUT),
    Fault("F17-original-int8", "int8", restore_config, "config.section", ("dsv4convert",), OUTPUT),
    Fault("F17-original-mxfp4", "mxfp4", restore_config, "config.skip-list", ("quantization_config",), OUTPUT),
    Fault("F17-second-config", "mxfp4", put("hf_quant_config.json", '{"quantization": {"quant_algo": "NVFP4"}}'), "side.other-quantization", ("hf_quant_config.json",), OUTPUT),
    Fault("F17-source", "0731", put("hf_quant_config.json", "{}"), "side.other-quantization", ("hf_quant_config.json",), SOURCE),
    Fault("F17-method", "0731", quantization(quant_method="awq"), "config.quantization", ("quantization_config.quant_method",), SOURCE),
    Fault("F18-name-space", "int8", wrong_name_space, "config.skip-list", ("quantization_config.ignored_layers",), OUTPUT, frozenset({"config.skip-entry"})),
    Fault("F18-attention", "mxfp4", unskip("self_attn"), "config.skip-list", ("quantization_config.ignored_layers",), OUTPUT),
    Fault("F18-not-a-list", "mxfp4", quantization(ignored_layers="self_attn"), "config.skip-list", ("quantization_config.ignored_layers",), OUTPUT),
    Fault("F19-fp8-again", "mxfp4", restore_draft_projection, "unit.dtype", ("mtp.0.main_proj.weight",), OUTPUT),
    Fault("F19-not-skipped", "mxfp4", unskip("main_proj"), "config.skip-list", ("quantization_config.ignored_layers",), OUTPUT),
    Fault("F21-lost", "int8", remove("tokenizer.json"), "manifest.mismatch", ("tokenizer.json",), OUTPUT, frozenset({"side.missing"})),
    Fault("F26-no-fields", "vision", lambda k: k.cfg(lambda c: [c.pop(n) for n in list(c) if n.startswith("vision_")]), "config.vision", (CONFIG,), SOURCE),
    Fault("F26-no-tower", "vision", lambda k: k.drop(*[n for n in k.weight_map if n.startswith(("vision.", "aligner.", "image_")) or n.endswith(".bias_vl")]), "config.vision", (CONFIG,), SOURCE),
    *(Fault(f"C01-missing-{key}", "0731", uncfg(key), "config.dspark", (key,), SOURCE) for key in _DSPARK),
    Fault("C02-release-block-size", "release", cfg(dspark_block_size=4), "config.dspark", ("dspark_block_size",), {"original {src}": 1}),
    Fault("C02-release-targets", "release", cfg(dspark_target_layer_ids=[39, 41, 42]), "config.dspark", ("dspark_target_layer_ids",), {"original {src}": 1}),
    Fault("C03-target", "0731", cfg(dspark_target_layer_ids=[0, 1, 3]), "config.dspark", ("dspark_target_layer_ids",), SOURCE),
    Fault("C03-noise-token", "0731", cfg(dspark_noise_token_id=512), "config.dspark", ("dspark_noise_token_id",), SOURCE),
    Fault("C04-ratios", "0731", cfg(compress_ratios=[0, 0, 4, 0, 0]), "config.field", ("compress_ratios",), SOURCE),
    Fault("C05-one-more", "0731", cfg(num_hidden_layers=4), "config.field", ("compress_ratios",), SOURCE),
    *(Fault(f"C05-{kind}", "0731", cfg(num_hidden_layers=value), "config.field", ("num_hidden_layers",), SOURCE) for kind, value in _ODD_COUNTS.items()),
    Fault("C06-model-type", "0731", cfg(model_type="llama"), "config.unknown-model", (CONFIG,), SOURCE),
    Fault("C07-pruned", "0731", prune, "config.field", ("n_routed_experts",), SOURCE),
    Fault("C07-one-expert", "0731", drop(*(f"layers.1.ffn.experts.2.{w}.{p}" for w in ("w1", "w2", "w3") for p in ("weight", "scale"))), "unit.missing-tensor", ("layers.1.ffn.experts.2.w1.weight",), SOURCE),
    # Values; only reading the data shows them.
    Fault("F30-nan-dense", "0731", poke(f"{WQ_A}.scale", 0, 255), "value.scale-nan", (f"{WQ_A}.scale",), CONVERT_BOTH | READ),
    Fault("F30-nan-expert", "0731", poke(f"{EXPERT}.scale", 5, 255), "value.scale-nan", (f"{EXPERT}.scale",), CONVERT_BOTH | READ),
    Fault("F30-low", "0731", poke("layers.1.attn.wq_a.scale", 0, 0), "value.inexact", ("layers.1.attn.wq_a.weight",), CONVERT_BOTH | READ),
    Fault("F30-high", "0731", poke("mtp.0.attn.wq_a.scale", 0, 254), "value.inexact", ("mtp.0.attn.wq_a.weight",), CONVERT_BOTH | READ),
    Fault("F30-expert-high", "0731", large_code, "value.mxfp4-overflow", (f"{EXPERT}.weight",), CONVERT | READ),
    Fault("F30-expert-high-kept", "0731", large_code, "value.mxfp4-overflow", (f"{EXPERT}.scale",), {"convert {src} {out} --experts mxfp4": 3}),
    Fault("F30-low-row", "0731", low_row, "value.scale-range", (f"{EXPERT}.weight",), CONVERT | READ),
    Fault("F31-shared", "0731", poke(f"{SHARED}.weight", 3, 0x7F), "value.e4m3-nan", (f"{SHARED}.weight",), CONVERT_BOTH | READ),
    Fault("F31-draft", "0731", poke("mtp.0.main_proj.weight", 9, 0xFF), "value.e4m3-nan", ("mtp.0.main_proj.weight",), CONVERT_BOTH | READ),
    Fault("F31-table", "v4.1", poke("layers.1.engram.embed.weight", 9, 0xFF), "value.e4m3-nan", ("layers.1.engram.embed.weight",), CONVERT | READ),
    Fault("F34-error", "0731", wide_row, "value.relative-error", (WIDE,), {"convert {src} {out} --max-relative-error 1e-6": 3}),
    Fault("F34-share", "0731", wide_row, "value.exact-share", (WIDE,), {"convert {src} {out} --min-exact 1": 3}),
    Fault("F56-group", "int8", nothing, "tp.split", ("routed experts w2",), {"converted {src} --tp 2": 1, "plan {ref} --tp 2": 1}),
    Fault("F56-ragged", "ragged-int8", nothing, "tp.split", ("routed experts w2",), {"converted {src} --tp 2": 1}),
    Fault("V01-zeros", "0731", fill(f"{EXPERT}.weight", 4096, bytes(8192)), "value.hole", (f"{EXPERT}.weight",), READ),
    Fault("V01-tail", "0731", fill(f"{SHARED}.weight", 20480, b"\x38" * 12288), "value.hole", (f"{SHARED}.weight",), READ),
    Fault("V01-repeated", "0731", fill(f"{EXPERT}.weight", 0, _NOISE * 4), "value.hole", (f"{EXPERT}.weight",), READ),
    Fault("V01-bf16", "0731", fill("layers.2.attn.compressor.wkv.weight", 0, bytes(16384)), "value.hole", ("layers.2.attn.compressor.wkv.weight",), READ),
    Fault("V02-nan", "0731", poke("norm.weight", 6, 0xC0, 0x7F), "value.non-finite", ("norm.weight",), READ),
    Fault("V02-infinite", "0731", poke("layers.2.ffn.gate.bias", 4, 0, 0, 0x80, 0xFF), "value.non-finite", ("layers.2.ffn.gate.bias",), READ),
    Fault("V03-too-large", "0731", poke("layers.0.ffn.gate.tid2eid", 8, 4), "value.expert-id", ("layers.0.ffn.gate.tid2eid",), READ),
    Fault("V03-negative", "0731", poke("layers.0.ffn.gate.tid2eid", 8, *[255] * 8), "value.expert-id", ("layers.0.ffn.gate.tid2eid",), READ),
    # Hashes.
    Fault("H01-data", "0731", both(sums, flip("layers.1.attn.wq_a.weight", 77)), "content.hash", (S(3),), HASHED),
    Fault("H01-index", "0731", both(sums, append(INDEX, b" ")), "content.hash", (INDEX,), HASHED),
    Fault("H01-config", "0731", both(sums, cfg(rms_norm_eps=1e-5)), "content.hash", (CONFIG,), HASHED),
    Fault("H01-side-file", "0731", both(sums, append("inference/config.json", b"\n")), "content.hash", ("inference/config.json",), HASHED),
    Fault("H02-sibling-shard", "0731", both(sums, sibling(4)), "content.hash", (S(4),), HASHED),
    Fault("H03-large", "0731", both(records, flip("norm.weight")), "content.hash", (S(5),), HASHED),
    Fault("H03-small", "0731", both(records, append("generation_config.json", b" ")), "content.hash", ("generation_config.json",), HASHED),
    Fault("H04-blob", "0731", both(hashed_farm, flip("layers.0.attn.wq_a.weight")), "content.hash", (S(2),), HASHED),
    Fault("H05-disagree", "0731", both(sums, records, fetched_from_another_commit), "content.sources", (S(4),), HASHED, frozenset({"content.mixed-revisions"})),
    Fault("H06-nowhere", "0731", nothing, "content.list-file", ("nowhere",), {"original {src} --checksums {src}/nowhere": 3}),
    Fault("H06-no-list", "0731", nothing, "content.list-file", ("README.md",), {"original {src} --checksums {src}/README.md": 3}),
    Fault("H06-other-json", "0731", nothing, "content.list-file", (CONFIG,), {"original {src} --checksums {src}/config.json": 3}),
    Fault("H07-no-commit", "0731", nothing, "online.unknown-revision", ("REPO@COMMIT",), {"original {src} --online": 3}),
    # Source and destination.
    Fault("D01-occupied", "0731", occupy, "dst.not-empty", ("out",), CONVERT),
    Fault("D02-same", "0731", nothing, "dst.inside-source", ("0731",), {"convert {src} {src}": 3}),
    Fault("D02-inside", "0731", nothing, "dst.inside-source", ("made",), {"convert {src} {src}/made": 3}),
    Fault("D02-around", "0731", nothing, "dst.inside-source", ("work",), {"convert {src} {parent}": 3}),
    Fault("D03-other-plan", "0731", begun(), "dst.other-plan", ("out",), CONVERT),
    Fault("D03-damaged", "0731", begun(layout=None), "dst.other-plan", ("out",), CONVERT),
    Fault("D04-unfinished", "int8", unfinished, "dst.unfinished", ("int8",), OUTPUT),
    Fault("D05-int8-source", "int8", nothing, "src.converted", ("int8",), {"convert {src} {out}": 3, "plan {src}": 3}),
    Fault("D06-original-of-int8", "int8", nothing, "src.not-official", ("int8",), {"original {src}": 1}),
    Fault("D06-original-of-mxfp4", "mxfp4", nothing, "src.not-official", ("mxfp4",), {"original {src}": 1}),
    Fault("D06-converted-of-original", "0731", nothing, "dst.not-converted", ("0731",), OUTPUT, frozenset({"manifest.missing"})),
    Fault("D07-nowhere", "0731", nothing, "dir.not-found", ("{src}/nowhere",), {"original {src}/nowhere": 3}),
    # Manifest and contents.
    Fault("M01-tensor-gone", "int8", manifest(lambda m: m["tensors"].pop("norm.weight")), "manifest.mismatch", ("norm.weight",), OUTPUT),
    Fault("M01-size", "int8", manifest(lambda m: m["output"]["shards"][S(2)].update(bytes=7)), "manifest.mismatch", (S(2),), OUTPUT),
    Fault("M01-layout", "int8", manifest(lambda m: m["plan"].update(layout="mxfp4")), "manifest.mismatch", (MANIFEST,), OUTPUT),
    Fault("M02-not-json", "int8", put(MANIFEST, "{"), "manifest.not-json", (MANIFEST,), OUTPUT),
    Fault("M02-schema", "int8", manifest(lambda m: m.update(schema="dsv4convert-manifest-9")), "manifest.not-json", (MANIFEST,), OUTPUT),
    Fault("M02-section", "int8", manifest(lambda m: m["output"].pop("files_sha256")), "manifest.not-json", (MANIFEST,), OUTPUT),
    Fault("M03-side-file", "int8", put("tokenizer.json", "{}"), "content.hash", ("tokenizer.json",), OUTPUT),
    Fault("M03-config", "int8", cfg(rms_norm_eps=1e-5), "content.hash", (CONFIG,), OUTPUT),
    *(Fault(f"M04-{kind}", "int8", flip(name), "reference.bytes", (where,), PROVED) for kind, (name, where) in _FLIPS.items()),
    *(Fault(f"M05-{kind}", "int8", flip(name), "content.hash", (name,), {"converted {src} --read-data": 1}) for kind, (name, _) in _FLIPS.items()),
    Fault("M04-kept-scale", "mxfp4", flip(f"{EXPERT}.scale"), "reference.bytes", (f"{EXPERT}.scale",), PROVED),
    Fault("M06-other-model", "int8", nothing, "reference.other", (S(1),), {"converted {src} --reference {other}": 1}),
)

NEIGHBOURS: tuple[Neighbour, ...] = (
    Neighbour("F01-leftover", "0731", put(".cache/huggingface/download/x.incomplete", "1"), SOUND, frozenset({"file.incomplete"})),
    Neighbour("F02-index-order", "0731", lambda k: k.idx(lambda o: o.update(weight_map=dict(reversed(o["weight_map"].items())))), SOUND),
    Neighbour("F04-markup-in-text", "0731", both(put("README.md", HTML), put("docs/lfs.txt", b"see " + LFS)), SOUND),
    Neighbour("F05-no-helpers", "0731", remove("encoding", "inference"), SOUND, frozenset({"side.missing"})),
    Neighbour("F05-no-helpers-convert", "0731", remove("encoding", "inference"), MADE, frozenset({"side.missing"})),
    Neighbour("F07-farm", "0731", link_farm, (*SOUND, *MADE), check=no_links),
    Neighbour("F12-byte-120", "0731", poke(f"{WQ_A}.scale", 0, 120), (*SOUND, *MADE)),
    Neighbour("F13-field-missing", "0731", uncfg("expert_dtype"), (*SOUND, *MADE)),
    Neighbour("F14-other-shard", "0731", keep_pristine(lambda k: k.move(f"{WQ_A}.scale", k.S(6))), (*SOUND, *MADE), check=same_as_pristine),
    Neighbour("F14-expert-scale-elsewhere", "0731", keep_pristine(lambda k: k.move(f"{EXPERT}.scale", k.S(1))), (*SOUND, *MADE), check=same_as_pristine),
    Neighbour("F14-kept-scale-elsewhere", "0731", lambda k: k.move(f"{EXPERT}.scale", k.S(1)), MADE_MXFP4),
    Neighbour("F16-ragged", "ragged", nothing, (*SOUND, *MADE)),
    Neighbour("F16-ragged-mxfp4", "ragged", nothing, MADE_MXFP4),
    Neighbour("F16-v4.1", "v4.1", nothing, (*SOUND, *MADE)),
    Neighbour("F17-int8", "int8", nothing, VALID),
    Neighbour("F17-foreign", "mxfp4", forget_origin, VALID, frozenset({"manifest.missing"})),
    Neighbour("F17-foreign-no-section", "mxfp4", both(forget_origin, uncfg("dsv4convert")), VALID, frozenset({"manifest.missing"})),
    Neighbour("F18-one-list", "mxfp4", both(forget_origin, unskip()), VALID, frozenset({"manifest.missing"})),
    Neighbour("F18-dead-entry", "mxfp4", both(forget_origin, unskip(), lambda k: k.cfg(lambda c: c["quantization_config"]["ignored_layers"].append("wqkv"))), VALID, frozenset({"manifest.missing", "config.skip-entry"})),
    Neighbour("F19-preview", "preview", nothing, (*SOUND, *MADE)),
    Neighbour("F21-kept", "0731", add_side_files, (*SOUND, *MADE), check=side_files_kept),
    Neighbour("F23-pair-moved", "0731", lambda k: k.move("norm.weight", k.S(1)), (*SOUND, *MADE)),
    Neighbour("F24-once", "0731", nothing, MADE, check=nothing_counted_twice),
    Neighbour("F26-kept", "vision", nothing, (*SOUND, *MADE), check=vision_kept),
    Neighbour("F26-kept-mxfp4", "vision", nothing, MADE_MXFP4, check=vision_kept),
    Neighbour("F26-kept-v4.1", "v4.1", nothing, MADE_MXFP4, check=vision_kept),
    Neighbour("F28-modes", "0731", nothing, MADE, check=modes_not_copied),
    Neighbour("F30-low-but-zero", "0731", zero_block, MADE, check=zero_block_decoded),
    Neighbour("F30-border-low", "0731", poke(f"{WQ_A}.scale", 0, 3), MADE),
    Neighbour("F30-border-high", "0731", poke(f"{WQ_A}.scale", 0, 246), MADE),
    Neighbour("F30-expert-byte-0", "0731", poke(f"{EXPERT}.scale", 0, 0), MADE),
    Neighbour("F31-negative-zero", "0731", poke(f"{WQ_A}.weight", 0, 0x80), MADE, check=zero_sign_kept),
    Neighbour("F31-bf16-nan", "0731", poke("norm.weight", 0, 0xC0, 0x7F), MADE),
    Neighbour("F32-golden", "0731", golden, MADE, check=golden_int8),
    Neighbour("F32-golden-kept", "0731", golden, MADE_MXFP4, check=golden_mxfp4),
    Neighbour("F34-wide", "0731", wide_row, MADE, check=wide_row_reported),
    Neighbour("F34-stale-scale", "0731", stale_scale, ("convert {src} {out} --min-exact 1 --max-relative-error 0", MADE[1]), check=all_exact),
    Neighbour("F34-limits-met", "0731", wide_row, ("convert {src} {out} --min-exact 0.5 --max-relative-error 0.9", MADE[1])),
    Neighbour("F36-f4", "0731", keep_pristine(experts_as_f4), (*SOUND, *MADE), check=same_as_pristine),
    Neighbour("F36-f4-kept", "0731", experts_as_f4, MADE_MXFP4),
    Neighbour("F36-u8", "0731", keep_pristine(lambda k: k.remap(lambda r: [(r[0], "U8", *r[2:])] if is_expert(r[0]) else [r])), (*SOUND, *MADE), check=same_as_pristine),
    Neighbour("F37-official", "preview", nothing, SOUND),
    Neighbour("F39-wrong", "0731", idx(metadata={"total_size": 7}), SOUND, frozenset({"index.total-size"})),
    Neighbour("F39-null", "0731", idx(metadata={"total_size": None}), SOUND),
    Neighbour("F39-absent", "0731", lambda k: k.idx(lambda o: o.pop("metadata")), (*SOUND, *MADE), check=exact_total),
    Neighbour("F40-extra-key", "0731", idx(producer="x"), SOUND),
    Neighbour("F41-row-order", "0731", lambda k: write_shard(k.S(2), reversed(rows(k.S(2)))), (*SOUND, *MADE)),
    Neighbour("F43-odd-name", "0731", odd_names, (*SOUND, *MADE)),
    Neighbour("F46-leftovers", "0731", leave_backups, SOUND, frozenset({"file.pickle", "file.stray"})),
    Neighbour("F46-not-copied", "0731", leave_backups, MADE, check=pickles_left_behind),
    Neighbour("F50-bom", "0731", lambda k: k.put(CONFIG, b"\xef\xbb\xbf" + (k.root / CONFIG).read_bytes()), (*SOUND, *MADE)),
    Neighbour("F51-read-only", "0731", read_only, MADE, check=modes_not_copied),
    Neighbour("F52-added", "0731", nothing, MADE, check=has_metadata),
    Neighbour("F52-foreign-without", "mxfp4", both(forget_origin, without_metadata), VALID, frozenset({"manifest.missing", "shard.metadata"})),
    Neighbour("F56-block", "mxfp4", nothing, ("converted {src} --tp 2", "plan {ref} --experts mxfp4 --tp 2")),
    Neighbour("F56-one", "int8", nothing, ("converted {src} --tp 1", "plan {ref} --tp 1")),
    Neighbour("C01-no-draft-fields", "preview", nothing, SOUND),
    Neighbour("C02-derivative", "0731", cfg(dspark_block_size=4), SOUND),
    Neighbour("C02-release", "release", nothing, SOUND),
    Neighbour("C03-last-token", "0731", cfg(dspark_noise_token_id=511), SOUND),
    Neighbour("C04-unknown-field", "0731", cfg(future_ratios=[1]), SOUND),
    Neighbour("C05-three", "0731", cfg(num_hidden_layers=3), SOUND),
    Neighbour("C06-class-name", "0731", cfg(architectures=["Whatever"]), SOUND),
    Neighbour("C07-pruned", "0731", both(prune, cfg(n_routed_experts=2)), (*SOUND, *MADE)),
    Neighbour("V01-rows", "0731", both(fill(f"{EXPERT}.weight", 128, bytes(256)), fill(f"{SHARED}.weight", 256, bytes(512))), LOOKED_AT),
    Neighbour("V01-small", "0731", both(zero("norm.weight"), zero("layers.2.ffn.gate.bias")), LOOKED_AT),
    Neighbour("V01-equal-scales", "0731", lambda k: k.flatten(), LOOKED_AT),
    Neighbour("V01-unused-ids", "0731", fill("embed.weight", 0, bytes(16384)), LOOKED_AT, frozenset({"value.unused-rows"})),
    Neighbour("V01-ragged", "ragged", nothing, LOOKED_AT),
    Neighbour("V01-v4.1", "v4.1", nothing, LOOKED_AT),
    Neighbour("V01-vision", "vision", nothing, ("original {src} --read-data 5",)),
    Neighbour("V02-largest", "0731", both(poke("norm.weight", 6, 0x7F, 0x7F), poke("layers.2.ffn.gate.bias", 4, 255, 255, 0x7F, 0xFF)), LOOKED_AT),
    Neighbour("V03-last-expert", "0731", poke("layers.0.ffn.gate.tid2eid", 8, 3), LOOKED_AT),
    Neighbour("V04-window", "0731", both(poke(f"{WQ_A}.scale", 0, 3), poke(f"{EXPERT}.scale", 0, 0)), LOOKED_AT),
    Neighbour("V04-zero-block", "0731", zero_block, LOOKED_AT),
    Neighbour("V05-far-scales", "0731", all_bytes(f"{WQ_A}.scale", 60), LOOKED_AT, frozenset({"value.scale-statistics"})),
    Neighbour("V05-border", "0731", all_bytes(f"{WQ_A}.scale", 90), LOOKED_AT),
    Neighbour("H01-intact", "0731", sums, VERIFIED),
    Neighbour("H01-flip-unseen", "0731", both(sums, flip("norm.weight")), SOUND),
    Neighbour("H01-newer", "0731", both(sums, lambda k: os.utime(k.S(3))), VERIFIED),
    Neighbour("H01-shards-only", "0731", both(sums_of(*(S(n) for n in range(1, 9))), cfg(rms_norm_eps=1e-5)), VERIFIED),
    Neighbour("H01-absent", "0731", both(sums, remove("LICENSE")), VERIFIED, frozenset({"content.absent"})),
    Neighbour("H01-line-broken", "0731", both(sums, append("SHA256SUMS", b"and so on\n")), VERIFIED, frozenset({"content.list"})),
    Neighbour("H02-none", "0731", nothing, VERIFIED, frozenset({"content.unverified"})),
    Neighbour("H02-not-copied", "0731", sums, MADE, check=sums_left_behind),
    Neighbour("H03-records", "0731", records, VERIFIED),
    Neighbour("H03-torn-record", "0731", both(sums, put(f".cache/huggingface/download/{S(1)}.metadata", b"7777")), VERIFIED, frozenset({"content.list"})),
    Neighbour("H04-farm", "0731", hashed_farm, VERIFIED),
    Neighbour("H05-agree", "0731", both(sums, records), VERIFIED),
    Neighbour("H05-newer-readme", "0731", both(records, lambda k: record(k, "README.md", OTHER_COMMIT)), VERIFIED),
    Neighbour("H06-bsd", "0731", sums_in(lambda h, n: f"SHA256 ({n}) = {h.upper()}\r\n"), _LISTED),
    Neighbour("H06-from-above", "0731", sums_in(lambda h, n: f"{h} *0731/{n}\n"), _LISTED),
    Neighbour("H06-dotted", "0731", sums_in(lambda h, n: f"# made by hand\n\n{h}\t./{n}\n"), _LISTED),
    Neighbour("H06-json", "0731", json_list, ("original {src} --checksums {parent}/list.json",)),
    Neighbour("H07-offline", "0731", records, VERIFIED),
    Neighbour("D01-empty", "0731", lambda k: k.out.mkdir(), MADE),
    Neighbour("D02-sibling", "0731", nothing, ("convert {src} {src}-int8",)),
    Neighbour("D03-first-moment", "0731", lambda k: (k.out / ".dsv4convert").mkdir(parents=True), MADE),
    Neighbour("D04-again", "0731", nothing, (MADE[0], *MADE)),
    Neighbour("D05-mxfp4-source", "mxfp4", nothing, (MADE[0], MADE[1])),
    Neighbour("D06-both", "0731", nothing, (*SOUND, *MADE)),
    Neighbour("D07-trailing-slash", "0731", nothing, ("original {src}/",)),
    Neighbour("M01-intact", "int8", nothing, ("converted {src} --read-data",)),
    Neighbour("M02-run-section", "int8", manifest(lambda m: m.update(run={})), VALID),
    Neighbour("M03-new-file", "int8", put("NOTES.md", "mine"), VALID),
    Neighbour("M04-intact", "int8", nothing, ("converted {src} --reference {ref} --read-data",)),
    Neighbour("M05-sample", "int8", nothing, ("converted {src} --read-data 10",)),
    Neighbour("M06-same-headers", "int8", nothing, ("converted {src} --reference {ref}",)),
)
# fmt: on
