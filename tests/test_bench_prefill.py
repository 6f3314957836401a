"""`benchmarks/bench_prefill.py` against servers that answer by rules."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import bench_prefill
from tests.fakechat import KEY, FakeChat


@pytest.fixture
def servers() -> Iterator[list[FakeChat]]:
    with FakeChat() as one, FakeChat() as other:
        yield [one, other]


def _words(servers: list[FakeChat], folder: Path) -> list[str]:
    (folder / "key").write_text(KEY)
    named = [f"{name}={server.url}" for name, server in zip(("off", "on"), servers, strict=True)]
    more = ["--api-key-file", f"{folder / 'key'}", "--ids", "1000", "2000", "--out", f"{folder / 'out.json'}"]
    return [*named, *more, "--tokens", "96", "64", "--rounds", "3"]


def test_every_server_is_timed_for_every_length(
    servers: list[FakeChat], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_prefill.main(_words(servers, tmp_path)) == 0
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [(row["server"], row["tokens"]) for row in rows] == [
        ("off", 64),
        ("on", 64),
        ("off", 96),
        ("on", 96),
    ]
    for row in rows:
        assert len(row["seconds"]) == row["rounds"] == row["same"] == 3
        assert 0 < row["min"] <= row["median"] <= row["max"] and row["cached"] == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)


def test_a_prompt_is_new_in_every_round_and_equal_for_all() -> None:
    assert bench_prefill._prompt(0, 64, 5, 9) == bench_prefill._prompt(0, 64, 5, 9)
    prompts = {tuple(bench_prefill._prompt(*step, 5, 90)) for step in bench_prefill._order(3, (64, 96))}
    assert sorted(map(len, prompts)) == [64] * 4 + [96] * 4


def test_another_first_token_and_a_prefix_from_a_cache_show() -> None:
    def row(seconds: float, token: int, cached: int = 0) -> dict[str, float]:
        return {"seconds": seconds, "token": token, "cached": cached}

    rows = {("a", 8): [row(3, 1), row(1, 2), row(2, 3)], ("b", 8): [row(1, 1), row(1, 9, 4), row(1, 3)]}
    first, second = bench_prefill.summarize(rows, "a")
    assert (first["median"], first["same"], first["cached"]) == (2, 3, 0)
    assert (second["median"], second["same"], second["cached"]) == (1, 2, 4)


def test_a_server_needs_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_prefill.main(["http://127.0.0.1:30000"])
    assert "a server is NAME=URL" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no server answers here"):
        bench_prefill.main(["a=http://127.0.0.1:9"])
    with pytest.raises(SystemExit, match="key: cannot be read"):
        bench_prefill.main(["a=http://127.0.0.1:9", "--api-key-file", str(tmp_path / "key")])
