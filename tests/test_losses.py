"""Loss figures: the summary of the manifest, the table at the end of `convert`, the limits."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsv4convert.cli.pages import LOSSES_SHOWN
from tests.conftest import Ran
from tests.samples import int8_values, mxfp4_values, read_json, tensors

Sample = Callable[[str], Path]
Cli = Callable[..., Ran]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.samples import make_sample

    return make_sample(tmp_path_factory.mktemp("losses"), "short")


@pytest.fixture(scope="module")
def converted(source: Path) -> Path:
    from dsv4convert.convert import convert

    convert(source, source.parent / "out")
    return source.parent / "out"


def measured(source: Path, out: Path) -> dict[tuple[str, str], dict[str, tuple[float, int]]]:
    """Return (layer, projection) -> matrix -> relative error and changed weights, from stored bytes alone."""
    before, after = tensors(source), tensors(out)
    found: dict[tuple[str, str], dict[str, tuple[float, int]]] = {}
    for name, (_, shape, codes) in before.items():
        if not re.search(r"\.ffn\.experts\.\d+\.w[123]\.weight$", name):
            continue
        n, half = shape
        base = name.removesuffix(".weight")
        right = mxfp4_values(codes, before[f"{base}.scale"][2], n, 2 * half)
        parts = [after[base + s][2] for s in (".weight_codes", ".weight_shift2", ".channel_scale")]
        error = int8_values(*parts, n, 2 * half) - right
        relative = float(np.sqrt((error**2).sum() / (right**2).sum()))
        layer = re.match(r"\w+\.\d+", name)
        assert layer
        found.setdefault((layer[0], base[-2:]), {})[base] = relative, int((error != 0).sum())
    return found


def test_losses_are_those_of_the_stored_weights(source: Path, converted: Path) -> None:
    stated = read_json(converted / "dsv4convert.json")["losses"]
    wanted = measured(source, converted)
    assert {(layer, part) for layer, parts in stated.items() for part in parts} == set(wanted)
    for (layer, part), matrices in wanted.items():
        row = stated[layer][part]
        worst = max(matrices, key=lambda m: matrices[m][0])
        assert row["matrices"] == len(matrices)
        assert row["exact_matrices"] == sum(changed == 0 for _, changed in matrices.values())
        assert row["codes_changed"] == sum(changed for _, changed in matrices.values())
        assert row["max_relative_error"] == pytest.approx(matrices[worst][0], rel=1e-12)
        assert row["worst_matrix"] == (worst if row["codes_changed"] else None)
    assert sum(row["codes_changed"] for parts in stated.values() for row in parts.values()) > 0


def test_table_shows_the_worst_rows_in_order(cli: Cli, source: Path, converted: Path, tmp_path: Path) -> None:
    seen = cli("convert", source, tmp_path / "out", "--jobs", 1)
    losses = read_json(converted / "dsv4convert.json")["losses"]
    lossy = {(la, p): r for la, parts in losses.items() for p, r in parts.items() if r["codes_changed"]}
    lines = seen.out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("  losses "))
    table = [line.split() for line in lines[start + 1 : start + 1 + LOSSES_SHOWN]]
    worst = sorted(lossy, key=lambda k: -lossy[k]["max_relative_error"])[:LOSSES_SHOWN]
    assert [tuple(row[:2]) for row in table] == worst
    assert f"{len(lossy) - LOSSES_SHOWN} more in `losses`" in lines[start + 1 + LOSSES_SHOWN]


def test_nothing_is_shown_where_nothing_rounded(cli: Cli, source: Path, tmp_path: Path) -> None:
    import shutil

    from tests.toy import Toy

    shutil.copytree(source, tmp_path / "flat")
    Toy(tmp_path / "flat").flatten()
    seen = cli("convert", tmp_path / "flat", tmp_path / "out", "--jobs", 1)
    assert "experts " in seen.out and "losses" not in seen.out
    stated = read_json(tmp_path / "out" / "dsv4convert.json")["losses"]
    rows = [r for parts in stated.values() for r in parts.values()]
    assert {(r["codes_changed"], r["max_relative_error"], r["worst_matrix"]) for r in rows} == {
        (0, 0.0, None)
    }
    kept = cli("convert", tmp_path / "flat", tmp_path / "kept", "--jobs", 1, "--experts", "mxfp4")
    assert "losses" not in kept.out
    assert read_json(tmp_path / "kept" / "dsv4convert.json")["losses"] is None


_LIMITS: dict[str, tuple[str, str, str, Callable[[Any], float]]] = {
    "--max-relative-error": (
        "value.relative-error",
        "max_relative_error",
        "at most ",
        lambda worst: worst / 2,
    ),
    "--min-exact": ("value.exact-share", "min_exact_share", "at least ", lambda w: (1 + w) / 2),
}


@pytest.mark.parametrize("option", _LIMITS)
def test_limit_names_tensor_limit_found_and_what_to_do(
    cli: Cli, source: Path, converted: Path, tmp_path: Path, option: str
) -> None:
    code, key, words, stricter = _LIMITS[option]
    rows = [r for p in read_json(converted / "dsv4convert.json")["losses"].values() for r in p.values()]
    worst = (max if "error" in key else min)(r[key] for r in rows)
    limit = f"{stricter(worst):.6f}"
    arguments = ("convert", source, tmp_path / "out", "--jobs", 1, option)
    seen = cli(*arguments, limit, "--json")
    assert seen.exit_code == 3
    for found in seen.json()["findings"]:
        assert found["code"] == code and re.fullmatch(r"\w+\.\d+\.ffn\.experts\.\d+\.w[123]", found["where"])
        assert found["expected"].startswith(words) and float(found["found"]) != 0
        assert option in found["hint"] and "`--experts mxfp4`, into an empty directory" in found["hint"]
    # A limit that the worst matrix just keeps is none.
    edge = np.nextafter(worst, 1 if "error" in key else 0)
    assert cli(*arguments, repr(float(edge))).exit_code == 0


def test_rounding_rules_of_the_benchmark_rank_as_its_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(__file__).parent.parent / "benchmarks" / "rounding_rules.py"
    spec = importlib.util.spec_from_file_location("rounding_rules", path)
    assert spec and spec.loader
    rules = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rules)
    monkeypatch.setattr(rules, "ROWS", 32)
    for kind in (rules.gaussian, rules.spread_blocks, rules.heavy_tails, rules.stale_scales):
        codes, scales = rules.mxfp4(kind(np.random.default_rng(0)))
        weights = rules.decoded(codes, scales)
        errors = {
            name: float(((rule(codes, scales) - weights) ** 2).sum()) for name, rule in rules.RULES.items()
        }
        mine, once, up, even, _ = errors.values()
        assert mine <= once == pytest.approx(up) == pytest.approx(even)
        assert (mine == 0) == (kind in (rules.gaussian, rules.stale_scales))
