"""The manifest as a source of numbers: each one is checked and says where it was read.

A place is a JSON pointer (RFC 6901) into `dsv4convert.json`. ``*`` stands for any run of characters of a key,
and a word before the pointer for what was done with all that it names: ``max /tensors/*/figures/max_span``.
The page carries the places, so that a reader, or a test, can look every number up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dsv4convert.errors import Finding, Refused, finding
from dsv4convert.files import printable
from dsv4convert.journal import MANIFEST

_TIMES = "\N{MULTIPLICATION SIGN}"


class Cited(NamedTuple):
    """A number, as people read it, and its place."""

    value: int | float
    text: str
    source: str


def count(value: int, source: str) -> Cited:
    """Cite a number of things or bytes."""
    return Cited(value, f"{value:,}", source)


def error(value: float, source: str) -> Cited:
    """Cite a relative error, with two digits."""
    if value == 0:
        return Cited(value, "0", source)
    if value >= 1e-3:
        return Cited(value, f"{value:#.2g}", source)
    digits, _, exponent = f"{value:.1e}".partition("e")
    return Cited(value, f"{digits} {_TIMES} 10{_superscript(int(exponent))}", source)


def _superscript(number: int) -> str:
    return str(number).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def share(value: float, source: str) -> Cited:
    """Cite a share in percent; only a share of exactly 1 is shown as 100 %."""
    if value in (0, 1):
        return Cited(value, f"{value:.0%}".replace("%", " %"), source)
    # Rounded down, so that one code in a million still shows.
    return Cited(value, f"{math.floor(value * 1e6) / 1e4:.4f} %", source)


def pointer(*keys: str | int) -> str:
    """Return the JSON pointer of a place."""
    return "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys)


class Manifest:
    """A manifest whose values are checked as they are read: it may come from anybody.

    Args:
        tree: The parsed file.
    """

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self._tree = tree

    def get(self, kind: type | tuple[type, ...], *keys: str) -> Any:
        """Return the value of a place.

        Raises:
            Refused: there is none, or it is not of this kind.
        """
        return checked(self._value(keys), kind, pointer(*keys))

    def _value(self, keys: Sequence[str]) -> Any:
        value: Any = self._tree
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def count(self, *keys: str) -> Cited:
        """Return a cited count."""
        return count(self.get(int, *keys), pointer(*keys))

    def signed(self, *keys: str) -> int:
        """Return a whole number that may be negative.

        Raises:
            Refused: there is none, or it is something else.
        """
        value = self._value(keys)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        raise Refused(_incomplete(pointer(*keys)))

    def error(self, *keys: str) -> Cited:
        """Return a cited relative error."""
        return error(self.get((int, float), *keys), pointer(*keys))

    def text(self, *keys: str) -> str | None:
        """Return a string; None where the manifest says null."""
        value = self.get((str, type(None)), *keys)
        return value if value is None else printable(value)


def checked(value: Any, kind: type | tuple[type, ...], where: str) -> Any:
    """Return a value of the manifest if it is of this kind; a number must be finite and not negative.

    Raises:
        Refused: it is something else.
    """
    is_kind = isinstance(value, kind) and not isinstance(value, bool)
    if is_kind and (not isinstance(value, int | float) or (math.isfinite(value) and value >= 0)):
        return value
    raise Refused(_incomplete(where))


def _incomplete(where: str) -> Finding:
    problem = f"`{printable(where, 120)}` is not there or is not what a report needs"
    hint = "restore the file, or convert again with this version"
    return finding("manifest.not-json", MANIFEST, problem, hint=hint)
