"""The official `config.json` of every supported release, as package data.

The files are DeepSeek's own (MIT), byte for byte, except ``deepseek-v4-flash-vision-exp.json``: its values
are those of the release, its key order is not known. Nothing but their numbers is used: every count, shape
and shard is derived from them. ``sha256/`` holds the published hashes of shards and index, where known.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, slots=True)
class Release:
    """A published checkpoint.

    Attributes:
        key: Name on the command line and of the package data file.
        title: Name for people.
        repo: Hugging Face repository.
        served: True when the SM80 runtime of this project is meant to serve its conversion.
        twins: Other repositories with the same config and the same tensors.
    """

    key: str
    title: str
    repo: str
    served: bool
    twins: tuple[str, ...] = ()


RELEASES: Mapping[str, Release] = {
    r.key: r
    for r in (
        Release("deepseek-v4-flash", "DeepSeek-V4-Flash (preview)", "deepseek-ai/DeepSeek-V4-Flash", True),
        Release(
            "deepseek-v4-flash-0731",
            "DeepSeek-V4-Flash-0731 (-DSpark has the same tensors)",
            "deepseek-ai/DeepSeek-V4-Flash-0731",
            True,
            ("deepseek-ai/DeepSeek-V4-Flash-DSpark",),
        ),
        Release(
            "deepseek-v4-flash-vision-exp",
            "DeepSeek-V4-Flash-Vision-Exp",
            "deepseek-ai/DeepSeek-V4-Flash-Vision-Exp",
            True,
        ),
        Release("deepseek-v4.1-flash", "DeepSeek-V4.1-Flash", "deepseek-ai/DeepSeek-V4.1-Flash", False),
        Release("deepseek-v4-pro", "DeepSeek-V4-Pro (preview)", "deepseek-ai/DeepSeek-V4-Pro", False),
        Release("deepseek-v4-pro-0813", "DeepSeek-V4-Pro-0813", "deepseek-ai/DeepSeek-V4-Pro-0813", False),
    )
}


@cache
def config_text(key: str) -> str:
    """Return the text of a release's `config.json`.

    Raises:
        KeyError: `key` is not in `RELEASES`.
    """
    return files(__name__).joinpath(f"{RELEASES[key].key}.json").read_text(encoding="utf-8")


def config(key: str) -> dict[str, Any]:
    """Return a release's parsed `config.json`; a fresh dict with the key order of the file."""
    parsed: dict[str, Any] = json.loads(config_text(key))
    return parsed


@cache
def published_hashes(key: str) -> Mapping[str, Any] | None:
    """Return ``{repo, revision, files: {name: {bytes, sha256}}}`` of a release; None if it is not known.

    Raises:
        KeyError: `key` is not in `RELEASES`.
    """
    path = files(__name__).joinpath("sha256", f"{RELEASES[key].key}.json")
    if not path.is_file():
        return None
    parsed: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return parsed
