"""Synthetic checkpoints that real SGLang can build: tiny, but with the sizes its kernels insist on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dsv4convert import synth
from dsv4convert.convert import convert

#: Name -> release. The first bundles a DSpark draft of three stages, the second a NextN layer.
RELEASES = {"0731": "deepseek-v4-flash-0731", "preview": "deepseek-v4-flash"}
#: In a session of its own: whether SGLang sees pictures is decided when its modules are imported.
SEEING = {"vision": "deepseek-v4-flash-vision-exp"}
LAYOUTS = ("int8", "mxfp4")

#: Head sizes and selection that SGLang asserts; two ranks share 256 intermediate columns in groups of 128.
_SIZES = {
    "head_dim": 512,
    "index_n_heads": 64,
    "index_topk": 512,
    "sliding_window": 128,
    "moe_intermediate_size": 256,
}
#: Ratios 0, 0, 4, 128, 4 and every kind of layer of the draft.
_LAYERS, _EXPERTS = 5, 4


def make_checkpoints(shelf: Path, releases: Mapping[str, str]) -> None:
    """Write ``NAME``, ``NAME-int8`` and ``NAME-mxfp4`` of every release."""
    with pytest.MonkeyPatch.context() as patch:
        for key, value in _SIZES.items():
            patch.setitem(synth._TINY, key, value)
        for name, release in releases.items():
            recipe = synth.Recipe(release, "tiny", layers=_LAYERS, experts=_EXPERTS)
            synth.synthesize(shelf / name, recipe)
            for layout in LAYOUTS:
                convert(shelf / name, shelf / f"{name}-{layout}", experts=layout)


def edit_config(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the `config.json` of a copy in place."""
    config = json.loads((root / "config.json").read_bytes())
    change(config)
    (root / "config.json").write_text(json.dumps(config))
