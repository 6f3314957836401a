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


#: NVIDIA H200, SM80 code, H = 4096, 256 experts, 6 of them a token; 2026-11-29.
#: Intermediate size of a rank -> plans, by ascending number of tokens.
DEFAULT: dict[int, tuple[Plan, ...]] = {
    2048: (
        Plan(3, "w4a16", 0, Tile("few", 16, 1, 3, 4), Tile("few", 16, 1, 3, 4)),
        Plan(8, "w4a16", 0, Tile("few", 32, 1, 3, 4), Tile("few", 32, 1, 3, 4)),
        Plan(128, "w4a16", 8, Tile("few", 32, 1, 3, 4), Tile("few", 32, 1, 3, 4)),
        Plan(1024, "w4a8", 16, Tile("many", 64, 2, 3, 4), Tile("many", 64, 2, 2, 4)),
        Plan(0, "w4a8", 128, Tile("many", 256, 8, 3, 1), Tile("many", 256, 8, 3, 2)),
    ),
    512: (
        Plan(3, "w4a16", 0, Tile("few", 16, 1, 4, 4), Tile("few", 32, 2, 4, 2)),
        Plan(8, "w4a16", 0, Tile("few", 16, 1, 3, 4), Tile("few", 64, 2, 4, 2)),
        Plan(128, "w4a16", 8, Tile("few", 32, 1, 3, 4), Tile("few", 64, 2, 4, 2)),
        Plan(1024, "w4a8", 16, Tile("many", 64, 2, 3, 4), Tile("many", 128, 2, 4, 1)),
        Plan(0, "w4a8", 128, Tile("many", 256, 8, 3, 1), Tile("many", 256, 8, 4, 1)),
    ),
}


def choose(tokens: int, intermediate: int) -> Plan:
    """Return the plan for a number of tokens: of the nearest intermediate size that was measured."""
    table = _table()
    size = min(table, key=lambda measured: (abs(measured - intermediate), measured))
    return next(plan for plan in table[size] if not plan.tokens or tokens <= plan.tokens)


@lru_cache(maxsize=1)
def _table() -> dict[int, tuple[Plan, ...]]:
    path = os.environ.get(VARIABLE)
    return read(Path(path)) if path else DEFAULT


def read(path: Path) -> dict[int, tuple[Plan, ...]]:
    """Read a table that `write` wrote.

    Raises:
        ValueError: it is none.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return {
            int(size): tuple(
                Plan(**plan | {"w13": Tile(**plan["w13"]), "w2": Tile(**plan["w2"])}) for plan in plans
            )
            for size, plans in data["plans"].items()
        }
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path}: expected a tile table as `python -m kernels_ref.sm80.tune` writes it, found {error!r}; "
            f"write it anew or unset {VARIABLE}"
        ) from error


def write(path: Path, table: dict[int, tuple[Plan, ...]], card: str) -> None:
    """Write a table and the card it was measured on."""
    plans = {str(size): [asdict(plan) for plan in plans] for size, plans in table.items()}
    path.write_text(json.dumps({"card": card, "plans": plans}, indent=1) + "\n", encoding="utf-8")
