"""The table against full dumps of the releases and against totals typed from the published figures."""

from __future__ import annotations

import gc
import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dsv4convert.geometry import identify, official_geometry, read_geometry
from dsv4convert.header import TensorInfo
from dsv4convert.names import (
    Layout,
    Unit,
    expected_units,
    lookup,
    official_shard,
    official_shard_count,
)
from dsv4convert.releases import RELEASES
from dsv4convert.survey import detect_layout
from dsv4convert.synth import Recipe, make_config
from dsv4convert.table import TABLE, Role, Storage
from dsv4convert.writer import encode_header, in_data_order

DUMPS = Path(__file__).parent / "data" / "manifests"
DUMPED = ["deepseek-v4-flash", "deepseek-v4-flash-0731", "deepseek-v4-pro", "deepseek-v4.1-flash"]
FLASH = "deepseek-v4-flash-0731"
VISION = "deepseek-v4-flash-vision-exp"
V41 = "deepseek-v4.1-flash"

# Release -> shards, tensors, payload bytes, bytes of all shard files (None: never published).
OFFICIAL = {
    "deepseek-v4-flash": (46, 69_187, 159_609_485_896, 159_617_149_040),
    "deepseek-v4-flash-0731": (48, 72_317, 166_878_536_440, 166_886_535_336),
    "deepseek-v4-flash-vision-exp": (48, 72_633, 167_811_372_792, None),
    # 510,296,708,312 were published: the key order of the headers of shards 47 and 48 is not known, and
    # with it they are 32 and 40 bytes longer than ours.
    "deepseek-v4.1-flash": (48, 96_085, 510_286_023_000, 510_296_708_240),
    "deepseek-v4-pro": (64, 145_116, 864_704_792_696, 864_721_029_744),
    "deepseek-v4-pro-0813": (66, 149_782, 892_727_580_904, 892_744_322_880),
}
# Release -> tensors, data bytes, tensors of draft layers (None: never published) with `--experts mxfp4`.
MXFP4 = {
    "deepseek-v4-flash": (68_812, 165_632_138_824, None),
    "deepseek-v4-flash-0731": (71_927, 173_182_190_584, 4_680),
    "deepseek-v4-flash-vision-exp": (72_243, 174_115_026_936, 4_683),
    "deepseek-v4.1-flash": (95_730, 517_680_168_792, 2_376),
    "deepseek-v4-pro": (144_588, 887_872_713_848, None),
    "deepseek-v4-pro-0813": (149_239, 916_678_740_520, None),
}


@pytest.fixture(autouse=True)
def _rare_collections() -> Iterator[None]:
    """Dumps are large trees without cycles: the collector would take half of the time."""
    before = gc.get_threshold()
    gc.set_threshold(1_000_000)
    yield
    gc.set_threshold(*before)


@cache
def units(release: str) -> tuple[Unit, ...]:
    return tuple(expected_units(official_geometry(release)))


@cache
def predicted(release: str, layout: Layout) -> dict[str, dict[str, Any]]:
    g = official_geometry(release)
    count = official_shard_count(g)
    found: dict[str, dict[str, Any]] = {}
    for unit in units(release):
        shard = f"model-{official_shard(g, unit):05d}-of-{count:05d}.safetensors"
        for name, (dtype, shape) in unit.stored(layout).items():
            assert name not in found, "a name is listed twice"
            found[name] = {"dtype": dtype, "shape": list(shape), "shard": shard}
    return found


def dump(name: str) -> dict[str, dict[str, Any]]:
    with gzip.open(DUMPS / f"{name}.json.gz") as file:
        loaded: dict[str, dict[str, Any]] = json.load(file)
    return loaded


@pytest.mark.parametrize("release", DUMPED)
@pytest.mark.parametrize(
    ("layout", "suffix"), [(Layout.OFFICIAL, ""), (Layout.MXFP4, ".mxfp4-bf16")], ids=["official", "mxfp4"]
)
def test_table_gives_names_dtypes_shapes_and_shards_of_the_dump(
    release: str, layout: Layout, suffix: str
) -> None:
    ours, theirs = predicted(release, layout), dump(release + suffix)
    assert ours.keys() == theirs.keys()
    assert {n: (ours[n], theirs[n]) for n in ours if ours[n] != theirs[n]} == {}


@pytest.mark.parametrize("release", RELEASES)
def test_table_reproduces_the_published_totals(release: str) -> None:
    shards: dict[int, list[tuple[str, str, tuple[int, ...]]]] = {}
    for unit in units(release):
        members = shards.setdefault(official_shard(official_geometry(release), unit), [])
        members += [(n, d, s) for n, (d, s) in unit.stored(Layout.OFFICIAL).items()]
    payload = sum(u.nbytes(Layout.OFFICIAL) for u in units(release))
    files = payload + sum(len(encode_header(in_data_order(members))) for members in shards.values())
    shard_count, tensors, wanted_payload, wanted_files = OFFICIAL[release]
    assert sorted(shards) == list(range(1, shard_count + 1))
    assert sum(map(len, shards.values())) == tensors
    assert payload == wanted_payload
    assert wanted_files in (files, None)


