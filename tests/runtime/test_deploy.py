"""The files to start a service from: valid for the programs that read them, and true to the command line."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from dsv4convert.cli import main
from tests.fakeserving import ROOT

DEPLOY = ROOT / "docs" / "deploy"
UNIT, SCRIPT, IMAGE = (DEPLOY / name for name in ("dsv4convert.service", "serve.sbatch", "Dockerfile"))
_PROGRAM = "/opt/sglang/bin/dsv4convert"


def verified(unit: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    # It looks whether the program is there.
    path = tmp_path / UNIT.name
    path.write_text(unit.replace(_PROGRAM, shutil.which("true") or "/bin/true"))
    return subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
def test_unit_is_one(tmp_path: Path) -> None:
    good = verified(UNIT.read_text(), tmp_path)
    assert (good.returncode, good.stderr) == (0, "")
    bad = verified(UNIT.read_text().replace("TimeoutStopSec=150s", "TimeoutStopSec=soon"), tmp_path)
    assert "soon" in bad.stderr


def test_script_is_one() -> None:
    assert subprocess.run(["bash", "-n", SCRIPT], capture_output=True).returncode == 0
    directives = re.findall(r"^#SBATCH --([a-z-]+)=\S+$", SCRIPT.read_text(), re.M)
    assert len(directives) == SCRIPT.read_text().count("#SBATCH") and "signal" in directives


def test_times_leave_the_decision_to_serve() -> None:
    """systemd must not lose patience before `serve` does: its defaults, in seconds."""
    defaults = {p.name: p.default for p in main.commands["serve"].params}
    text = UNIT.read_text()
    start = int(re.search(r"^TimeoutStartSec=(\d+)min$", text, re.M)[1]) * 60  # type: ignore[index]
    stop = int(re.search(r"^TimeoutStopSec=(\d+)s$", text, re.M)[1])  # type: ignore[index]
    # After its patience with requests `serve` waits half a minute for processes that were killed.
    assert start > defaults["ready_timeout"] and stop > defaults["stop_timeout"] + 30


def joined(text: str) -> str:
    return re.sub(r"\\\n\s*", "", text)


@pytest.mark.parametrize("path", [UNIT, SCRIPT], ids=lambda p: p.name)
def test_options_exist(path: Path) -> None:
    (line,) = [x for x in joined(path.read_text()).splitlines() if " serve " in x and not x.startswith("#")]
    words = shlex.split(line)
    known = {option for p in main.commands["serve"].params for option in p.opts}
    assert {w for w in words if w.startswith("--")} <= known
    assert "--api-key-file" in words and "--tp" in words


def test_image_adds_one_layer_and_asks_no_index() -> None:
    lines = [x for x in joined(IMAGE.read_text()).splitlines() if x and not x.startswith("#")]
    words = [line.split()[0] for line in lines]
    assert words == ["FROM", "COPY", "RUN", "ENV", "WORKDIR", "VOLUME", "EXPOSE", "ENTRYPOINT", "CMD"]
    run = lines[words.index("RUN")]
    assert "pip install --no-index --no-deps" in run and "pip download" not in run
    assert lines[0] == "FROM lmsysorg/sglang:v0.5.16-cu130"
