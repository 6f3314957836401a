"""What a conversion says about itself: reproducible, checked field by field, with a card of its own."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsv4convert.convert import convert
from dsv4convert.origin import front_matter, license_fields, recorded_sha256
from tests.conftest import Ran
from tests.samples import MANIFEST, make_sample, read_json, tree

Cli = Callable[..., Ran]
COMMIT = "9e165c30e2704aec5d9d593cce3eebd58bbef1cb"
SHARD = "model-00002-of-00008.safetensors"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sample(tmp_path_factory.mktemp("provenance"), "short")


@pytest.fixture(scope="module")
def made(source: Path) -> Path:
    convert(source, source.parent / "made")
    return source.parent / "made"


@pytest.fixture
def out(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "out"))


def download(source: Path, target: Path) -> Path:
    """Copy a source as ``hf download --local-dir`` would leave it."""
    shutil.copytree(source, target)
    for path in sorted(target.glob("*.safetensors")):
        note = target / ".cache" / "huggingface" / "download" / f"{path.name}.metadata"
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(f"{COMMIT}\n{path.name.encode().hex():0<64.64}\n1700000000.0\n")
    return target


# ---- reproducible


def test_conversions_differ_in_nothing_but_run(source: Path, tmp_path: Path) -> None:
    first = download(source, tmp_path / "here" / "model")
    second = download(source, tmp_path / "another-place" / "other name")
    for i, path in enumerate(second.rglob("*")):
        os.utime(path, ns=(i, 10**18 + i))
    convert(first, tmp_path / "a", jobs=1)
    convert(second, tmp_path / "deep" / "b", jobs=2)
    one, two = tree(tmp_path / "a"), tree(tmp_path / "deep" / "b")
    assert list(one) == list(two)
    assert {name for name in one if one[name] != two[name]} == set()
    runs = [read_json(root / MANIFEST)["run"] for root in (tmp_path / "a", tmp_path / "deep" / "b")]
    assert [run["jobs"] for run in runs] == [1, 2]
    assert {"numpy", "torch", "xxhash", "safetensors"} <= runs[0]["libraries"].keys()
    # No path and no time outside `run`.
    text = b"".join(v for name, v in one.items() if not name.endswith(".safetensors"))
    assert os.fsencode(tmp_path.name) not in text


def test_conversion_of_a_conversion_says_the_same_about_the_weights(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "mxfp4", experts="mxfp4")
    convert(tmp_path / "mxfp4", tmp_path / "twice")
    convert(source, tmp_path / "once")
    twice, once = (read_json(tmp_path / n / MANIFEST) for n in ("twice", "once"))
    assert (twice["losses"], twice["experts"]) == (once["losses"], once["experts"])
    # The stub of the first conversion is not taken for the card of the source.
    cards = [(tmp_path / n / "README.source.md").read_bytes() for n in ("mxfp4", "twice")]
    assert cards == [(source / "README.md").read_bytes()] * 2


# ---- known contents


def test_contents_known_to_the_download_client_are_recorded(source: Path, tmp_path: Path, cli: Cli) -> None:
    root = download(source, tmp_path / "model")
    assert cli("convert", root, tmp_path / "out", "--jobs", 1).exit_code == 0
    recorded = read_json(tmp_path / "out" / MANIFEST)["source"]
    wanted = {p.name: f"{p.name.encode().hex():0<64.64}" for p in sorted(root.glob("*.safetensors"))}
    assert recorded["content_sha256"] == wanted and recorded["revision"] == COMMIT
    check = ("converted", tmp_path / "out", "--reference", root, "--json")
    assert cli(*check).exit_code == 0
    # The same headers, but the client says that other bytes were published.
    note = root / ".cache" / "huggingface" / "download" / f"{SHARD}.metadata"
    note.write_text(note.read_text().replace(wanted[SHARD], "f" * 64))
    seen = cli(*check)
    assert [(f["code"], f["where"]) for f in seen.json()["findings"]] == [("reference.other", SHARD)]
    # A reference without records proves nothing against it.
    assert cli("converted", tmp_path / "out", "--reference", source).exit_code == 0


def test_contents_are_known_from_the_names_of_cache_blobs(tmp_path: Path) -> None:
    names = {"a": "1" * 64, "git": "2" * 40, "plain": "", "upper": "A" * 64}
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for name, blob in names.items():
        if blob:
            (tmp_path / "blobs" / blob).write_bytes(b"")
            (tmp_path / "snapshot" / name).symlink_to(tmp_path / "blobs" / blob)
        else:
            (tmp_path / "snapshot" / name).write_bytes(b"")
    (tmp_path / "elsewhere").write_bytes(b"")
    (tmp_path / "snapshot" / "link").symlink_to(tmp_path / "elsewhere")
    assert recorded_sha256(tmp_path / "snapshot", [*names, "link", "gone"]) == {"a": "1" * 64}


@pytest.mark.parametrize("text", ["", "x", f"{COMMIT}\n", f"{COMMIT}\n{'a' * 40}\n1\n", "\xff\n" * 3])
def test_contents_without_a_sound_record_are_unknown(tmp_path: Path, text: str) -> None:
    note = tmp_path / ".cache" / "huggingface" / "download" / "x.metadata"
    note.parent.mkdir(parents=True)
    note.write_bytes(text.encode("latin-1"))
    assert recorded_sha256(tmp_path, ["x"]) == {}


# ---- the manifest, field by field


def _set(path: str, value: Any) -> Callable[[Any], None]:
    def change(manifest: Any) -> None:
        *parents, last = path.split("/")
        for key in parents:
            manifest = manifest[key]
        assert not isinstance(manifest, dict) or manifest.get(last) != value
        manifest[last] = value

    return change


EXPERT, NORM, WQ_A = "layers.0.ffn.experts.0.w1", "norm.weight", "layers.0.attn.wq_a.weight"
FIELDS: dict[str, Any] = {
    "source/release": "deepseek-v4-pro",
    "source/title": "DeepSeek-V5",
    "source/revision": COMMIT,
    "plan/packing": "g64",
    "plan/rounding": "half-even",
    "plan/writer_version": "2",
    "plan/command": "rm -rf DST",
    "output/tensors": 1,
    "output/data_bytes": 1,
    "experts": None,
    "experts/codes_changed": 1 << 40,
    "losses": {},
    "losses/layers.0/w1/max_relative_error": 0.9,
    "losses/layers.0/w1/worst_matrix": "none",
    "memory": {},
    "memory/4/weight_bytes": 1,
    "memory/8/cuts": [],
    "rounded": [{"code": "value.inexact", "tensor": WQ_A, "found": "1"}],
    f"source/header_sha256/{SHARD}": "0" * 64,
    f"tensors/{NORM}/op": "dequantize-bf16",
    f"tensors/{WQ_A}/op": "keep",
    f"tensors/{WQ_A}/figures": {"inexact_blocks": 1, "first_inexact": [[0, 0, 1]]},
    f"tensors/{EXPERT}.channel_scale/op": "keep",
    f"tensors/{EXPERT}.weight_codes/figures": {},
}
WITH_SOURCE: dict[str, Any] = {"plan/digest": "0" * 64, "source/file_bytes": 1}
FREE: dict[str, Any] = {
    "tool/version": "9.9",
    "run/jobs": 99,
    "run": {},
    "source/content_sha256": {SHARD: "0" * 64},
}


@pytest.mark.parametrize("path", FIELDS)
def test_manifest_field_that_lies_is_a_finding(cli: Cli, out: Path, path: str) -> None:
    manifest = read_json(out / MANIFEST)
    _set(path, FIELDS[path])(manifest)
    (out / MANIFEST).write_text(json.dumps(manifest))
    seen = cli("converted", out, "--json")
    assert seen.exit_code == 1
    found = [(f["code"], f["severity"]) for f in seen.json()["findings"]]
    assert set(found) == {("manifest.mismatch", "error")}
    # A note of a rounded block changes the command too; figures change the sums.
    assert len(found) == 1 or path in ("rounded", f"tensors/{EXPERT}.weight_codes/figures")


@pytest.mark.parametrize("path", WITH_SOURCE)
def test_manifest_field_that_only_the_source_can_judge(cli: Cli, source: Path, out: Path, path: str) -> None:
    manifest = read_json(out / MANIFEST)
    _set(path, WITH_SOURCE[path])(manifest)
    (out / MANIFEST).write_text(json.dumps(manifest))
    seen = cli("converted", out, "--json")
    assert seen.exit_code == 0
    assert any("without a reference plan digest" in line for line in seen.json()["not_checked"])
    seen = cli("converted", out, "--reference", source, "--json")
    (found,) = seen.json()["findings"]
    assert found["code"] == "manifest.mismatch" and path.replace("/", ".") in found["problem"]


@pytest.mark.parametrize("path", FREE)
def test_manifest_field_that_is_not_checked_is_free_and_said_so(cli: Cli, out: Path, path: str) -> None:
    manifest = read_json(out / MANIFEST)
    _set(path, FREE[path])(manifest)
    (out / MANIFEST).write_text(json.dumps(manifest))
    seen = cli("converted", out, "--json")
    assert seen.exit_code == 0 and seen.json()["findings"] == []
    assert any(line.startswith("manifest: `tool`, `run`") for line in seen.json()["not_checked"])


def test_memory_of_another_version_is_not_judged(cli: Cli, out: Path) -> None:
    manifest = read_json(out / MANIFEST)
    manifest["tool"]["version"], manifest["memory"]["4"]["weight_bytes"] = "9.9", 1
    (out / MANIFEST).write_text(json.dumps(manifest))
    assert cli("converted", out).exit_code == 0


@pytest.mark.parametrize(
    "section", ["tool", "source", "plan", "output", "experts", "losses", "rounded", "memory", "tensors"]
)
def test_manifest_section_that_is_gone_is_a_finding(cli: Cli, out: Path, section: str) -> None:
    manifest = read_json(out / MANIFEST)
    del manifest[section]
    (out / MANIFEST).write_text(json.dumps(manifest))
    seen = cli("converted", out, "--json")
    assert [f["code"] for f in seen.json()["findings"]] == ["manifest.not-json"]


def test_manifest_of_rounded_blocks_is_checked_too(cli: Cli, source: Path, tmp_path: Path) -> None:
    from tests.toy import Toy

    shutil.copytree(source, tmp_path / "model")
    Toy(tmp_path / "model").poke(WQ_A.replace(".weight", ".scale"), 0, b"\xf8")
    arguments = ("convert", tmp_path / "model", tmp_path / "out", "--jobs", 1)
    assert cli(*arguments).exit_code == 3
    assert cli(*arguments, "--allow-rounding").exit_code == 0
    manifest = read_json(tmp_path / "out" / MANIFEST)
    assert manifest["plan"]["command"].endswith("--experts int8 --allow-rounding")
    assert "blocks rounded |" in (tmp_path / "out" / "README.md").read_text()
    assert cli("converted", tmp_path / "out", "--json").json()["findings"] == []


# ---- the card


def card(root: Path) -> tuple[dict[str, Any], str]:
    """Return front matter, as a YAML reader sees it, and text."""
    _, front, text = (root / "README.md").read_text().split("---\n", 2)
    loaded: dict[str, Any] = yaml.safe_load(front)
    return loaded, text


def test_card_tells_what_was_done(source: Path, made: Path) -> None:
    front, text = card(made)
    assert front["tags"] == ["deepseek", "bf16", "int8", "dsv4convert"] and "library_name" not in front
    manifest = read_json(made / MANIFEST)
    assert (
        manifest["plan"]["digest"] in text and "dsv4convert convert SOURCE DIRECTORY --experts int8" in text
    )
    totals = manifest["experts"]
    assert f"{totals['exact_matrices']} of {totals['matrices']} matrices" in text
    for role in ("attention", "routed expert", "draft head"):
        assert f"| {role} |" in text
    assert (made / "README.source.md").read_bytes() == (source / "README.md").read_bytes()
    assert "README.source.md" in manifest["output"]["files_sha256"]


@pytest.mark.parametrize("layout", ["int8", "mxfp4"])
def test_card_of_a_release_names_its_base_model(tmp_path: Path, layout: str) -> None:
    from dsv4convert.card import model_card
    from dsv4convert.checkpoint import open_checkpoint
    from dsv4convert.plan import plan
    from dsv4convert.synth import Recipe, synthesize

    root = tmp_path / "full"
    synthesize(root, Recipe("deepseek-v4-flash-0731", "full"))
    (root / "README.md").write_text(
        "---\nlicense: mit # ours\nlibrary_name: transformers\ntags: [x]\n---\nText\n"
    )
    plan_ = plan(open_checkpoint(root), layout)
    rows = {s.name: {} for p in plan_.shards for s in p.steps}
    experts = {"exact_matrices": 35328, "matrices": 35328, "codes_changed": 0}
    made = {"digest": plan_.digest, "packing": "p", "rounding": "r", "writer_version": "1", "command": "c"}
    manifest = {"tensors": rows, "experts": experts, "plan": made, "output": {"files_sha256": {}}}
    (tmp_path / "README.md").write_bytes(model_card(plan_, manifest, root))
    front, text = card(tmp_path)
    assert (front["base_model"], front["license"]) == ("deepseek-ai/DeepSeek-V4-Flash-0731", "mit")
    assert front["base_model_relation"] == "quantized" and "library_name" not in front
    assert "hf download deepseek-ai/DeepSeek-V4-Flash-0731 --local-dir SOURCE" in text
    assert ("35,328 of 35,328 matrices: every weight has its value" in text) == (layout == "int8")


def test_card_may_be_edited_and_removed(cli: Cli, out: Path) -> None:
    (out / "README.md").write_text("mine")
    assert cli("converted", out, "--strict").exit_code == 0
    (out / "README.md").unlink()
    assert cli("converted", out, "--strict").exit_code == 0
    (out / "README.source.md").write_text("mine")
    assert cli("converted", out, "--json").json()["findings"][0]["code"] == "content.hash"


def test_card_without_a_source_card(source: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(source, tmp_path / "model"))
    for name in ("README.md", "LICENSE"):
        (root / name).unlink()
    convert(root, tmp_path / "out")
    front, text = card(tmp_path / "out")
    assert "license" not in front and "README.source.md" not in text
    assert not (tmp_path / "out" / "README.source.md").exists()


CARDS: dict[str, tuple[str, dict[str, str]]] = {
    "plain": ("---\nlicense: mit\n---\n", {"license": "mit"}),
    "windows": ("\ufeff---\r\nlicense: mit\r\n---\r\nx", {"license": "mit"}),
    "quoted": (
        "---\nlicense_name: \"a b\"\nbase_model: 'c/d'\n---\n",
        {"license_name": "a b", "base_model": "c/d"},
    ),
    "comment": ("---\nlicense: mit # free\n---\n", {"license": "mit"}),
    "lists-are-passed-over": (
        "---\nbase_model:\n- a/b\ntags: [x]\nx: {y: 1}\nlicense: mit\n---\n",
        {"license": "mit"},
    ),
    "first-wins": ("---\nlicense: mit\nlicense: gpl\n---\n", {"license": "mit"}),
    "no-front": ("# Title\nlicense: mit\n", {}),
    "not-closed": ("---\nlicense: mit\n", {}),
    "too-long": (f"---\nlicense: {'x' * 300}\n---\n", {}),
    "control": ("---\nlicense: a\x1bb\n---\n", {}),
    "empty": ("", {}),
}


@pytest.mark.parametrize("name", CARDS)
def test_front_matter_gives_one_line_values(name: str) -> None:
    text, wanted = CARDS[name]
    assert front_matter(text) == wanted


def test_license_comes_from_card_or_file() -> None:
    mit = "MIT License\n\nCopyright"
    assert license_fields({"license": "other", "license_link": "L"}, mit) == {
        "license": "other",
        "license_link": "L",
    }
    assert license_fields({}, mit) == {"license": "mit"}
    assert license_fields({}, "   Apache License\n Version 2.0") == {"license": "apache-2.0"}
    assert license_fields({}, "Ours")["license"] == "other"
    assert license_fields({}, "") == {}


def test_hostile_card_cannot_add_fields(source: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(source, tmp_path / "model"))
    (root / "README.md").write_text('---\nlicense: mit\\ninference: true\nbase_model: x: y"\n---\n')
    convert(root, tmp_path / "out")
    front, _ = card(tmp_path / "out")
    assert set(front) <= {"base_model", "base_model_relation", "license", "tags"}
