"""What a probe holds: true shapes, many experts, a small process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.bench_probe import PROMPT, make_sparse, watch
from dsv4convert.names import Layout
from dsv4convert.synth import Recipe, make_config


@pytest.mark.slow
def test_a_process_holds_one_table_or_a_few_weights_and_never_the_checkpoint(tmp_path: Path) -> None:
    """Hidden 4096, 3 layers, 32 experts: files of 5 GB and more, of which the largest tensor is 1 GB."""
    (tmp_path / "sparse").mkdir()
    settings = make_config(Recipe("deepseek-v4-flash-0731", "slice", layers=3, experts=32))
    prompt = PROMPT[:3]
    make_sparse(tmp_path / "sparse", Layout.INT8, settings, prompt)
    files = sum(path.stat().st_size for path in (tmp_path / "sparse").iterdir())
    command = [
        sys.executable,
        "-m",
        "dsv4convert",
        "probe",
        str(tmp_path / "sparse"),
        "--json",
        "--tokens",
        "1",
    ]
    command += ["--ids", ",".join(map(str, prompt)), "--golden", str(tmp_path / "golden.json")]
    result, used = watch(command)
    assert result["ok"] and len(result["layer_seconds"]) == 3
    assert files > 5 << 30
    # Embedding and head are read whole, one after the other, and the head is multiplied strip by strip.
    assert 1 << 30 < used["peak"] < 2 << 30
    # Of 32 experts of a layer, at most 18 are reached; nothing of the draft is read.
    assert used["read"] < files / 1.5
