"""Installing beside SGLang: nothing of the environment changes, and no package index is asked.

The environment is a bare one whose metadata say what SGLang 0.5.16 pins; with it comes `click`, which
SGLang's `uvicorn` needs, and nothing else that could be imported.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import click
import pytest

from tests.fakeserving import ROOT, VERSIONS, FakeServing
from tests.toy import Toybox

#: An index that nobody serves: whoever asks it fails.
_NO_INDEX = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": os.devnull}

pytestmark = pytest.mark.slow


def environ() -> dict[str, str]:
    kept = {
        k: v
        for k, v in os.environ.items()
        if k not in ("PYTHONPATH", "PIP_CONSTRAINT", "PIP_EXTRA_INDEX_URL")
    }
    return {**kept, **_NO_INDEX}


def run(*command: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        [str(word) for word in command], capture_output=True, text=True, timeout=300, env=environ(), **options
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy, because a build leaves files beside its sources."""
    source = tmp_path_factory.mktemp("source")
    for name in ("dsv4convert", "kernels_ref"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    out = source / "dist"
    done = run(
        sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out, source
    )
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("dsv4convert-*.whl")
    return built


@pytest.fixture(scope="module")
def beside(
    tmp_path_factory: pytest.TempPathFactory, wheel: Path
) -> tuple[Path, dict[str, bytes], dict[str, bytes]]:
    """Return an environment of SGLang with ours in it, and its files before and after."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    shutil.copytree(Path(click.__file__).parent, site / "click", ignore=shutil.ignore_patterns("__pycache__"))
    fake = FakeServing(home / "fake")
    for path in fake.root.glob("*.dist-info"):
        shutil.move(path, site / path.name)
    before = files(site)
    pip = (sys.executable, "-m", "pip", "--python", home / "bin" / "python")
    done = run(*pip, "install", "-q", "--no-deps", "--no-compile", wheel)
    assert done.returncode == 0, done.stderr
    return home, before, files(site)


def files(site: Path) -> dict[str, bytes]:
    paths = (p for p in site.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return {p.relative_to(site).as_posix(): p.read_bytes() for p in paths}


def test_nothing_of_sglang_changes(beside: tuple[Path, dict[str, bytes], dict[str, bytes]]) -> None:
    home, before, after = beside
    assert {name: after.get(name) for name in before} == before
    added = {name.partition("/")[0] for name in after.keys() - before.keys()}
    assert {name.partition("-")[0] for name in added} == {"dsv4convert", "kernels_ref"}
    frozen = run(sys.executable, "-m", "pip", "--python", home / "bin" / "python", "freeze").stdout.lower()
    for name, version in VERSIONS.items():
        assert f"{name}=={version}" in frozen.replace("_", "-")


def test_with_its_dependencies_the_index_is_asked(wheel: Path, tmp_path: Path) -> None:
    """The legal twin's opposite: without ``--no-deps`` pip looks for what is missing."""
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    pip = (sys.executable, "-m", "pip", "--python", tmp_path / "bare" / "bin" / "python")
    assert run(*pip, "install", "-q", wheel).returncode != 0


def test_installed_package_finds_its_shim_and_needs_click_alone(
    beside: tuple[Path, dict[str, bytes], dict[str, bytes]], tmp_path: Path
) -> None:
    home, _, _ = beside
    toy = Toybox(tmp_path).original("int8")
    program = home / "bin" / "dsv4convert"
    done = run(program, "preflight", toy, "--tp", "1", "--json", cwd=tmp_path)
    page = json.loads(done.stdout)
    assert done.returncode == 1, done.stderr
    # No SGLang and no torch can be imported there; everything else was found out.
    codes = sorted(f["code"] for f in page["findings"] if f["severity"] == "error")
    assert codes == ["gpu.unseen", "sglang.missing"]
    assert page["facts"]["shim"]["installed"] is True
    assert page["facts"]["sglang"]["versions"]["torch"] == VERSIONS["torch"]
    shown = run(program, "serve", toy, "--tp", "1", "--dry-run", cwd=tmp_path)
    assert shown.returncode == 0 and "site-packages/dsv4convert/runtime/activate" in shown.stdout
    # Installed, it needs no help to be found: the shim's directory is all that is put on the path.
    assert (
        "PYTHONPATH=" + shown.stdout.partition("PYTHONPATH=")[2].split()[0].partition(":")[0] in shown.stdout
    )
    assert ":" not in shown.stdout.partition("PYTHONPATH=")[2].split()[0]
    assert run(program, "keygen", tmp_path / "key", cwd=tmp_path).returncode == 0
