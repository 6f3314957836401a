"""Which kernels and tiles run a layer of experts, by number of tokens and by rank's intermediate size.

The table is measured, not derived. `DEFAULT` holds what was fastest on the card that it names; another card
is measured with ``python -m kernels_ref.sm80.tune FILE``, and the environment variable `VARIABLE` makes the
file's table the one in use.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

#: Environment variable that names a table written by `tune`.
VARIABLE = "DSV4_SM80_TILES"


@dataclass(frozen=True, slots=True)
class Tile:
    """One product's kernel and tile.

    Attributes:
        kernel: ``few``, or ``many``.
        rows: Rows of the weight matrix in a tile: 16 * warps or more.
        warps, stages: Warps of a block, and depth of the software pipeline.
        halves: Halves of groups, 64 codes each, in a step of the loop: 1, 2, 4 or 8.
    """

    kernel: str
    rows: int
    warps: int
    stages: int
    halves: int = 2

    @property
    def label(self) -> str:
        """The tile in a few characters."""
        codes = 64 * self.halves
        return f"{self.kernel} {self.rows} rows, {self.warps} warps, {self.stages} stages of {codes} codes"


@dataclass(frozen=True, slots=True)
class Plan:
    """How a layer runs for up to `tokens` tokens.

    Attributes:
        tokens: Largest number of tokens; 0 for any number.
        arithmetic: ``w4a16`` or ``w4a8``.
        columns: Columns of a tile: tokens of a block times digits. 0: no alignment, each pair is a block.
        w13, w2: The products.
    """

    tokens: int
    arithmetic: str
    columns: int
    w13: Tile
    w2: Tile


#: A rank's intermediate size -> arithmetic, or ``auto`` -> plans by ascending number of tokens.
Table = dict[int, dict[str, tuple[Plan, ...]]]


def _few(tokens: int, columns: int, w13: tuple[int, ...], w2: tuple[int, ...], digits: int = 2) -> Plan:
    return Plan(tokens, f"w4a{8 * digits}", columns, Tile("few", *w13), Tile("few", *w2))


def _many(tokens: int, columns: int, w13: tuple[int, ...], w2: tuple[int, ...], digits: int = 1) -> Plan:
    return Plan(tokens, f"w4a{8 * digits}", columns, Tile("many", *w13), Tile("many", *w2))


# Rows, warps, stages, halves. NVIDIA H200, SM80 code, H = 4096, 256 experts, 6 a token; 2026-11-29.
_FINE_2048 = (
    _few(2, 0, (16, 1, 3, 4), (16, 1, 3, 4)),
    _few(6, 0, (32, 1, 3, 4), (32, 1, 3, 4)),
    _few(64, 8, (32, 1, 3, 4), (32, 1, 3, 4)),
)
_COARSE_2048 = (
    _few(128, 8, (32, 1, 3, 4), (32, 1, 3, 4), 1),
    _many(512, 16, (64, 2, 2, 4), (64, 2, 2, 4)),
    _many(1024, 16, (128, 4, 4, 1), (128, 2, 4, 1)),
    _many(2048, 64, (256, 8, 4, 1), (256, 8, 4, 1)),
    _many(0, 128, (256, 8, 5, 1), (256, 8, 3, 2)),
)
_FINE_512 = (
    _few(2, 0, (16, 1, 4, 4), (32, 2, 4, 2)),
    _few(8, 0, (16, 1, 3, 4), (64, 2, 4, 2)),
    _few(64, 8, (32, 1, 3, 4), (64, 2, 4, 2)),
)
_COARSE_512 = (
    _few(128, 8, (32, 1, 3, 4), (64, 2, 4, 2), 1),
    _many(512, 16, (64, 2, 2, 4), (128, 2, 4, 1)),
    _many(1024, 16, (128, 4, 4, 1), (128, 2, 4, 1)),
    _many(2048, 64, (256, 8, 4, 1), (256, 8, 4, 1)),
    _many(0, 128, (256, 8, 5, 1), (256, 8, 3, 1)),
)
_FINE_256 = (
    _few(2, 0, (16, 1, 4, 4), (16, 1, 4, 4)),
    _few(8, 0, (16, 1, 3, 4), (32, 1, 3, 4)),
    _few(128, 8, (32, 1, 3, 4), (32, 1, 3, 4)),
)
_COARSE_256 = (
    _many(1024, 16, (64, 2, 2, 4), (128, 2, 2, 4)),
    _many(2048, 64, (256, 8, 4, 1), (256, 8, 3, 1)),
    # W2: the fastest tile measured, (256, 8, 4, 1), spills when its four steps are unrolled; not this one.
    _many(0, 128, (256, 8, 5, 1), (256, 8, 2, 2)),
)
DEFAULT: Table = {
    2048: {
        "auto": _FINE_2048 + _COARSE_2048,
        "w4a16": (
            *_FINE_2048[:-1],
            _few(128, 8, (32, 1, 3, 4), (32, 1, 3, 4)),
            _many(1024, 32, (128, 4, 4, 2), (128, 4, 4, 2), 2),
            _many(0, 128, (256, 8, 3, 1), (256, 8, 3, 1), 2),
        ),
        "w4a8": (_few(8, 0, (32, 1, 3, 4), (32, 1, 3, 4), 1), *_COARSE_2048),
    },
    512: {
        "auto": _FINE_512 + _COARSE_512,
        "w4a16": (
            *_FINE_512[:-1],
            _few(128, 8, (32, 1, 3, 4), (64, 2, 4, 2)),
            _many(1024, 32, (128, 4, 4, 2), (128, 4, 4, 1), 2),
            _many(0, 128, (256, 8, 3, 1), (256, 8, 3, 1), 2),
        ),
        "w4a8": (_few(8, 0, (16, 1, 3, 4), (64, 2, 4, 2), 1), *_COARSE_512),
    },
    256: {
        "auto": _FINE_256 + _COARSE_256,
        "w4a16": (
            *_FINE_256,
            _many(1024, 32, (128, 4, 4, 2), (128, 2, 3, 4), 2),
            _many(0, 128, (256, 8, 4, 1), (256, 8, 3, 1), 2),
        ),
        "w4a8": (
            _few(8, 0, (16, 1, 4, 4), (32, 1, 3, 4), 1),
            _few(128, 8, (32, 1, 3, 4), (32, 1, 3, 4), 1),
            *_COARSE_256,
        ),
    },
}


def choose(tokens: int, intermediate: int, arithmetic: str = "auto") -> Plan:
    """Return the plan for a number of tokens: of the nearest intermediate size that was measured."""
    table = _table()
    size = min(table, key=lambda measured: (abs(measured - intermediate), measured))
    return next(plan for plan in table[size][arithmetic] if not plan.tokens or tokens <= plan.tokens)


@lru_cache(maxsize=1)
def _table() -> Table:
    path = os.environ.get(VARIABLE)
    return read(Path(path)) if path else DEFAULT


def read(path: Path) -> Table:
    """Read a table that `write` wrote.

    Raises:
        ValueError: it is none.
    """
    try:
        sizes = json.loads(path.read_text(encoding="utf-8"))["plans"]
        return {
            int(size): {
                arithmetic: tuple(_plan(**plan) for plan in plans[arithmetic])
                for arithmetic in ("auto", "w4a16", "w4a8")
            }
            for size, plans in sizes.items()
        }
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{path}: expected a tile table as `python -m kernels_ref.sm80.tune` writes it, found {error!r}; "
            f"write it anew or unset {VARIABLE}"
        ) from error


def _plan(*, w13: dict[str, Any], w2: dict[str, Any], **values: Any) -> Plan:
    return Plan(w13=Tile(**w13), w2=Tile(**w2), **values)


def write(path: Path, table: Table, card: str) -> None:
    """Write a table and the card it was measured on."""
    plans = {
        str(size): {name: [asdict(plan) for plan in row] for name, row in rows.items()}
        for size, rows in table.items()
    }
    path.write_text(json.dumps({"card": card, "plans": plans}, indent=1) + "\n", encoding="utf-8")
