"""Conversions: every byte judged by another route, the same bytes on every route."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from safetensors import safe_open

from dsv4convert.checkpoint import open_checkpoint
from dsv4convert.convert import Limits, convert, finalize
from dsv4convert.errors import Refused
from dsv4convert.geometry import read_geometry
from dsv4convert.transform import Transformer
from dsv4convert.validate import verify
from tests.samples import INDEX, MANIFEST, int8_values, mxfp4_values, read_json, tensors, tree
from tests.shardfile import rows, write_shard

KINDS = ["plain", "ragged", "preview", "vision", "v41"]
SCHEMA = Path(__file__).parent.parent / "docs" / "schemas" / "manifest.schema.json"
Sample = Callable[[str], Path]
Made = Callable[[str, str], Path]


@pytest.fixture(scope="session")
def made(sample: Sample, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Return ``made(kind, layout)``: a conversion of a sample, made once; not to be changed."""
    root = tmp_path_factory.mktemp("made")

    def make(kind: str, layout: str) -> Path:
        target = root / f"{kind}-{layout}"
        if not target.exists():
            convert(sample(kind), target, experts=layout)
        return target

    return make


# ---- what the bytes mean


@pytest.mark.parametrize("layout", ["mxfp4", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_output_opens_with_the_stock_library_and_holds_what_was_planned(
    sample: Sample, made: Made, kind: str, layout: str
) -> None:
    from dsv4convert.plan import plan

    wanted = {
        step.name: (step.dtype, list(step.shape))
        for shard in plan(open_checkpoint(sample(kind)), layout).shards
        for step in shard.steps
    }
    found = {}
    for path in sorted(made(kind, layout).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            assert file.metadata()["format"] == "pt"
            assert file.metadata()["dsv4convert.layout"] == layout
            for name in file.keys():  # noqa: SIM118 - not a dict
                piece = file.get_slice(name)
                found[name] = (piece.get_dtype(), piece.get_shape())
                assert file.get_tensor(name).shape == tuple(found[name][1])
    assert found == wanted


@pytest.mark.parametrize("layout", ["mxfp4", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_bf16_weights_are_the_rounded_float32_product_of_code_and_scale(
    sample: Sample, made: Made, kind: str, layout: str
) -> None:
    source, output = tensors(sample(kind)), tensors(made(kind, layout))
    geometry, _ = read_geometry(read_json(sample(kind) / "config.json"))
    assert geometry
    dense = [n for n, row in source.items() if row[0] == "F8_E4M3" and ".engram.embed." not in n]
    assert dense
    for name in dense:
        (n, k), scale = source[name][1], source[name.replace(".weight", ".scale")]
        codes = torch.frombuffer(bytearray(source[name][2]), dtype=torch.uint8).reshape(n, k)
        exponents = torch.frombuffer(bytearray(scale[2]), dtype=torch.uint8).reshape(scale[1])
        grid = exponents.view(torch.float8_e8m0fnu).float()
        rows_, columns = geometry.block
        full = grid.repeat_interleave(rows_, 0)[:n].repeat_interleave(columns, 1)[:, :k]
        product = (codes.view(torch.float8_e4m3fn).float() * full).bfloat16()
        assert output[name][:2] == ("BF16", (n, k))
        assert output[name][2] == product.view(torch.int16).numpy().tobytes(), name
    assert not [n for n in output if n.replace(".scale", ".weight") in dense and n.endswith(".scale")]


@pytest.mark.parametrize("kind", KINDS)
def test_int8_experts_decode_to_the_mxfp4_numbers_except_where_the_manifest_says_so(
    sample: Sample, made: Made, kind: str
) -> None:
    source, output = tensors(sample(kind)), tensors(made(kind, "int8"))
    figures = read_json(made(kind, "int8") / MANIFEST)["tensors"]
    rounded = exact = 0
    for name, (dtype, (n, half), codes) in ((n, r) for n, r in source.items() if ".ffn.experts." in n):
        if not name.endswith(".weight"):
            continue
        base, k = name.removesuffix(".weight"), 2 * half
        theirs = mxfp4_values(codes, source[f"{base}.scale"][2], n, k)
        parts = [output[base + s][2] for s in (".weight_codes", ".weight_shift2", ".channel_scale")]
        ours = int8_values(parts[0], parts[1], parts[2], n, k)
        row = figures[f"{base}.weight_codes"]["figures"]
        assert dtype == "I8"
        assert np.count_nonzero(ours != theirs) == row["codes_changed"], base
        error = np.sqrt(np.square(ours - theirs).sum() / np.square(theirs).sum())
        assert row["relative_error"] == pytest.approx(float(error), rel=1e-12)
        rounded, exact = rounded + (row["codes_changed"] > 0), exact + (row["codes_changed"] == 0)
    assert rounded and exact, "the sample is meant to have matrices of both kinds"


@pytest.mark.parametrize("layout", ["mxfp4", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_kept_tensors_are_equal_byte_for_byte(sample: Sample, made: Made, kind: str, layout: str) -> None:
    source, output = tensors(sample(kind)), tensors(made(kind, layout))
    ops = {n: row["op"] for n, row in read_json(made(kind, layout) / MANIFEST)["tensors"].items()}
    kept = {n for n, op in ops.items() if op == "keep"}
    assert ops.keys() == output.keys()
    assert {n: output[n] for n in kept} == {n: source[n] for n in kept}
    # Only dense FP8 weights and, in int8, experts are anything else.
    changed = {n for n, row in source.items() if row[0] == "F8_E4M3" and ".engram.embed." not in n}
    if layout == "int8":
        changed |= {n for n in source if ".ffn.experts." in n}
    scales = {n.removesuffix(".weight") + ".scale" for n in changed}
    assert kept == source.keys() - changed - scales


# ---- the same bytes on every route


@pytest.mark.parametrize("layout", ["mxfp4", "int8"])
def test_parts_and_finalize_give_the_bytes_of_one_run(
    sample: Sample, made: Made, tmp_path: Path, layout: str
) -> None:
    for index in (1, 0):
        result = convert(sample("ragged"), tmp_path / "out", experts=layout, part=(index, 2))
        # Even the last job leaves closing to `finalize`: two could be the last at the same moment.
        assert result.manifest is None and not (tmp_path / "out" / INDEX).exists()
    finalize(tmp_path / "out")
    assert tree(tmp_path / "out") == tree(made("ragged", layout))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["mxfp4", "int8"])
def test_two_workers_give_the_bytes_of_one(sample: Sample, made: Made, tmp_path: Path, layout: str) -> None:
    convert(sample("v41"), tmp_path / "out", experts=layout, jobs=2)
    assert tree(tmp_path / "out") == tree(made("v41", layout))


def test_finalize_before_all_parts_are_done_is_refused_and_names_a_shard(
    sample: Sample, tmp_path: Path
) -> None:
    result = convert(sample("short"), tmp_path / "out", part=(0, 2))
    assert len(result.missing) == 4 and result.written == 4
    with pytest.raises(Refused) as caught:
        finalize(tmp_path / "out")
    (found,) = caught.value.findings
    assert (found.code, found.where) == ("dst.unfinished", "out")
    assert (found.problem, found.found) == (
        "4 of 8 shards are not done",
        "the first is `model-00002-of-00008.safetensors`",
    )
    assert not (tmp_path / "out" / INDEX).exists()


def test_finalize_of_a_moved_source_needs_to_be_told_and_refuses_another(
    sample: Sample, made: Made, tmp_path: Path
) -> None:
    shutil.copytree(sample("short"), tmp_path / "source")
    for index in range(4):
        convert(tmp_path / "source", tmp_path / "out", part=(index, 4))
    (tmp_path / "source").rename(tmp_path / "moved")
    with pytest.raises(Refused):
        finalize(tmp_path / "out")
    with pytest.raises(Refused) as caught:
        finalize(tmp_path / "out", sample("short"))
    assert [f.code for f in caught.value.findings] == ["dst.other-plan"]
    closed = finalize(tmp_path / "out", tmp_path / "moved")
    assert closed is not None and closed.manifest is not None
    assert finalize(tmp_path / "out") is None, "complete already"
    assert tree(tmp_path / "out") == tree(made("short", "int8"))


@pytest.mark.parametrize("kind", KINDS)
def test_mxfp4_output_converted_to_int8_equals_the_direct_conversion(
    made: Made, tmp_path: Path, kind: str
) -> None:
    convert(made(kind, "mxfp4"), tmp_path / "out", experts="int8")
    assert tensors(tmp_path / "out") == tensors(made(kind, "int8"))
    for name in ("config.json", "tokenizer.json", INDEX):
        assert (tmp_path / "out" / name).read_bytes() == (made(kind, "int8") / name).read_bytes()


def test_mxfp4_output_converted_to_mxfp4_keeps_every_tensor(made: Made, tmp_path: Path) -> None:
    convert(made("vision", "mxfp4"), tmp_path / "out", experts="mxfp4")
    assert tensors(tmp_path / "out") == tensors(made("vision", "mxfp4"))


def test_reference_check_confirms_every_layout(sample: Sample, made: Made) -> None:
    for layout in ("mxfp4", "int8"):
        report = verify(made("plain", layout), reference=sample("plain"), read_data=100)
        assert report.findings == ()


# ---- a checkpoint of other origin

PUBLIC_LIST = [
    *("embed_tokens", "lm_head", "norm", "self_attn", "input_layernorm", "post_attention_layernorm"),
    *("gate", "shared_experts", "hc_attn_fn"),
]


@pytest.fixture
def foreign(made: Made, tmp_path: Path) -> Path:
    """Return what another converter makes: same tensors, no metadata, no manifest, its own skip list."""
    root = tmp_path / "foreign"
    shutil.copytree(made("plain", "mxfp4"), root)
    (root / MANIFEST).unlink()
    for path in root.glob("*.safetensors"):
        write_shard(path, rows(path))
    config = read_json(root / "config.json")
    del config["dsv4convert"], config["quantization_config"]["modules_to_not_convert"]
    config["quantization_config"]["ignored_layers"] = [*PUBLIC_LIST, "main_proj"]
    (root / "config.json").write_text(json.dumps(config))
    return root


def test_foreign_mxfp4_checkpoint_is_accepted_with_warnings(foreign: Path, cli: Callable[..., Any]) -> None:
    report = cli("converted", foreign, "--json")
    assert report.exit_code == 0, report.out
    found = {f["code"]: f["severity"] for f in report.json()["findings"]}
    assert found.pop("manifest.missing") == "warning"
    assert found == {"shard.metadata": "warning"}


def test_foreign_checkpoint_without_a_skip_entry_for_the_draft_projection_fails(
    foreign: Path, cli: Callable[..., Any]
) -> None:
    config = read_json(foreign / "config.json")
    config["quantization_config"]["ignored_layers"] = PUBLIC_LIST
    (foreign / "config.json").write_text(json.dumps(config))
    report = cli("converted", foreign, "--json")
    assert report.exit_code == 1
    (fault,) = [f for f in report.json()["findings"] if f["severity"] == "error"]
    assert fault["code"] == "config.skip-list"
    assert fault["expected"] == "an entry that matches `stages.0.main_proj`"


def test_foreign_mxfp4_checkpoint_converts_to_int8(foreign: Path, made: Made, tmp_path: Path) -> None:
    convert(foreign, tmp_path / "out", experts="int8")
    assert tensors(tmp_path / "out") == tensors(made("plain", "int8"))
    assert (tmp_path / "out" / "config.json").read_bytes() != (foreign / "config.json").read_bytes()
    assert verify(tmp_path / "out", reference=foreign, read_data=100).findings == ()


# ---- config, index, manifest, side files

SKIP = {
    "plain": ["self_attn", "shared_experts", "main_proj"],
    "preview": ["self_attn", "shared_experts", "e_proj", "h_proj"],
    "vision": ["self_attn", "shared_experts", "main_proj"],
    "v41": ["self_attn", "shared_experts", "engram", "main_proj"],
}
OWN = {
    "mxfp4": {"experts": "mxfp4", "writer_version": "1", "source_revision": None},
    "int8": {
        "experts": "int8",
        "writer_version": "1",
        "packing": "g128-split64",
        "rounding": "nearest-ties-to-smaller",
        "source_revision": None,
    },
}


@pytest.mark.parametrize("layout", ["mxfp4", "int8"])
@pytest.mark.parametrize("kind", SKIP)
def test_config_is_the_source_config_with_exactly_these_additions(
    sample: Sample, made: Made, kind: str, layout: str
) -> None:
    """Key order counts: everything stays where it was, what is new comes last."""
    wanted = read_json(sample(kind) / "config.json")
    wanted["quantization_config"]["ignored_layers"] = SKIP[kind]
    wanted["quantization_config"]["modules_to_not_convert"] = SKIP[kind]
    wanted["dsv4convert"] = OWN[layout]
    assert wanted["dtype" if kind == "v41" else "torch_dtype"] == "bfloat16"
    text = json.dumps(wanted, indent=2, ensure_ascii=False) + "\n"
    assert (made(kind, layout) / "config.json").read_text() == text


@pytest.mark.parametrize("layout", ["mxfp4", "int8"])
def test_index_lists_tensors_in_shard_and_data_order_with_their_total(made: Made, layout: str) -> None:
    root = made("plain", layout)
    weight_map, total = {}, 0
    for path in sorted(root.glob("*.safetensors")):
        for name, _, _, data in rows(path):
            weight_map[name] = path.name
            total += len(data)
    wanted = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    assert (root / INDEX).read_text() == wanted


@pytest.mark.parametrize("layout", ["mxfp4", "int8"])
@pytest.mark.parametrize("kind", ["plain", "v41"])
def test_manifest_fits_its_schema(made: Made, kind: str, layout: str) -> None:
    schema = read_json(SCHEMA)
    jsonschema.Draft202012Validator.check_schema(schema)
    manifest = read_json(made(kind, layout) / MANIFEST)
    jsonschema.validate(manifest, schema, jsonschema.Draft202012Validator)
    assert (manifest["experts"] is None) is (layout == "mxfp4")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(manifest | {"more": 1}, schema, jsonschema.Draft202012Validator)


def test_manifest_says_nothing_about_time_place_or_machine_outside_run(
    sample: Sample, made: Made, tmp_path: Path
) -> None:
    """Converted elsewhere, later, from a copy with other times: equal but for `run`."""
    shutil.copytree(sample("short"), tmp_path / "copy")
    for path in (tmp_path / "copy").rglob("*"):
        os.utime(path, ns=(10**18, 10**18))
    convert(tmp_path / "copy", tmp_path / "out")
    ours, theirs = read_json(tmp_path / "out" / MANIFEST), read_json(made("short", "int8") / MANIFEST)
    assert ours.pop("run") and theirs.pop("run")
    assert ours == theirs
    assert str(tmp_path) not in json.dumps(ours)


@pytest.fixture
def umask() -> Iterator[None]:
    """Set a umask that nothing uses by accident."""
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_side_files_of_a_cache_snapshot_become_real_files_that_follow_the_umask(
    sample: Sample, made: Made, tmp_path: Path
) -> None:
    commit = "9e165c30e2704aec5d9d593cce3eebd58bbef1cb"
    snapshot, blobs = tmp_path / "hub" / "snapshots" / commit, tmp_path / "hub" / "blobs"
    blobs.mkdir(parents=True)
    for number, path in enumerate(p for p in sample("short").rglob("*") if p.is_file()):
        link = snapshot / path.relative_to(sample("short"))
        link.parent.mkdir(parents=True, exist_ok=True)
        blob = shutil.copy(path, blobs / f"{number:064x}")
        Path(blob).chmod(0o400)
        link.symlink_to(os.path.relpath(blob, link.parent))
    convert(snapshot, tmp_path / "out")
    written = [p for p in (tmp_path / "out").rglob("*") if not p.is_dir()]
    assert not [p for p in written if p.is_symlink()]
    assert {stat.S_IMODE(p.stat().st_mode) for p in written} == {0o640}
    ours, theirs = tree(tmp_path / "out"), tree(made("short", "int8"))
    assert ours.keys() == theirs.keys()
    assert {n for n in ours if ours[n] != theirs[n]} == {
        "config.json",
        "README.md",
        MANIFEST,
    }, "the revision is known now"
    assert read_json(tmp_path / "out" / "config.json")["dsv4convert"]["source_revision"] == commit
    written_anew = {"config.json", "README.md", MANIFEST, INDEX}
    side = {n for n in ours if not n.endswith(".safetensors")} - written_anew
    assert {"inference/config.json", "encoding/README.md", "README.source.md"} <= side
    assert all(ours[n] == (sample("short") / n.replace(".source", "")).read_bytes() for n in side)


# ---- a second run, and a source that does not hold still


def test_second_run_on_a_complete_destination_changes_nothing(
    sample: Sample, made: Made, cli: Callable[..., Any]
) -> None:
    root = made("short", "int8")
    before = {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in root.rglob("*")}
    run = cli("convert", sample("short"), root, "--jobs", 1, "--json")
    assert run.exit_code == 0
    assert (run.json()["written"], run.json()["reused"]) == (0, 8)
    assert {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in root.rglob("*")} == before


def test_complete_destination_of_another_layout_is_refused(sample: Sample, made: Made) -> None:
    before = tree(made("short", "int8"))
    with pytest.raises(Refused) as caught:
        convert(sample("short"), made("short", "int8"), experts="mxfp4")
    assert [f.code for f in caught.value.findings] == ["dst.not-empty"]
    assert tree(made("short", "int8")) == before


@pytest.mark.parametrize("where", ["source", "inside", "around"])
def test_destination_that_overlaps_the_source_is_refused(sample: Sample, tmp_path: Path, where: str) -> None:
    source = tmp_path / "a" / "b"
    shutil.copytree(sample("short"), source)
    target = {"source": source, "inside": source / "out", "around": tmp_path / "a"}[where]
    before = tree(tmp_path)
    with pytest.raises(Refused) as caught:
        convert(source, target)
    assert [f.code for f in caught.value.findings] == ["dst.inside-source"]
    assert tree(tmp_path) == before


@pytest.mark.parametrize("moment", ["before", "after"])
def test_source_that_changes_during_the_conversion_is_refused(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Touched between plan and read, or while a shard is being read: nothing of that shard is left."""
    source, victim = tmp_path / "source", "model-00003-of-00008.safetensors"
    shutil.copytree(sample("short"), source)
    real = Transformer.run

    def run(self: Transformer, steps: Any) -> Any:
        outcome = real(self, steps)
        at = "model-00002-of-00008.safetensors" if moment == "before" else victim
        if steps[0].sources[0].shard == at:
            os.utime(source / victim, ns=(1, 1))
        return outcome

    monkeypatch.setattr(Transformer, "run", run)
    with pytest.raises(Refused) as caught:
        convert(source, tmp_path / "out")
    assert [(f.code, f.where) for f in caught.value.findings] == [("src.changed", victim)]
    left = [p.name for p in (tmp_path / "out").rglob("*") if p.name.startswith(victim)]
    assert left == [] and not (tmp_path / "out" / INDEX).exists()


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        (Limits(max_relative_error=1e-6), "value.relative-error"),
        (Limits(min_exact=0.9999999), "value.exact-share"),
    ],
)
def test_limits_refuse_a_repack_that_loses_too_much_and_leave_no_index(
    sample: Sample, tmp_path: Path, limits: Limits, code: str
) -> None:
    with pytest.raises(Refused) as caught:
        convert(sample("plain"), tmp_path / "out", limits=limits)
    assert {f.code for f in caught.value.findings} == {code}
    assert not (tmp_path / "out" / INDEX).exists()
    # The same command with other limits is the same plan and continues.
    assert convert(sample("plain"), tmp_path / "out").manifest is not None


def test_progress_counts_every_source_byte_that_was_announced(sample: Sample, tmp_path: Path) -> None:
    done: list[int] = []
    announced: list[int] = []
    convert(
        sample("vision"),
        tmp_path / "out",
        experts="mxfp4",
        progress=done.append,
        on_plan=lambda plan, count: announced.append(count),
    )
    assert announced == [sum(done)]
