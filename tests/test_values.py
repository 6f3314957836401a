"""Values of an official checkpoint: holes by page, histograms, agreement with `convert`, memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsv4convert.checkpoint import open_checkpoint
from dsv4convert.errors import Refused
from dsv4convert.survey import survey
from dsv4convert.validate import Contents, verify_original
from dsv4convert.validate.holes import PAGE, Holes
from dsv4convert.validate.values import check_values
from tests.faults import EXPERT, SHARED, WQ_A
from tests.toy import Toy, Toybox

Run = Callable[..., Any]


@pytest.fixture(scope="session")
def toybox(tmp_path_factory: pytest.TempPathFactory) -> Toybox:
    """Return the toys of this session."""
    return Toybox(tmp_path_factory.mktemp("toys"))


@pytest.fixture
def k(toybox: Toybox, tmp_path: Path) -> Toy:
    """Return a copy of the 0731 toy."""
    return toybox.copy("0731", tmp_path / "work")


def _pages_by_definition(data: bytes, start: int, only_zero: bool) -> list[int]:
    """Return the offsets of pages without content, one page of the file after the other."""
    found, before = [], None
    for at in range(-start % PAGE, len(data) - PAGE + 1, PAGE):
        page = data[at : at + PAGE]
        plain = page == page[:8] * (PAGE // 8)
        if page == bytes(PAGE) or (not only_zero and (plain or page == before)):
            found.append(at)
        before = page
    return found


@pytest.mark.parametrize("only_zero", [False, True])
@pytest.mark.parametrize("strip", [700, 4096, 5000, 12288, 100_000])
def test_holes_are_the_pages_of_the_file_whatever_the_strips(
    rng: np.random.Generator, strip: int, only_zero: bool
) -> None:
    for start in (0, 8, 4096, 5001):
        data = rng.integers(0, 256, 60_000, np.uint8)
        for _ in range(int(rng.integers(0, 4))):
            at, size = int(rng.integers(60_000)), int(rng.integers(9_000))
            data[at : at + size] = int(rng.integers(0, 2)) * 0x38
        data[30_000:38_192] = np.tile(data[30_000:34_096], 2)
        holes = Holes(start, only_zero=only_zero)
        for offset in range(0, len(data), strip):
            holes.look(data[offset : offset + strip], offset)
        expected = _pages_by_definition(data.tobytes(), start, only_zero)
        assert holes.pages == len(expected)
        if expected:
            assert (holes.first, holes.last_end) == (expected[0], expected[-1] + PAGE)


def test_holes_see_a_page_that_repeats_the_one_before(rng: np.random.Generator) -> None:
    page = rng.integers(0, 256, PAGE, np.uint8)
    holes = Holes(0)
    holes.look(page, 0)
    holes.look(page, PAGE)
    assert (holes.pages, holes.first) == (1, PAGE)


@pytest.mark.parametrize(
    ("name", "offset", "data"),
    [
        (f"{WQ_A}.scale", 0, b"\xff"),
        (f"{WQ_A}.scale", 0, b"\x02"),
        (f"{WQ_A}.scale", 0, b"\x03"),
        (f"{WQ_A}.scale", 0, b"\xf6"),
        (f"{WQ_A}.scale", 0, b"\xf7"),
        (f"{SHARED}.weight", 700, b"\x7f"),
        (f"{EXPERT}.scale", 0, b"\x00" * 8),
        (f"{EXPERT}.scale", 0, b"\x00"),
        (f"{EXPERT}.scale", 3, b"\xfd"),
        (f"{EXPERT}.scale", 3, b"\xfc"),
        (f"{EXPERT}.scale", 3, b"\xff"),
    ],
)
def test_errors_about_quantized_weights_are_those_of_convert(
    k: Toy, name: str, offset: int, data: bytes
) -> None:
    from dsv4convert.convert import convert

    k.flatten()
    k.poke(name, offset, data)
    seen = {
        (f.code, f.where, f.problem, f.found)
        for f in check_values(survey(open_checkpoint(k.root)), 100, 1, _ignore).findings
    }
    refused = set()
    try:
        convert(k.root, k.out)
    except Refused as error:
        refused = {(f.code, f.where, f.problem, f.found) for f in error.findings}
    assert seen == refused


def _ignore(count: int) -> None:
    return


def test_places_of_findings_are_those_of_the_bytes(k: Toy) -> None:
    k.poke("layers.0.ffn.gate.tid2eid", 8 * 5, (77).to_bytes(8, "little"))
    k.poke("layers.2.ffn.gate.bias", 4 * 3, b"\x00\x00\xc0\x7f")
    k.poke(f"{SHARED}.weight", 256 * 2 + 9, b"\xff\x7f")
    found = {
        f.where: f.found for f in check_values(survey(open_checkpoint(k.root)), 100, 1, _ignore).findings
    }
    assert found == {
        "layers.0.ffn.gate.tid2eid": "77, the first at [2, 1]",
        "layers.2.ffn.gate.bias": "NaN, the first at [3]",
        f"{SHARED}.weight": "the first at [2, 9]",
    }


def test_every_byte_of_every_tensor_is_read_once(k: Toy) -> None:
    counts: list[int] = []
    checkpoint = open_checkpoint(k.root)
    found = check_values(survey(checkpoint), 100, 1, counts.append)
    assert found.read == sum(counts) == sum(t.nbytes for t in checkpoint.tensors.values())


def test_histogram_of_scales_is_that_of_the_bytes(k: Toy) -> None:
    facts = verify_original(open_checkpoint(k.root), Contents(read_data=100)).facts["scales"]
    experts = b"".join(r[3] for n, r in k.tensors().items() if ".ffn.experts." in n and n.endswith(".scale"))
    assert facts["routed expert"] == {
        "bytes": len(experts),
        "low": min(experts),
        "high": max(experts),
        "zero": experts.count(0),
    }


def test_sample_reads_every_kind_and_says_what_it_left(k: Toy, cli: Run) -> None:
    seen = cli("original", k.root, "--read-data", "5", "--json")
    assert seen.exit_code == 0
    page = seen.json()
    assert any(line.startswith("values: the other 95 %") for line in page["not_checked"])
    # A weight that is alone in its kind is always part of the sample.
    k.poke("norm.weight", 0, b"\xc0\x7f")
    assert cli("original", k.root, "--read-data", "5").exit_code == 1


def test_values_wait_for_the_structure(k: Toy, cli: Run) -> None:
    k.drop("norm.weight")
    k.poke(f"{WQ_A}.scale", 0, b"\xff")
    page = cli("original", k.root, "--read-data", "--json").json()
    assert [f["code"] for f in page["findings"]] == ["unit.missing-tensor"]
    assert any(line.startswith("values: there are errors") for line in page["not_checked"])


@pytest.mark.slow
def test_worker_processes_find_the_same(k: Toy, cli: Run) -> None:
    k.poke(f"{SHARED}.weight", 9, b"\x7f")
    k.poke("norm.weight", 0, b"\xc0\x7f")
    pages = [cli("original", k.root, "--read-data", "--jobs", jobs, "--json").json() for jobs in (1, 2)]
    for page in pages:
        page["findings"].sort(key=lambda f: f["where"])
    assert pages[0] == pages[1] and len(pages[0]["findings"]) == 2


def test_pair_over_two_shards_is_read(k: Toy, cli: Run) -> None:
    k.move(f"{WQ_A}.scale", k.S(6))
    k.poke(f"{WQ_A}.scale", 0, b"\xfe")
    assert [f["code"] for f in cli("original", k.root, "--read-data", "--json").json()["findings"]] == [
        "value.inexact"
    ]
