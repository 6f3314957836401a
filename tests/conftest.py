"""What every test gets: its own random seed, no network, and a way to run a command.

Data depends on the test id alone, so neither order, ``-k`` nor the number of workers changes it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:
    # Each worker is a process of its own: two torch pools on the same cores only slow each other down.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("house", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("house")

# A test marked `browser` runs wherever one of these is installed, CI included.
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def browser() -> str | None:
    """Return the path of a browser for the tests marked `browser`, None where there is none."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that lets tests run that need a card."""
    parser.addoption("--gpu", action="store_true", help="run the tests that need a CUDA device")


def pytest_configure(config: pytest.Config) -> None:
    """End at once where `--gpu` is given and no card can be used, instead of failing some hundred times."""
    if not config.getoption("--gpu"):
        return
    import torch

    if not torch.cuda.is_available():
        what = "expected a CUDA device of compute capability 8.0 or newer"
        raise pytest.UsageError(f"--gpu: {what}; torch {torch.__version__} finds no CUDA device")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect (not skip: a skip is a test that could not say anything) what was not asked for."""
    closed = [] if config.getoption("--gpu") else ["gpu"]
    closed += [] if browser() else ["browser"]
    left_out = [item for item in items if any(item.get_closest_marker(m) for m in closed)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say why tests are left out that nobody chose to leave out."""
    if not browser():
        terminalreporter.write_line(
            f"left out: tests marked `browser`, none of {', '.join(BROWSERS)} is here"
        )


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what commands remember out of the home directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Return the number that this test id, and no other, is seeded with."""
    return zlib.crc32(request.node.nodeid.encode())


@pytest.fixture(autouse=True)
def _seeded(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    # A test that imports torch itself gets torch's own fixed default seed; importing it here costs seconds.
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """Return a NumPy generator of this test's own."""
    return np.random.default_rng(seed)


@dataclass(frozen=True)
class Ran:
    """What a command left behind: exit status, standard output, standard error."""

    exit_code: int
    out: str
    err: str

    def json(self) -> Any:
        """Parse standard output as one JSON document."""
        return json.loads(self.out)


@pytest.fixture
def cli() -> Callable[..., Ran]:
    """Return ``run(*args, input=None, env=None)``, which runs a ``dsv4convert`` command in this process.

    Arguments may be paths. An exception that the command line lets through fails the test as it is.
    """
    from click.testing import CliRunner

    from dsv4convert.cli import main

    def run(*args: object, input: str | None = None, env: Mapping[str, str | None] | None = None) -> Ran:
        result = CliRunner().invoke(
            main,
            [str(arg) for arg in args],
            input=input,
            env=env,
            catch_exceptions=False,
            prog_name="dsv4convert",
        )
        return Ran(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return ``sample(kind)``: a synthetic source of `samples.SAMPLES`, made once; not to be changed."""
    from tests.samples import make_sample

    root = tmp_path_factory.mktemp("samples")
    return lambda kind: root / kind if (root / kind).exists() else make_sample(root, kind)
