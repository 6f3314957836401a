"""Directories: one fault in, exactly one finding out; legal variants give none."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv4convert import opening as module
from dsv4convert.checkpoint import CONFIG, INDEX, ShardReader, open_checkpoint
from dsv4convert.errors import EnvironmentFault, Refused, errors_of
from tests.shardfile import row, rows, write_shard

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n"
HTML = b"<!DOCTYPE html><html><title>403</title></html>"
COMMIT = "9e165c30e2704aec5d9d593cce3eebd58bbef1cb"


class Kit:
    """A small sound checkpoint of three shards and the ways to break it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True)
        parts = [
            [row("embed.weight", fill=1)],
            [row(f"layers.0.w{i}", "I8", (4, 4), i) for i in range(6)],
            [row("norm.weight", fill=3), row("head.weight", fill=4)],
        ]
        for i, part in enumerate(parts, 1):
            write_shard(self.shard(i), part)
        weight_map = {r[0]: self.shard(i).name for i, part in enumerate(parts, 1) for r in part}
        total = sum(len(r[3]) for part in parts for r in part)
        self.write_json(INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        self.write_json(CONFIG, {"z": 1, "a": 2})
        for name in ("tokenizer.json", "LICENSE", "encoding/tests/x.json", "inference/config.json"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(b"{}")

    def shard(self, i: int) -> Path:
        return self.root / f"model-{i:05d}-of-00003.safetensors"

    def write_json(self, name: str, value: Any) -> None:
        (self.root / name).write_text(json.dumps(value))

    def edit(self, name: str, change: Callable[[Any], object]) -> None:
        value = json.loads((self.root / name).read_text())
        change(value)
        self.write_json(name, value)

    def map(self, **changes: Any) -> None:
        self.edit(
            INDEX, lambda o: o["weight_map"].update({k.replace("__", "."): v for k, v in changes.items()})
        )

    def add(self, i: int, *more: tuple[str, str, tuple[int, ...], bytes]) -> None:
        write_shard(self.shard(i), [*rows(self.shard(i)), *more])

    def put(self, name: str, data: bytes = b"x") -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_bytes(data)

    def link(self, name: str, target: str | Path) -> None:
        (self.root / name).unlink(missing_ok=True)
        (self.root / name).symlink_to(target)

    def rename(self, i: int, new: str) -> None:
        old = self.shard(i).name
        self.shard(i).rename(self.root / new)
        text = (self.root / INDEX).read_text()
        (self.root / INDEX).write_text(text.replace(old, new))

    def codes(self) -> list[str]:
        return [f.code for f in open_checkpoint(self.root).findings]


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return Kit(tmp_path / "m")


def cut(k: Kit, name: str, size: int) -> None:
    os.truncate(k.root / name, (k.root / name).stat().st_size - size)


def replace(k: Kit, name: str, old: str, new: str) -> None:
    text = (k.root / name).read_text()
    assert old in text
    (k.root / name).write_text(text.replace(old, new, 1))


def swap(k: Kit) -> None:
    one, two = k.shard(1).read_bytes(), k.shard(3).read_bytes()
    k.shard(1).write_bytes(two)
    k.shard(3).write_bytes(one)


def drop_index(k: Kit) -> None:
    (k.root / INDEX).unlink()


def drop_from_index(k: Kit, *names: str) -> None:
    k.edit(INDEX, lambda o: [o["weight_map"].pop(n) for n in names])


def single(k: Kit) -> None:
    for path in (k.shard(1), k.shard(2), k.root / INDEX):
        path.unlink()
    k.shard(3).rename(k.root / "model.safetensors")


def only_pickles(k: Kit) -> None:
    for i in (1, 2, 3):
        k.shard(i).unlink()
    drop_index(k)
    k.put("pytorch_model.bin", pickle.dumps({"a": 1}))


def outside(k: Kit, name: str) -> None:
    shutil.move(k.root / name, k.root.parent / "elsewhere")
    k.link(name, k.root.parent / "elsewhere")


def blob(k: Kit, name: str, digits: str = "a" * 64) -> None:
    blobs = k.root.parent / "blobs"
    blobs.mkdir(exist_ok=True)
    shutil.move(k.root / name, blobs / digits)
    k.link(name, f"../blobs/{digits}")


def fifo(k: Kit, name: str) -> None:
    (k.root / name).unlink(missing_ok=True)
    os.mkfifo(k.root / name)


def folder(k: Kit, name: str) -> None:
    (k.root / name).unlink()
    (k.root / name).mkdir()


LAYER = tuple(f"layers.0.w{i}" for i in range(6))
SPLIT_TOTAL = "model-00003-of-00004.safetensors"

# fault -> (how to break it, the findings it must cause); one fault has one code, two faults are said so
FAULTS: dict[str, tuple[Callable[[Kit], object], list[str]]] = {
    "config-missing": (lambda k: (k.root / CONFIG).unlink(), ["config.missing"]),
    "config-cut": (lambda k: cut(k, CONFIG, 1), ["config.not-json"]),
    "config-list": (lambda k: k.put(CONFIG, b"[]"), ["config.not-json"]),
    "config-empty": (lambda k: k.put(CONFIG, b""), ["config.not-json"]),
    "config-zeros": (lambda k: k.put(CONFIG, bytes(100)), ["config.not-json"]),
    "config-nan": (lambda k: k.put(CONFIG, b'{"a": NaN}'), ["config.not-json"]),
    "config-deep": (lambda k: k.put(CONFIG, b"[" * 100_000), ["config.not-json"]),
    "config-twice": (lambda k: k.put(CONFIG, b'{"a": 1, "a": 1}'), ["index.duplicate-key"]),
    "config-twice-inside": (lambda k: k.put(CONFIG, b'{"q": {"a": 1, "a": 2}}'), ["index.duplicate-key"]),
    "config-lfs": (lambda k: k.put(CONFIG, LFS), ["file.lfs-pointer"]),
    "config-html": (lambda k: k.put(CONFIG, HTML), ["file.html-page"]),
    "config-fifo": (lambda k: fifo(k, CONFIG), ["file.not-regular"]),
    "config-folder": (lambda k: folder(k, CONFIG), ["file.not-regular"]),
    "config-dangling": (lambda k: k.link(CONFIG, "gone"), ["file.dangling-link"]),
    "index-missing": (drop_index, ["index.missing"]),
    "index-cut": (lambda k: cut(k, INDEX, 20), ["index.not-json"]),
    "index-list": (lambda k: k.put(INDEX, b"[]"), ["index.not-json"]),
    "index-no-map": (lambda k: k.put(INDEX, b"{}"), ["index.not-json"]),
    "index-map-list": (lambda k: k.put(INDEX, b'{"weight_map": []}'), ["index.not-json"]),
    "index-map-empty": (lambda k: k.put(INDEX, b'{"weight_map": {}}'), ["index.not-json"]),
    "index-lfs": (lambda k: k.put(INDEX, LFS), ["file.lfs-pointer"]),
    "index-html": (lambda k: k.put(INDEX, HTML), ["file.html-page"]),
    "index-fifo": (lambda k: fifo(k, INDEX), ["file.not-regular"]),
    "index-folder": (lambda k: folder(k, INDEX), ["file.not-regular"]),
    "index-outside": (lambda k: outside(k, INDEX), ["file.outside-link"]),
    "index-twice": (
        lambda k: replace(k, INDEX, '"norm.weight"', '"norm.weight": "x.safetensors", "norm.weight"'),
        ["index.duplicate-key"],
    ),
    "name-parent": (lambda k: k.map(a="../secret.safetensors"), ["index.bad-shard-name"]),
    "name-absolute": (lambda k: k.map(a="/etc/x.safetensors"), ["index.bad-shard-name"]),
    "name-empty": (lambda k: k.map(a=""), ["index.bad-shard-name"]),
    "name-number": (lambda k: k.map(a=7), ["index.bad-shard-name"]),
    "name-list": (lambda k: k.map(a=["x"]), ["index.bad-shard-name"]),
    "name-null": (lambda k: k.map(a=None), ["index.bad-shard-name"]),
    "name-nul": (lambda k: k.map(a="x\0.safetensors"), ["index.bad-shard-name"]),
    "name-backslash": (lambda k: k.map(a="..\\x.safetensors"), ["index.bad-shard-name"]),
    "name-drive": (lambda k: k.map(a="C:x.safetensors"), ["index.bad-shard-name"]),
    "name-dot": (lambda k: k.map(a=".x.safetensors"), ["index.bad-shard-name"]),
    "name-surrogate": (lambda k: k.map(a="x\ud800.safetensors"), ["index.bad-shard-name"]),
    "name-pickle": (lambda k: k.map(a="pytorch_model.bin"), ["index.bad-shard-name"]),
    "name-long": (lambda k: k.map(a="x" * 300 + ".safetensors"), ["index.bad-shard-name"]),
    "name-replaces": (lambda k: k.map(norm__weight="../x"), ["index.bad-shard-name"]),
    "name-two-tensors": (lambda k: k.map(a="../x", b="../x"), ["index.bad-shard-name"]),
    "name-two-values": (lambda k: k.map(a="../x", b="/y"), ["index.bad-shard-name"] * 2),
    "shard-missing": (lambda k: k.shard(2).unlink(), ["shard.missing"]),
    "shard-missing-first": (lambda k: k.shard(1).unlink(), ["shard.missing"]),
    "shard-missing-two": (lambda k: [k.shard(i).unlink() for i in (1, 3)], ["shard.missing"] * 2),
    "shard-dangling": (lambda k: k.link(k.shard(2).name, "../blobs/gone"), ["file.dangling-link"]),
    "shard-loop": (lambda k: k.link(k.shard(2).name, k.shard(2).name), ["file.dangling-link"]),
    "shard-outside": (lambda k: outside(k, k.shard(2).name), ["file.outside-link"]),
    "shard-blob-name-short": (lambda k: blob(k, k.shard(2).name, "a" * 39), ["file.outside-link"]),
    "shard-fifo": (lambda k: fifo(k, k.shard(2).name), ["file.not-regular"]),
    "shard-folder": (lambda k: folder(k, k.shard(2).name), ["file.not-regular"]),
    "shard-cut": (lambda k: cut(k, k.shard(2).name, 1), ["shard.truncated"]),
    "shard-cut-to-header": (lambda k: cut(k, k.shard(2).name, 96), ["shard.truncated"]),
    "shard-cut-in-header": (lambda k: os.truncate(k.shard(2), 100), ["shard.truncated"]),
    "shard-empty": (lambda k: k.put(k.shard(2).name, b""), ["shard.truncated"]),
    "shard-longer": (
        lambda k: k.put(k.shard(2).name, k.shard(2).read_bytes() + b"x"),
        ["shard.trailing-bytes"],
    ),
    "shard-lfs": (lambda k: k.put(k.shard(1).name, LFS), ["file.lfs-pointer"]),
    "shard-html": (lambda k: k.put(k.shard(2).name, HTML), ["file.html-page"]),
    "shard-number-zero": (lambda k: k.rename(3, "model-00000-of-00003.safetensors"), ["shard.numbering"]),
    "shard-number-high": (lambda k: k.rename(3, "model-00004-of-00003.safetensors"), ["shard.numbering"]),
    "shard-totals-differ": (lambda k: k.rename(3, SPLIT_TOTAL), ["shard.numbering"]),
    "shard-unnamed-present": (lambda k: drop_from_index(k, *LAYER), ["shard.numbering"]),
    "wrong-shard": (lambda k: k.map(norm__weight=k.shard(2).name), ["index.wrong-shard"]),
    "wrong-shard-all": (lambda k: k.map(**{n: k.shard(1).name for n in LAYER[1:]}), ["index.wrong-shard"]),
    "wrong-shard-swapped": (swap, ["index.wrong-shard"] * 3),
    "ghost": (lambda k: k.map(ghost=k.shard(2).name), ["index.ghost-tensor"]),
    "ghost-many": (lambda k: k.map(**{f"g{i}": k.shard(2).name for i in range(99)}), ["index.ghost-tensor"]),
    "unindexed": (lambda k: drop_from_index(k, "norm.weight"), ["index.unindexed-tensor"]),
    "unindexed-many": (lambda k: drop_from_index(k, *LAYER[1:]), ["index.unindexed-tensor"]),
    "twice": (lambda k: k.add(1, row("norm.weight", fill=9)), ["tensor.twice"]),
    "twice-many": (lambda k: k.add(1, *rows(k.shard(2))), ["tensor.twice"]),
    "twice-unindexed": (lambda k: [k.add(i, row("x")) for i in (1, 2)], ["tensor.twice"]),
    "total-wrong": (
        lambda k: k.edit(INDEX, lambda o: o["metadata"].update(total_size=1)),
        ["index.total-size"],
    ),
    "total-text": (
        lambda k: k.edit(INDEX, lambda o: o["metadata"].update(total_size="1")),
        ["index.total-size"],
    ),
    "total-null-and-missing-shard": (
        lambda k: (k.edit(INDEX, lambda o: o["metadata"].update(total_size=None)), k.shard(2).unlink()),
        ["shard.missing"],
    ),
    "single-file": (single, ["dir.single-file"]),
    "only-pickles": (only_pickles, ["dir.no-weights"]),
    "stray": (lambda k: shutil.copy(k.shard(1), k.root / "consolidated.safetensors"), ["file.stray"]),
    "stray-backup": (lambda k: shutil.copy(k.shard(1), f"{k.shard(1)}.bak"), ["file.stray"]),
    "stray-below": (lambda k: k.put("old/model.safetensors"), ["file.stray"]),
    "stray-gguf": (lambda k: k.put("model-Q4.gguf"), ["file.stray"]),
    "pickle": (lambda k: k.put("pytorch_model.bin"), ["file.pickle"]),
    "pickle-below": (lambda k: k.put("training/optimizer.PT"), ["file.pickle"]),
    "incomplete": (lambda k: k.put(".cache/huggingface/download/x.incomplete"), ["file.incomplete"]),
    "incomplete-many": (
        lambda k: [k.put(f".cache/huggingface/download/{i}.incomplete") for i in range(50)],
        ["file.incomplete"],
    ),
    "incomplete-beside": (
        lambda k: k.put("model-00001-of-00003.safetensors.incomplete"),
        ["file.incomplete"],
    ),
    "incomplete-modelscope": (lambda k: k.put("._____temp/x.safetensors"), ["file.incomplete"]),
    "quantization": (lambda k: k.put("hf_quant_config.json", b"{}"), ["side.other-quantization"]),
    "side-lfs": (lambda k: k.put("tokenizer.json", LFS), ["file.lfs-pointer"]),
    "side-html": (lambda k: k.put("tokenizer.json", HTML), ["file.html-page"]),
    "side-fifo": (lambda k: fifo(k, "encoding/pipe"), ["file.not-regular"]),
    "side-dangling": (lambda k: k.link("README.md", "gone"), ["file.dangling-link"]),
    "side-outside": (lambda k: k.link("README.md", "/etc/hostname"), ["file.outside-link"]),
    "side-folder-outside": (lambda k: k.link("assets", "/etc"), ["file.outside-link"]),
    "side-lfs-blob": (lambda k: (k.put("LICENSE", LFS), blob(k, "LICENSE")), ["file.lfs-pointer"]),
}

LEGAL: dict[str, Callable[[Kit], object]] = {
    "nothing": lambda k: None,
    "index-bom": lambda k: k.put(INDEX, b"\xef\xbb\xbf" + (k.root / INDEX).read_bytes()),
    "config-bom": lambda k: k.put(CONFIG, b"\xef\xbb\xbf" + (k.root / CONFIG).read_bytes()),
    "total-null": lambda k: k.edit(INDEX, lambda o: o["metadata"].update(total_size=None)),
    "metadata-absent": lambda k: k.edit(INDEX, lambda o: o.pop("metadata")),
    "metadata-null": lambda k: k.edit(INDEX, lambda o: o.update(metadata=None)),
    "metadata-more": lambda k: k.edit(INDEX, lambda o: o["metadata"].update(x={"y": 1})),
    "shard-spaces": lambda k: [k.rename(i, f"权重 {i}.safetensors") for i in (1, 2, 3)],
    "shard-blob": lambda k: [blob(k, k.shard(i).name, f"{i:064x}") for i in (1, 2, 3)],
    "shard-blob-git-hash": lambda k: blob(k, k.shard(1).name, "b" * 40),
    "config-blob": lambda k: blob(k, CONFIG),
    "index-blob": lambda k: blob(k, INDEX),
    "shard-link-inside": lambda k: (k.shard(1).rename(k.root / "real"), k.link(k.shard(1).name, "real")),
    "readme-markup": lambda k: k.put("README.md", b"<!-- html -->\n<div>"),
    "page-asset": lambda k: k.put("assets/page.html", HTML),
    "cache": lambda k: k.put(".cache/huggingface/download/x.lock"),
    "git": lambda k: k.put(".git/objects/pack/x.bin"),
    "own-files": lambda k: (k.put("dsv4convert.json"), k.put(".dsv4convert-journal")),
    "modelscope": lambda k: (k.put(".mdl"), k.put(".msc"), k.put("configuration.json", b"{}")),
    "name-two-dots": lambda k: [k.rename(i, f"a..{i}.safetensors") for i in (1, 2, 3)],
    "name-beside-the-series": lambda k: (
        k.rename(1, "model-00001-of-00002.safetensors"),
        k.rename(2, "mtp.safetensors"),
        k.rename(3, "model-00002-of-00002.safetensors"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_gives_exactly_its_finding(fault: str, kit: Kit) -> None:
    breaks, codes = FAULTS[fault]
    breaks(kit)
    assert kit.codes() == codes


@pytest.mark.parametrize("variant", LEGAL)
def test_legal_variant_gives_no_finding_and_all_tensors(variant: str, kit: Kit) -> None:
    LEGAL[variant](kit)
    opened = open_checkpoint(kit.root)
    assert [str(f) for f in opened.findings] == []
    assert sorted(opened.tensors) == sorted(["embed.weight", *LAYER, "norm.weight", "head.weight"])
    assert opened.weight_map == {n: t.shard for n, t in opened.tensors.items()}


def test_sound_checkpoint_is_described_completely(kit: Kit) -> None:
    opened = open_checkpoint(kit.root)
    assert opened.root == kit.root and list(opened.config) == ["z", "a"]
    assert opened.config_bytes == (kit.root / CONFIG).read_bytes()
    assert list(opened.shards) == [kit.shard(i).name for i in (1, 2, 3)]
    assert opened.total_size == sum(t.nbytes for t in opened.tensors.values())
    assert opened.side_files == (
        "LICENSE",
        "encoding/tests/x.json",
        "inference/config.json",
        "tokenizer.json",
    )
    assert opened.revision is None and bytes(opened.read("head.weight")) == bytes([4]) * 16


def test_side_files_leave_out_weights_bookkeeping_and_what_cannot_be_copied(kit: Kit) -> None:
    for name in (
        ".git/x",
        ".cache/x",
        "__pycache__/x",
        "a.bin",
        "b.gguf",
        ".dsv4convert/x",
        "dsv4convert.json",
    ):
        kit.put(name)
    kit.put(".gitattributes")
    kit.link("README.md", "gone")
    sides = open_checkpoint(kit.root).side_files
    assert sides == (
        ".gitattributes",
        "LICENSE",
        "encoding/tests/x.json",
        "inference/config.json",
        "tokenizer.json",
    )


def test_missing_shards_are_all_named_with_their_tensor_counts(kit: Kit) -> None:
    kit.shard(2).unlink()
    kit.shard(3).unlink()
    found = open_checkpoint(kit.root).findings
    assert [(f.where, f.problem) for f in found] == [
        (kit.shard(2).name, "missing shard; the index puts 6 tensors into it"),
        (kit.shard(3).name, "missing shard; the index puts 2 tensors into it"),
    ]


def test_wrong_shard_says_where_the_tensor_is(kit: Kit) -> None:
    kit.map(norm__weight=kit.shard(2).name)
    (found,) = open_checkpoint(kit.root).findings
    assert found.where == "norm.weight"
    assert found.problem.startswith(f"held by `{kit.shard(3).name}`, not by `{kit.shard(2).name}`")


def test_many_ghosts_are_one_finding_with_count_and_three_names(kit: Kit) -> None:
    kit.map(**{f"g{i}": kit.shard(2).name for i in range(1200)})
    (found,) = open_checkpoint(kit.root).findings
    assert found.where == kit.shard(2).name
    assert found.problem.startswith("1,200 tensors: ") and found.problem.endswith("`g0`, `g1`, `g2`, …")


@pytest.mark.parametrize(
    ("extra", "verdict"),
    [
        (row("norm.weight", fill=3), "their bytes agree"),
        (row("norm.weight", fill=9), "their bytes differ"),
        (row("norm.weight", "F16", fill=3), "their dtype or shape differs"),
    ],
)
def test_tensor_twice_says_whether_the_bytes_agree_and_keeps_the_indexed_one(
    extra: Any, verdict: str, kit: Kit
) -> None:
    kit.add(1, extra)
    opened = open_checkpoint(kit.root)
    assert opened.findings[0].where == "norm.weight" and opened.findings[0].problem.endswith(verdict)
    assert opened.tensors["norm.weight"].shard == kit.shard(3).name


def test_large_duplicates_are_not_compared(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_COMPARE_LIMIT", 20)
    kit.add(1, row("norm.weight", fill=3))
    assert open_checkpoint(kit.root).findings[0].problem.endswith("their bytes were not compared")


def test_numbering_without_index_names_the_gap(kit: Kit) -> None:
    drop_index(kit)
    kit.shard(2).unlink()
    found = open_checkpoint(kit.root).findings
    assert [f.code for f in found] == ["index.missing", "shard.missing"] and found[1].where == kit.shard(
        2
    ).name


def test_numbering_of_absurd_total_stays_fast(kit: Kit) -> None:
    for i in (1, 2, 3):
        kit.rename(i, f"model-{i:05d}-of-{'9' * 60}.safetensors")
    assert kit.codes() == ["shard.numbering"]


def test_without_index_all_shards_are_read(kit: Kit) -> None:
    drop_index(kit)
    opened = open_checkpoint(kit.root)
    assert len(opened.tensors) == 9 and opened.weight_map == {}


def test_all_faults_together_are_all_reported_errors_first_and_in_stable_order(kit: Kit) -> None:
    kit.put("pytorch_model.bin")
    kit.edit(INDEX, lambda o: o["metadata"].update(total_size=1))
    (kit.root / CONFIG).unlink()
    kit.put(kit.shard(1).name, LFS)
    kit.put(kit.shard(2).name, HTML)
    kit.put("tokenizer.json", LFS)
    kit.map(a="../x", ghost=kit.shard(3).name)
    codes = kit.codes()
    assert codes == [
        "config.missing",
        "index.bad-shard-name",
        "file.lfs-pointer",
        "file.html-page",
        "index.ghost-tensor",
        "file.lfs-pointer",
        "file.pickle",
    ]
    assert kit.codes() == codes


def test_paths_of_any_bytes_work_and_messages_stay_printable(kit: Kit) -> None:
    for raw in ("模型 权重 v4".encode(), b"bad\xff"):
        copy = Path(os.fsdecode(os.path.join(os.fsencode(kit.root.parent), raw)))
        shutil.copytree(kit.root, copy)
        assert open_checkpoint(copy).findings == ()
    side = os.fsdecode(b"enc\xffode.py")
    (copy / side).write_bytes(b"")
    (copy / os.fsdecode(b"x\xff.safetensors")).write_bytes(b"")
    opened = open_checkpoint(copy)
    assert side in opened.side_files and [f.where for f in opened.findings] == ["x\\udcff.safetensors"]
    with pytest.raises(Refused) as refused:
        open_checkpoint(copy / side)
    str(refused.value).encode("utf-8")


def test_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "gone", tmp_path / "file"):
        with pytest.raises(Refused) as refused:
            open_checkpoint(path)
        assert [f.code for f in refused.value.findings] == ["dir.not-found"]


def test_empty_directory_lacks_config_and_weights(tmp_path: Path) -> None:
    assert [f.code for f in open_checkpoint(tmp_path).findings] == ["config.missing", "dir.no-weights"]


def metadata(kit: Kit, name: str, commit: str) -> None:
    kit.put(f".cache/huggingface/download/{name}.metadata", f"{commit}\netag\n1.0\n".encode())


def test_revision_comes_from_download_records_that_agree(kit: Kit) -> None:
    metadata(kit, "config.json", COMMIT)
    metadata(kit, "encoding/x.json", COMMIT)
    assert open_checkpoint(kit.root).revision == COMMIT
    metadata(kit, "LICENSE", "0" * 40)
    assert open_checkpoint(kit.root).revision is None
    metadata(kit, "LICENSE", "not a commit")
    assert open_checkpoint(kit.root).revision is None


def test_hub_cache_snapshot_has_revision_and_links_and_names_unfinished_blobs(tmp_path: Path) -> None:
    repo = tmp_path / "models--deepseek-ai--x"
    kit = Kit(repo / "snapshots" / COMMIT)
    (repo / "blobs").mkdir()
    for i, path in enumerate(sorted(p for p in kit.root.rglob("*") if p.is_file())):
        target = repo / "blobs" / f"{i:064x}"
        shutil.move(path, target)
        path.symlink_to(os.path.relpath(target, path.parent))
    opened = open_checkpoint(kit.root)
    assert opened.findings == () and opened.revision == COMMIT and len(opened.side_files) == 4
    (repo / "blobs" / "x.incomplete").write_bytes(b"")
    assert kit.codes() == ["file.incomplete"]


def test_forbidden_shard_is_a_permission_finding(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def guarded(path: Any, *rest: Any) -> int:
        if os.path.basename(os.fspath(path)) == kit.shard(2).name:
            raise PermissionError(13, "Permission denied")
        return real(path, *rest)

    monkeypatch.setattr(os, "open", guarded)  # root ignores modes
    assert kit.codes() == ["file.unreadable"]


def test_reader_reads_exactly_by_tensor_and_by_file(kit: Kit) -> None:
    opened = open_checkpoint(kit.root)
    with opened.reader() as reader:
        part = bytearray(5)
        reader.pread_into(opened.tensors["layers.0.w2"], 11, memoryview(part))
        assert part == bytes([2]) * 5
        with pytest.raises(ValueError, match="leave"):
            reader.pread_into(opened.tensors["layers.0.w2"], 12, memoryview(part))
        head = bytearray(8)
        reader.pread_into(kit.shard(1).name, 0, memoryview(head))
        assert int.from_bytes(head, "little") + 8 == opened.shards[kit.shard(1).name].data_start
        fd = reader.fileno(kit.shard(1).name)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


def test_reader_names_file_and_offset_of_a_short_read(kit: Kit) -> None:
    opened = open_checkpoint(kit.root)
    cut(kit, kit.shard(1).name, 6)
    end = kit.shard(1).stat().st_size
    with pytest.raises(EnvironmentFault) as fault:
        opened.read("embed.weight")
    (found,) = fault.value.findings
    assert (found.code, found.where) == ("io.read", kit.shard(1).name) and f"at byte {end:,}" in found.problem


def test_reader_reports_a_shard_that_went_away(kit: Kit) -> None:
    opened = open_checkpoint(kit.root)
    kit.shard(1).unlink()
    with pytest.raises(EnvironmentFault), ShardReader(opened.shards) as reader:
        reader.fileno(kit.shard(1).name)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from([INDEX, CONFIG, "model-00002-of-00003.safetensors"]),
    content=st.binary(max_size=80)
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=4),
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.dictionaries(
                st.sampled_from(["weight_map", "metadata", "total_size", "a"]), inner, max_size=3
            )
        ),
    ).map(lambda value: json.dumps(value).encode()),
)
def test_any_file_content_gives_a_checkpoint_with_printable_findings(
    name: str, content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    kit = Kit(tmp_path_factory.mktemp("any") / "m")
    kit.put(name, content)
    opened = open_checkpoint(kit.root)
    assert all(str(f).isprintable() for f in opened.findings)
    assert name == CONFIG or errors_of(opened.findings)
    shutil.rmtree(kit.root)
