"""Arms this process before anything imports SGLang; the models of the tests, each built once."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

#: Two sessions run these tests, one for each kind of server: a process sees pictures, or it does not.
SEES = os.environ.get("DSV4_TEST_PICTURES") == "1"
collect_ignore_glob = ["test_[!v]*" if SEES else "test_vision*"]

os.environ["ENABLE_DSV4_SM80"] = "1"
# The prewarm of the hyper-connection kernels asks the card for its SMs.
os.environ["SGLANG_DSV4_MHC_PREWARM"] = "0"

from dsv4convert.runtime import contract, hook  # noqa: E402

if SEES:
    os.environ.update(contract.PICTURES)
hook.install()

# What follows imports SGLang.
from tests.sglang import world  # noqa: E402
from tests.sglang.checkpoints import RELEASES, SEEING, make_checkpoints  # noqa: E402


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with synthetic checkpoints and their conversions; not to be changed."""
    path = tmp_path_factory.mktemp("checkpoints")
    make_checkpoints(path, SEEING if SEES else RELEASES)
    return path


@pytest.fixture(scope="session", autouse=True)
def _one_process_world(shelf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with world.of_one_process(
        shelf / ("vision-int8" if SEES else "0731-int8"), tmp_path_factory.mktemp("gloo") / "store"
    ):
        yield


@pytest.fixture(scope="session")
def loaded(shelf: Path) -> Callable[..., world.Loaded]:
    """Return ``loaded(name, draft=False, rank=0, size=1)``: a model with its weights, built once."""
    shelved: dict[tuple[object, ...], world.Loaded] = {}

    def get(name: str, draft: bool = False, rank: int = 0, size: int = 1) -> world.Loaded:
        key = name, draft, rank, size
        if key not in shelved:
            shelved[key] = world.load(shelf / name, draft=draft, rank=rank, size=size)
        return shelved[key]

    return get


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))
