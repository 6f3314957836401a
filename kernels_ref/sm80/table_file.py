"""The file of tuned tables: what `tune` writes and the kernels read when `tiles.VARIABLE` names it.

JSON: ``card``, which is for people; ``plans``, the experts by intermediate size and arithmetic; ``attention``
and ``indexer``, lists of plans. Without the last two, as in files of older versions, the shipped ones apply.
A kernel launched with numbers that it was not written for computes something else, or nothing, so every
number is compared with what the kernels take.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kernels_ref.sm80.tiles import (
    ATTENTION,
    SCORES,
    VARIABLE,
    AnyPlan,
    AttentionPlan,
    Plan,
    ScoresPlan,
    Table,
    Tables,
    Tile,
    Walk,
)

#: What a file has to be, for messages.
EXPECTED = "a tile table as `python -m kernels_ref.sm80.tune FILE` writes it"

_Rule = Callable[[str, Any], Any]
_ARITHMETICS = ("auto", "w4a16", "w4a8")


def write(
    path: Path,
    card: str,
    experts: Table,
    attention: Sequence[AttentionPlan] = (),
    scores: Sequence[ScoresPlan] = (),
) -> None:
    """Write tables and the card that they were measured on; a kernel without plans keeps the shipped."""
    plans = {
        str(size): {name: [asdict(plan) for plan in row] for name, row in rows.items()}
        for size, rows in experts.items()
    }
    content: dict[str, Any] = {"card": card, "plans": plans}
    for name, listed in (("attention", attention), ("indexer", scores)):
        if listed:
            content[name] = [asdict(plan) for plan in listed]
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> Tables:
    """Read a file that `write` wrote.

    Raises:
        ValueError: it is none: it cannot be read, or holds something that no kernel takes.
    """
    try:
        return parse(path)
    except ValueError as error:
        raise ValueError(
            f"{path}: expected {EXPECTED}, found {error}; write it anew or unset {VARIABLE}"
        ) from error


def parse(path: Path) -> Tables:
    """Read a file that `write` wrote; what is wrong with another one is told without its name.

    Raises:
        ValueError: what was found in its place: a reason why it cannot be read, or something that no kernel
            takes, and where.
    """
    try:
        # A pipe would be waited for, and is empty for the second process that reads it.
        if path.exists() and not path.is_file():
            raise ValueError("no regular file")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(error.strerror or f"{error}") from error
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    found = _fields({"card": _text, "plans": _experts}, attention=_attention, indexer=_scores)("", content)
    return Tables(found["plans"], found.get("attention", ATTENTION), found.get("indexer", SCORES))


def _fault(where: str, expected: str, given: object) -> ValueError:
    """Return the exception for a part of the file."""
    found = json.dumps(given)
    found = found if len(found) <= 60 else f"{found[:57]}..."
    return ValueError(f"{found} where {where.lstrip('.') or 'the file'} must be {expected}")


def _fields(required: Mapping[str, _Rule], **optional: _Rule) -> _Rule:
    """Return the rule for an object: all required fields, and no others but the optional ones."""
    rules = {**required, **optional}

    def rule(where: str, given: Any) -> dict[str, Any]:
        if not isinstance(given, dict) or not required.keys() <= given.keys() <= rules.keys():
            some = f" and perhaps {', '.join(optional)}" if optional else ""
            raise _fault(where, f"an object of {', '.join(required)}{some}", given)
        return {name: rules[name](f"{where}.{name}", value) for name, value in given.items()}

    return rule


def _one_of(*values: int | str) -> _Rule:
    def rule(where: str, given: Any) -> Any:
        # True is 1 and 1.0 is 1, but neither is what `write` writes.
        if type(given) is not type(values[0]) or given not in values:
            raise _fault(where, f"one of {', '.join(map(str, values))}", given)
        return given

    return rule


def _count(least: int, most: int) -> _Rule:
    def rule(where: str, given: Any) -> int:
        if type(given) is not int or not least <= given <= most:
            raise _fault(where, f"an integer of {least} to {most}", given)
        return given

    return rule


def _text(where: str, given: Any) -> str:
    if not isinstance(given, str):
        raise _fault(where, "a text", given)
    return given


_TOKENS = _count(0, 2**31 - 1)
_STAGES = _count(1, 8)
_TILE = _fields(
    {
        "kernel": _one_of("few", "many"),
        "rows": _one_of(16, 32, 64, 128, 256),
        "warps": _one_of(1, 2, 4, 8),
        "stages": _STAGES,
    },
    halves=_one_of(1, 2, 4, 8),
)
_WALK = _fields({"tiles": _one_of(1, 2), "stages": _STAGES, "slices": _one_of(1, 2, 4)})
_PLAN = {
    "tokens": _TOKENS,
    "arithmetic": _one_of("w4a16", "w4a8"),
    "columns": _one_of(0, 8, 16, 32, 64, 128, 256),
    "w13": lambda where, given: _tile(where, given),
    "w2": lambda where, given: _tile(where, given),
}
_ATTENTION_PLAN = {
    "tokens": _TOKENS,
    "split": lambda where, given: Walk(**_WALK(where, given)),
    "whole": lambda where, given: Walk(**_WALK(where, given)),
    "blocks": _count(1, 32),
}
_SCORES_PLAN = {
    "tokens": _TOKENS,
    "warps": _one_of(1, 2, 4, 8),
    "stages": _STAGES,
    "pages": _count(1, 2**20),
    "blocks": _count(1, 32),
}


def _tile(where: str, given: Any) -> Tile:
    tile = Tile(**_TILE(where, given))
    if tile.rows < 16 * tile.warps:
        raise _fault(f"{where}.rows", f"{16 * tile.warps} or more for {tile.warps} warps", tile.rows)
    return tile


def _plan(where: str, given: Any) -> Plan:
    plan = Plan(**_fields(_PLAN)(where, given))
    for name, tile in (("w13", plan.w13), ("w2", plan.w2)):
        if tile.kernel == "many" and not tile.rows >= plan.columns >= 16:
            expected = f"16 to the {tile.rows} rows of {name}, of kernel many"
            raise _fault(f"{where}.columns", expected, plan.columns)
    return plan


def _plans(where: str, given: Any, plan: Callable[[str, Any], AnyPlan]) -> tuple[AnyPlan, ...]:
    """Return a list of plans: ascending numbers of tokens, then 0, so that one holds for any number."""
    if not isinstance(given, list) or not given:
        raise _fault(where, "a list of plans", given)
    plans = tuple(plan(f"{where}[{i}]", one) for i, one in enumerate(given))
    limits = [one.tokens for one in plans]
    if limits[-1] or limits[:-1] != sorted(set(limits[:-1]) - {0}):
        raise _fault(f"{where}: tokens", "ascending, the last of them 0", limits)
    return plans


def _attention(where: str, given: Any) -> tuple[AttentionPlan, ...]:
    return _plans(where, given, lambda at, one: AttentionPlan(**_fields(_ATTENTION_PLAN)(at, one)))


def _scores(where: str, given: Any) -> tuple[ScoresPlan, ...]:
    return _plans(where, given, lambda at, one: ScoresPlan(**_fields(_SCORES_PLAN)(at, one)))


def _experts(where: str, given: Any) -> Table:
    if not isinstance(given, dict) or not given:
        raise _fault(where, "an object of intermediate sizes", given)
    table: Table = {}
    rows = _fields({name: lambda at, row: _plans(at, row, _plan) for name in _ARITHMETICS})
    for size, plans in given.items():
        if not size.isdecimal() or not int(size) or int(size) % 128:
            raise _fault(where, "an object of intermediate sizes, multiples of 128", size)
        table[int(size)] = rows(f"{where}.{size}", plans)
        for name in _ARITHMETICS[1:]:
            if {plan.arithmetic for plan in table[int(size)][name]} != {name}:
                raise _fault(f"{where}.{size}.{name}", f"plans of {name}", plans[name])
    return table
