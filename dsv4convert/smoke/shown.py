"""The pictures of a golden prompt: `probe` saw files, and the golden file names them by their hashes."""

from __future__ import annotations

import hashlib
import mimetypes
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from dsv4convert.errors import Refused, finding
from dsv4convert.files import printable, read_whole
from dsv4convert.smoke.answers import Picture, Turn
from dsv4convert.smoke.checks import Scene
from dsv4convert.vision.config import MOST_PICTURE_BYTES
from dsv4convert.vision.layout import PLACEHOLDER

#: What a chat puts between the parts of a turn.
_BETWEEN: Final = "\n\n"


def pictures_of(golden: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return what a golden file says about the pictures of its prompt; older files have none."""
    found: Sequence[Mapping[str, Any]] = golden["prompt"].get("pictures", ())
    return found


def read_shown(paths: Sequence[Path], golden: Mapping[str, Any]) -> tuple[Picture, ...]:
    """Read the pictures of a golden prompt.

    Raises:
        Refused: ``golden.pictures``; they are not those of the golden file, or too large.
        EnvironmentFault: a file cannot be read, or is none.
    """
    known = pictures_of(golden)
    if len(paths) != len(known):
        problem, expected = "the golden prompt shows another number of pictures", f"{len(known)}"
        raise Refused(
            finding("golden.pictures", "--image", problem, expected=expected, found=f"{len(paths)}")
        )
    return tuple(_read(path, row) for path, row in zip(paths, known, strict=True))


def _read(path: Path, row: Mapping[str, Any]) -> Picture:
    # `.` has no name.
    name = printable(path.name or os.fspath(path))
    data = read_whole(path, name, MOST_PICTURE_BYTES, "golden.pictures")
    digest = hashlib.sha256(data).hexdigest()
    if digest != row["sha256"]:
        problem, shown = "is not the file that the golden prompt shows here", printable(row["file"])
        expected, found = f"`{shown}`, SHA-256 {row['sha256']}", f"SHA-256 {digest}"
        raise Refused(finding("golden.pictures", name, problem, expected=expected, found=found))
    # A server looks at the bytes.
    media = mimetypes.guess_type(name)[0] or "image/png"
    return Picture(name, row["width"], row["height"], data, media)


def unshown(scene: Scene) -> str:
    """Say why a golden prompt cannot be sent; empty if it can."""
    golden = scene.terms.golden
    if golden and len(pictures_of(golden)) != len(scene.terms.shown):
        return "the golden prompt shows pictures: give the files with `--image`"
    return ""


def golden_length(golden: Mapping[str, Any]) -> int:
    """Return the tokens of a golden prompt; its ids hold one placeholder for each picture."""
    blocks: list[int] = [picture["positions"] for picture in pictures_of(golden)]
    return len(golden["prompt"]["ids"]) + sum(blocks) - len(blocks)


def golden_turns(golden: Mapping[str, Any], shown: Sequence[Picture]) -> tuple[Turn] | None:
    """Return a golden prompt as a chat; None if a chat joins texts and pictures otherwise.

    A text that names no place for its pictures comes after them.
    """
    text = golden["prompt"]["text"]
    if not shown:
        return (Turn("user", text),)
    if PLACEHOLDER not in text:
        text = _BETWEEN.join([PLACEHOLDER] * len(shown) + ([text] if text else []))
    said = text.split(PLACEHOLDER)
    if len(said) != len(shown) + 1:
        return None
    parts: list[str | Picture] = []
    for segment, picture in zip(said, (*shown, None), strict=True):
        core = segment.removeprefix(_BETWEEN).removesuffix(_BETWEEN)
        parts += [part for part in (core, picture) if part]
    joined = _BETWEEN.join(part if isinstance(part, str) else PLACEHOLDER for part in parts)
    return (Turn("user", parts=tuple(parts)),) if joined == text else None