@pytest.mark.parametrize("release", RELEASES)
def test_table_reproduces_the_totals_of_mxfp4_conversions(release: str) -> None:
    names = [n for u in units(release) for n in u.stored(Layout.MXFP4)]
    tensors, data, draft = MXFP4[release]
    assert (len(names), sum(u.nbytes(Layout.MXFP4) for u in units(release))) == (tensors, data)
    assert draft in (sum(n.startswith("mtp.") for n in names), None)


def test_table_gives_the_totals_of_the_int8_conversion_of_0731() -> None:
    """35,328 experts of three tensors each instead of two: 71,927 + 35,328 = 107,255."""
    names = [n for u in units(FLASH) for n in u.stored(Layout.INT8)]
    assert len(set(names)) == len(names) == 107_255
    assert sum(u.nbytes(Layout.INT8) for u in units(FLASH)) == 166_622_299_128


def test_table_gives_the_dtypes_of_the_mxfp4_conversion_of_0731() -> None:
    found = Counter(row["dtype"] for row in predicted(FLASH, Layout.MXFP4).values())
    assert found == {"BF16": 835, "F32": 433, "F8_E8M0": 35_328, "I64": 3, "I8": 35_328}


@pytest.mark.parametrize("release", RELEASES)
def test_lookup_of_every_name_gives_the_row_it_was_made_from(release: str) -> None:
    wrong = []
    for unit in units(release):
        for name in unit.stored(Layout.OFFICIAL):
            match = lookup(name)
            if match is None or (match.row.pattern, match.row.role) != (unit.row.pattern, unit.row.role):
                wrong.append(name)
    assert wrong == []


@pytest.mark.parametrize("release", RELEASES)
def test_rows_that_share_a_name_never_hold_for_one_geometry(release: str) -> None:
    """Judged with a matcher of the test's own: a name of a release matches one row of that release."""
    first = {u.row.pattern: u for u in reversed(units(release))}.values()
    quantized = r"\.(weight|scale|weight_codes|weight_shift2|channel_scale)"
    rules = []
    for row in {id(u.row): u.row for u in units(release)}.values():
        text = re.escape(row.pattern).replace(r"\{b\}", "(layers|mtp)").replace(r"\#", r"(0|[1-9]\d*)")
        rules.append(re.compile(text + ("" if row.storage is Storage.PLAIN else quantized)))
    names = {n for u in first for layout in Layout for n in u.stored(layout)}
    assert {n: hits for n in names if (hits := sum(bool(r.fullmatch(n)) for r in rules)) != 1} == {}


@pytest.mark.parametrize("suffix", ["weight_codes", "weight_shift2", "channel_scale"])
def test_lookup_knows_the_tensors_of_int8_experts(suffix: str) -> None:
    match = lookup(f"mtp.1.ffn.experts.255.w2.{suffix}")
    assert match is not None and (match.row.role, match.suffix) == (Role.ROUTED_EXPERT, f".{suffix}")
    assert lookup(f"mtp.1.ffn.shared_experts.w2.{suffix}") is None


@pytest.mark.parametrize(
    "name",
    [
        "model.embed.weight",
        "embed",
        "layers.00.attn.wq_a.weight",
        "layers.-1.attn.wq_a.weight",
        "layers.0.attn.wq_a.weight_scale_inv",
        "layers.0.attn.wq_a",
        "layers.0.ffn.experts.1.w4.weight",
        "layers.0.ffn.experts.²w1.weight",
        "layers.\u0661.attn.wq_a.weight",
        "aligner.gate_up_proj.weight",
        "vision.0.attn.wq_a.weight",
        "",
        ".",
    ],
)
def test_lookup_of_a_name_near_a_real_one_finds_nothing(name: str) -> None:
    assert lookup(name) is None


def test_every_row_is_used_by_a_release() -> None:
    used = {id(u.row) for release in RELEASES for u in units(release)}
    assert [row.pattern for row in TABLE if id(row) not in used] == []


@pytest.mark.parametrize("release", RELEASES)
def test_identify_knows_the_config_of_every_release(release: str) -> None:
    found = identify(official_geometry(release))
    assert found is not None and found.key == release


# ---- the traps of the published configs and names


@pytest.mark.parametrize(("release", "stages"), [(FLASH, 3), ("deepseek-v4-pro-0813", 3), (V41, 3)])
def test_stage_count_comes_from_dspark_not_from_num_nextn_predict_layers(release: str, stages: int) -> None:
    """0731 and Pro-0813 say ``num_nextn_predict_layers: 1`` and ship three stages."""
    names = predicted(release, Layout.OFFICIAL)
    assert {n.split(".")[1] for n in names if n.startswith("mtp.")} == {str(i) for i in range(stages)}


