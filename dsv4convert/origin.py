"""Where a checkpoint comes from, as its download client and its model card say; nothing is hashed here.

Source: huggingface_hub ``--local-dir`` (``.cache/huggingface/download/*.metadata``: commit, etag, time; the
etag of an LFS file is its SHA-256) and cache layout (links to blobs named by etag); model card front matter.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from dsv4convert.errors import Dsv4Error
from dsv4convert.files import open_regular, read_start

_SHA256 = re.compile(r"[0-9a-f]{64}")
_SCALAR = re.compile(r"([a-z_]+):[ \t]*(\"[^\"\\]*\"|'[^'\\]*'|[^\s\"'#&*!|>%@`\[{][^#\n]*?)[ \t]*(?:#.*)?")
_CARD_BYTES = 64 << 10


def recorded_sha256(root: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of each file that the download client recorded; files without a record are left out.

    The record says what was published under this name, not what lies on the disk now.
    """
    found = {name: _of_blob(root / name) or _of_metadata(root, name) for name in names}
    return {name: value for name, value in found.items() if _SHA256.fullmatch(value)}


def _of_blob(path: Path) -> str:
    if not path.is_symlink():
        return ""
    target = Path(os.path.realpath(path))
    return target.name if target.parent.name == "blobs" else ""


def _of_metadata(root: Path, name: str) -> str:
    path = root / ".cache" / "huggingface" / "download" / f"{name}.metadata"
    lines = read_text(path, 256).splitlines()
    return lines[1].strip() if len(lines) > 1 else ""


def read_text(path: Path, limit: int = _CARD_BYTES) -> str:
    """Return the start of a small text file of somebody else's; nothing if there is none to read."""
    try:
        fd, _ = open_regular(path, path.name)
        try:
            return read_start(fd, limit, path.name).decode("utf-8", "replace")
        finally:
            os.close(fd)
    except Dsv4Error:
        return ""


def front_matter(card: str) -> Mapping[str, str]:
    """Return the one-line values at the top of a model card; everything else of its YAML is passed over."""
    head = re.match(r"\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", card, re.S | re.M)
    found: dict[str, str] = {}
    for line in head[1].splitlines() if head else ():
        match = _SCALAR.fullmatch(line)
        value = match[2].strip("\"'").strip() if match else ""
        if match and value.isprintable() and 0 < len(value) <= 200:
            found.setdefault(match[1], value)
    return found


def license_fields(card: Mapping[str, str], text: str) -> dict[str, str]:
    """Return the license fields of a model card: those of the source's card, or what its LICENSE begins with.

    Args:
        card: Front matter of the source's card.
        text: Its LICENSE; empty if there is none.
    """
    kept = {key: card[key] for key in ("license", "license_name", "license_link") if key in card}
    if "license" in kept or not text:
        return kept
    for words, name in (("MIT License", "mit"), ("Apache License", "apache-2.0")):
        if words in text[:400]:
            return {"license": name}
    return {"license": "other", "license_name": "see-license-file", "license_link": "LICENSE"}
