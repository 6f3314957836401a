"""What pictures need to know of a checkpoint's ``config.json``. Standard library alone.

vision = VisionConfig.from_config(config)     # parsed config.json; None for a text checkpoint
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

#: START and END, which every block has, and the most PADs that stand before START.
ENDS: Final = 2
MOST_LEAD: Final = 3
#: Pictures of one prompt, unless a server is told otherwise. The real bound is the length of the context.
MOST_PICTURES: Final = 96
#: Bytes of a picture's file; it is read whole.
MOST_PICTURE_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The numbers that pictures need.

    Attributes:
        layers, dim, heads, inter: Blocks of the tower, their width, heads and MLP width.
        patch: Side of a patch in pixels.
        theta: Base of the rotary angles.
        downsample: Patches on a side of a cell; a cell becomes one token.
        max_tokens: Most positions of a block, with its lead PADs.
        min_pixels: Smaller pictures are enlarged to this area.
        max_ratio: Wider pictures are planned as if they were this many times as wide as high.
        hidden: Width of a token's vector in the language model.
        vocab: Its token ids; pseudo ids begin here.
        window: Positions that a token sees uncompressed, its own included.
    """

    layers: int
    dim: int
    heads: int
    inter: int
    patch: int
    theta: float
    downsample: int
    max_tokens: int
    min_pixels: int
    max_ratio: int
    hidden: int
    vocab: int
    window: int

    @property
    def cell(self) -> int:
        """Side of a cell in pixels."""
        return self.patch * self.downsample

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> VisionConfig | None:
        """Read a parsed ``config.json``, of an official or of a converted checkpoint.

        Returns:
            None for a text checkpoint: ``vision_n_layers`` is absent or 0.

        Raises:
            ValueError: a key is absent or not usable; the message names it.
        """
        if not config.get("vision_n_layers"):
            return None
        numbers = {name: _count(config, key) for name, key in _KEYS.items()}
        if numbers["dim"] % (4 * numbers["heads"]):
            raise ValueError(
                "config.json: `vision_dim` must be a multiple of 4 times `vision_n_heads`, because heads are "
                f"rotated by row and by column; found {numbers['dim']} and {numbers['heads']}"
            )
        if numbers["max_tokens"] < MOST_LEAD + ENDS + 4:
            raise ValueError(
                "config.json: `vision_max_n_token` must leave room for the smallest block, "
                f"found {numbers['max_tokens']}"
            )
        theta = config.get("vision_rope_theta")
        if isinstance(theta, bool) or not isinstance(theta, int | float) or not theta > 0:
            raise ValueError(
                f"config.json: `vision_rope_theta` must be a number > 0, found {str(theta)[:80]!r}"
            )
        return cls(theta=float(theta), **numbers)


_KEYS: Final[Mapping[str, str]] = {
    "layers": "vision_n_layers",
    "dim": "vision_dim",
    "heads": "vision_n_heads",
    "inter": "vision_inter_dim",
    "patch": "vision_patch_size",
    "downsample": "vision_downsample_ratio",
    "max_tokens": "vision_max_n_token",
    "min_pixels": "vision_min_pixels",
    "max_ratio": "vision_max_wh_ratio",
    "hidden": "hidden_size",
    "vocab": "vocab_size",
    "window": "sliding_window",
}


def _count(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or not 1 <= value < 1 << 24:
        raise ValueError(f"config.json: `{key}` must be a whole number >= 1, found {str(value)[:80]!r}")
    return value
