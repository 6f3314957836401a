"""Sparse checkpoints with the true names, shapes and file sizes of the releases, through the commands."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsv4convert.checkpoint import open_checkpoint
from dsv4convert.plan import plan
from dsv4convert.validate.structure import check_original
from tests.test_names import MXFP4, OFFICIAL

FLASH = "deepseek-v4-flash-0731"
SIZES = Path(__file__).parent / "data" / "releases" / f"{FLASH}.sha256.json"

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _rare_collections() -> Iterator[None]:
    """Plans are large trees without cycles: the collector would take half of the time."""
    before = gc.get_threshold()
    gc.set_threshold(1_000_000)
    yield
    gc.set_threshold(*before)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return ``full(release)``: a sparse checkpoint, made once."""
    from dsv4convert.synth import Recipe, synthesize

    root = tmp_path_factory.mktemp("full")

    def make(release: str) -> Path:
        if not (root / release).exists():
            synthesize(root / release, Recipe(release=release, scale="full"))
        return root / release

    return make


def test_full_0731_has_the_file_sizes_of_the_official_shards(full: Callable[[str], Path]) -> None:
    published = json.loads(SIZES.read_bytes())["files"]
    wanted = {name: row["bytes"] for name, row in published.items() if name.endswith(".safetensors")}
    found = {p.name: p.stat().st_size for p in full(FLASH).glob("*.safetensors")}
    assert len(found) == 48
    assert found == wanted
    used = sum(p.stat().st_blocks * 512 for p in full(FLASH).iterdir())
    assert used < 64 << 20, "the files are meant to be sparse"


@pytest.mark.parametrize("release", OFFICIAL)
def test_full_release_is_a_clean_original_and_plans_to_the_known_totals(
    full: Callable[[str], Path], release: str
) -> None:
    shards, tensors, payload, files = OFFICIAL[release]
    checkpoint = open_checkpoint(full(release))
    report = check_original(checkpoint)
    assert report.findings == ()
    facts = report.facts
    assert (facts["release"], facts["layout"]) == (release, "official")
    assert (facts["shards"], facts["tensors"], facts["data_bytes"]) == (shards, tensors, payload)
    assert files in (facts["file_bytes"], None)

    made = plan(checkpoint, "mxfp4")
    wanted_tensors, data, draft = MXFP4[release]
    assert (len(made.shards), made.tensors, made.data_bytes) == (shards, wanted_tensors, data)
    assert draft in (made.mtp_tensors, None)


def test_full_0731_passes_the_command_without_a_finding(
    full: Callable[[str], Path], cli: Callable[..., Any]
) -> None:
    report = cli("original", full(FLASH), "--strict")
    assert report.exit_code == 0
    assert report.err == ""
    assert "48 shards, 72,317 tensors, 166,878,536,440 data bytes" in report.out
    assert report.out.splitlines()[-1] == "structure OK, contents not verified"


def test_full_0731_plans_to_the_numbers_of_the_mxfp4_layout(
    full: Callable[[str], Path], cli: Callable[..., Any]
) -> None:
    found = cli("plan", full(FLASH), "--experts", "mxfp4", "--json").json()
    assert found["shards"] == 48
    assert found["tensors"] == 71_927
    assert found["data_bytes"] == 173_182_190_584
    assert found["expert_weights"] == 35_328
    assert found["mtp_tensors"] == 4_680
    assert found["source"]["file_bytes"] == 166_886_535_336


def test_full_0731_plans_to_the_numbers_of_the_int8_layout(
    full: Callable[[str], Path], cli: Callable[..., Any]
) -> None:
    """The draft: 3 stages of 256 x 3 experts, one tensor more each: 4,680 + 2,304."""
    found = cli("plan", full(FLASH), "--experts", "int8", "--json").json()
    assert found["shards"] == 48
    assert found["tensors"] == 107_255
    assert found["data_bytes"] == 166_622_299_128
    assert found["expert_weights"] == 35_328
    assert found["mtp_tensors"] == 6_984
    assert (found["packing"], found["rounding"]) == ("g128-split64", "nearest-ties-to-smaller")
