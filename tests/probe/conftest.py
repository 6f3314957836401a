"""Checkpoints that probes run, and a way to break them in one byte."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4convert import api
from tests.reference import fit_draft, tiny

#: Long enough that windows are full, an entry of ratio 128 exists and the indexer has to choose.
LONG = [7 * i % 500 for i in range(1, 141)]
SHORT = [11, 42, 7, 300]

Copy = Callable[[str], Path]


@pytest.fixture(scope="session")
def trio(sample: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return layout -> a checkpoint of five layers, all of one model; not to be changed."""
    root = tmp_path_factory.mktemp("probe")
    for layout in ("mxfp4", "int8"):
        api.convert(sample("plain"), root / layout, experts=layout)
    return {"official": sample("plain"), "mxfp4": root / "mxfp4", "int8": root / "int8"}


@pytest.fixture(scope="session")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return layout -> a checkpoint whose draft agrees with its trunk; not to be changed."""
    root = tmp_path_factory.mktemp("fitted")
    made = {"official": tiny.make(root, "plain")}
    fit_draft.apply(made["official"])
    for layout in ("mxfp4", "int8"):
        made[layout] = root / layout
        api.convert(made["official"], made[layout], experts=layout)
    return made


@pytest.fixture
def copy(trio: dict[str, Path], tmp_path: Path) -> Copy:
    """Return ``copy(layout)``, which gives a test a checkpoint of its own."""
    return lambda layout: Path(shutil.copytree(trio[layout], tmp_path / f"own-{layout}"))


def change(root: Path, tensor: str, edit: Callable[[bytearray], object]) -> None:
    """Let `edit` change the stored bytes of one tensor in place."""
    info = api.open(root).tensors[tensor]
    with open(root / info.shard, "r+b") as file:
        data = bytearray(os.pread(file.fileno(), info.nbytes, info.start))
        edit(data)
        os.pwrite(file.fileno(), data, info.start)


def flip(position: int, bits: int) -> Callable[[bytearray], None]:
    """Return an edit that flips bits of one byte."""

    def edit(data: bytearray) -> None:
        data[position] ^= bits

    return edit


def swap_nibbles(data: bytearray) -> None:
    """Swap the two codes of every byte."""
    data[:] = bytes((byte << 4 | byte >> 4) & 0xFF for byte in data)