def test_stage_count_of_the_preview_is_one() -> None:
    names = predicted("deepseek-v4-flash", Layout.OFFICIAL)
    assert {n.split(".")[1] for n in names if n.startswith("mtp.")} == {"0"}
    assert sum(n.startswith("mtp.") for n in names) == 1_575


@pytest.mark.parametrize(("release", "with_bias"), [(FLASH, False), (VISION, True)])
def test_hash_layers_have_a_bias_only_in_vision_exp(release: str, with_bias: bool) -> None:
    names = predicted(release, Layout.OFFICIAL)
    for layer in range(4):
        assert (f"layers.{layer}.ffn.gate.bias" in names) is (with_bias or layer == 3)
        assert (f"layers.{layer}.ffn.gate.tid2eid" in names) is (layer < 3)
        assert (f"layers.{layer}.ffn.gate.bias_vl" in names) is with_bias


def test_token_routes_are_int64() -> None:
    rows = {n: r for n, r in predicted(FLASH, Layout.OFFICIAL).items() if "tid2eid" in n}
    assert [(r["dtype"], r["shape"]) for r in rows.values()] == 3 * [("I64", [129280, 6])]


def test_names_without_a_dot_are_known() -> None:
    dotless = {n for n in predicted(VISION, Layout.OFFICIAL) if "." not in n}
    heads = {"hc_head_fn", "hc_head_base", "hc_head_scale"}
    assert dotless == heads | {"image_start", "image_end", "image_newline", "image_pad"}
    assert {n for n in predicted(V41, Layout.OFFICIAL) if "." not in n} == {
        "image_start",
        "image_end",
        "image_newline",
    }


def test_vision_exp_adds_316_tensors_to_0731_and_takes_none_away() -> None:
    plain, vision = predicted(FLASH, Layout.OFFICIAL), predicted(VISION, Layout.OFFICIAL)
    added = Counter(
        re.sub(r"\.\d+\.", ".", n).split(".ffn.")[-1].partition(".")[0] for n in vision.keys() - plain.keys()
    )
    assert plain.keys() <= vision.keys()
    assert all(
        vision[n]["dtype"] == row["dtype"] and vision[n]["shape"] == row["shape"] for n, row in plain.items()
    )
    # 46 bias_vl and the 3 biases of the hash layers
    tokens = {"image_start": 1, "image_end": 1, "image_newline": 1, "image_pad": 1}
    assert added == {"vision": 259, "aligner": 4, "gate": 49, **tokens}


def test_dense_blocks_of_v41_are_32x32_and_its_engram_tables_1x32() -> None:
    found = {(u.row.storage, u.block) for u in units(V41) if u.row.storage is not Storage.PLAIN}
    assert found == {
        (Storage.DENSE_FP8, (32, 32)),
        (Storage.TABLE_FP8, (1, 32)),
        (Storage.EXPERT_MXFP4, (1, 32)),
    }
    rows = predicted(V41, Layout.OFFICIAL)
    assert rows["layers.0.attn.wq_a.scale"]["shape"] == [40, 160]
    assert rows["layers.1.engram.embed.scale"]["shape"] == [384_006_168, 8]
    assert rows["layers.14.engram.embed.weight"]["shape"] == [384_016_682, 256]
    assert rows["mtp.0.ffn.gate.weight"]["shape"] == [128, 5120]


@pytest.mark.parametrize("layout", [Layout.MXFP4, Layout.INT8])
def test_engram_tables_of_v41_stay_fp8_in_every_layout(layout: Layout) -> None:
    official = predicted(V41, Layout.OFFICIAL)
    ours = predicted(V41, layout)
    tables = [n for n in official if ".engram.embed." in n]
    assert len(tables) == 4
    assert [ours[n] for n in tables] == [official[n] for n in tables]
    assert ours["layers.1.engram.wkv.weight"]["dtype"] == "BF16"


@pytest.mark.parametrize("layout", Layout)
def test_a_tower_beside_few_layers_decides_about_no_layout(layout: Layout) -> None:
    """The tower's 64 matrices `attn.w*` are BF16 in every layout; a slice of the text model has fewer."""
    config = make_config(Recipe(VISION, "slice", layers=3, experts=2))
    geometry, _ = read_geometry(config)
    assert geometry is not None and geometry.vision is not None and geometry.vision.layers == 32
    stored = {
        name: TensorInfo(name, dtype, shape, "", 0, 0)
        for unit in expected_units(geometry)
        for name, (dtype, shape) in unit.stored(layout).items()
    }
    assert detect_layout(stored) is layout


def test_markov_heads_whose_names_contain_w1_are_no_experts() -> None:
    match = lookup("mtp.2.markov_head.markov_w1.weight")
    assert match is not None and match.row.role is Role.DRAFT and match.row.storage is Storage.PLAIN
