"""Numbers of the release that has pictures, and of a tower small enough for float64."""

from __future__ import annotations

import dataclasses

import pytest

from dsv4convert import releases
from dsv4convert.vision.config import VisionConfig


def numbers() -> VisionConfig:
    """Return the numbers of DeepSeek-V4-Flash-Vision-Exp."""
    vision = VisionConfig.from_config(releases.config("deepseek-v4-flash-vision-exp"))
    assert vision is not None
    return vision


@pytest.fixture(scope="session")
def released() -> VisionConfig:
    """Return `numbers`."""
    return numbers()


@pytest.fixture(scope="session")
def small(released: VisionConfig) -> VisionConfig:
    """Return the same with a small tower: heads of 16 dims, patches of 4 pixels, cells of 2 x 2 patches."""
    narrow = {"layers": 2, "dim": 48, "heads": 3, "inter": 20, "patch": 4, "downsample": 2, "hidden": 24}
    return dataclasses.replace(released, **narrow, max_tokens=64, min_pixels=200)
