"""`golden.json`: what a checkpoint says to a prompt, so that a server can be compared with it later.

It names the checkpoint, the prompt as ids and as text, and for every answered token the gap to the runner-up:
a server that rounds otherwise may differ where the gap is small and nowhere else.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, NoReturn

from dsv4convert import __version__
from dsv4convert.errors import Dsv4Error, EnvironmentFault, Refused, encodable, finding
from dsv4convert.files import parse_json, printable, read_whole
from dsv4convert.journal import MANIFEST
from dsv4convert.plan import source_digest
from dsv4convert.survey import Survey

SCHEMA: Final = "dsv4convert-golden-1"
_LIBRARIES: Final = ("numpy", "torch", "tokenizers")
#: An answered token takes some hundred bytes: room for more than 10^5 of them.
_MOST_BYTES: Final = 256 << 20


def describe(seen: Survey) -> dict[str, Any]:
    """Return what identifies a checkpoint: two digests, of all shard headers and of the manifest.

    The manifest holds a hash of every tensor, so its digest stands for the contents as they were written;
    checkpoints of other origin have none.
    """
    checkpoint = seen.checkpoint
    headers = {name: shard.header_sha256 for name, shard in checkpoint.shards.items()}
    return {
        "name": encodable(checkpoint.root.name),
        "title": seen.title,
        "release": seen.release.key if seen.release else None,
        "layout": seen.layout.value if seen.layout else None,
        "headers_sha256": source_digest(headers),
        "manifest_sha256": _manifest_digest(checkpoint.root),
    }


def _manifest_digest(root: Path) -> str | None:
    try:
        return hashlib.sha256((root / MANIFEST).read_bytes()).hexdigest()
    except FileNotFoundError:
        return None
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise EnvironmentFault(finding("file.unreadable", MANIFEST, problem)) from None


def make_golden(
    seen: Survey,
    prompt: Mapping[str, Any],
    numerics: str,
    steps: Iterable[Mapping[str, Any]],
    text: str | None,
    agreement: Mapping[str, Any] | None,
    draft: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the content of `golden.json`.

    Args:
        seen: The checkpoint that ran.
        prompt: What it was given: ``ids`` with one placeholder per picture, ``text`` (None for ids), ``chat``
            and ``pictures``, each with its file's hash, its grid of cells and its positions.
        numerics: Name of the arithmetic.
        steps: Per answered token: ``token``, ``margin`` and ``top``.
        text: The answer as text; None without a tokenizer.
        agreement: Comparison with a reference, if there was one.
        draft: How well the draft layers guess, if they ran.
    """
    return {
        "schema": SCHEMA,
        "tool": {"name": "dsv4convert", "version": __version__},
        "checkpoint": describe(seen),
        "numerics": numerics,
        "prompt": dict(prompt),
        "steps": [dict(step) for step in steps],
        "text": text,
        "agreement": agreement,
        "draft": draft,
        "run": {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "libraries": dict(_library_versions()),
        },
    }


def _library_versions() -> Iterable[tuple[str, str]]:
    for name in _LIBRARIES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def encode_golden(golden: Mapping[str, Any]) -> bytes:
    """Return the bytes of `golden.json`: one line for a key, a token or a layer."""
    return f"{_object(golden, 1)}\n".encode()


def _object(value: Mapping[str, Any], depth: int) -> str:
    rows = [f"{' ' * depth}{json.dumps(key)}: {_value(part, depth)}" for key, part in value.items()]
    return "{\n" + ",\n".join(rows) + "\n" + " " * (depth - 1) + "}"


def _value(value: Any, depth: int) -> str:
    if isinstance(value, dict) and depth == 1:
        return _object(value, depth + 1)
    if isinstance(value, list) and value and isinstance(value[0], dict):
        rows = ",\n".join(" " * (depth + 1) + json.dumps(row, allow_nan=False) for row in value)
        return f"[\n{rows}\n{' ' * depth}]"
    return json.dumps(value, allow_nan=False)


def read_golden(path: Path) -> dict[str, Any]:
    """Read a golden file and check what readers rely on.

    Raises:
        Refused: ``golden.not-json``; it is no golden file of a known version, or far larger than any.
        EnvironmentFault: it is no regular file or cannot be read.
    """
    raw = read_whole(path, path.name, _MOST_BYTES, "golden.not-json")
    try:
        golden, _ = parse_json(raw, path.name, "golden.not-json")
    except Dsv4Error as fault:
        raise Refused(fault.findings) from None
    schema = golden.get("schema") if isinstance(golden, dict) else None
    if schema != SCHEMA:
        problem = "has no schema this version knows"
        _refuse(path, problem, expected=f"`{SCHEMA}`", found=repr(schema)[:60])
    wrong = next((where for where, fits in _checks(golden) if not fits), None)
    if wrong:
        _refuse(path, f"`{wrong}` is not there or is not what `dsv4convert probe` writes")
    return dict(golden)


def _refuse(path: Path, problem: str, expected: str = "", found: str = "") -> NoReturn:
    where = printable(path.name)
    raise Refused(finding("golden.not-json", where, problem, expected=expected, found=found))


def _checks(golden: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield every place that readers use, and whether it holds what it should."""
    for section, keys in _SECTIONS.items():
        part = golden.get(section)
        yield section, isinstance(part, dict)
        yield from (
            (f"{section}.{k}", isinstance(part, dict) and _is(part.get(k), t)) for k, t in keys.items()
        )
    yield "prompt.ids", bool(golden["prompt"]["ids"]) and all(_is(i, int) for i in golden["prompt"]["ids"])
    # Files that were written before there were pictures lack the key.
    shown = golden["prompt"].get("pictures", [])
    yield "prompt.pictures", isinstance(shown, list) and all(map(_is_picture, shown))
    yield "numerics", _is(golden.get("numerics"), str)
    yield "text", _is(golden.get("text"), str | None)
    steps, agreement = golden.get("steps"), golden.get("agreement")
    yield "steps", isinstance(steps, list) and bool(steps) and all(map(_is_step, steps))
    draft = golden.get("draft")
    yield "draft", draft is None or (isinstance(draft, dict) and _is_draft(draft))
    yield "agreement", agreement is None or (isinstance(agreement, dict) and _is_agreement(agreement))


_SECTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "tool": {"version": str},
    "checkpoint": {"name": str, "title": str, "headers_sha256": str, "manifest_sha256": str | None},
    "prompt": {"ids": list, "text": str | None, "chat": bool},
}


def _is(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _is_number(value: Any) -> bool:
    # An integer of JSON may be larger than any float.
    return (_is(value, int) and abs(value) < 1 << 63) or (_is(value, float) and math.isfinite(value))


def _is_picture(picture: Any) -> bool:
    numbers = ("width", "height", "rows", "cols", "start", "lead", "positions")
    return (
        isinstance(picture, dict)
        and all(_is(picture.get(key), str) for key in ("file", "sha256"))
        and all(_is(picture.get(key), int) for key in numbers)
    )


def _is_step(step: Any) -> bool:
    if not isinstance(step, dict) or not _is(step.get("token"), int) or not _is_number(step.get("margin")):
        return False
    top = step.get("top")
    return (
        isinstance(top, list)
        and bool(top)
        and all(
            isinstance(row, dict)
            and _is(row.get("token"), int)
            and _is(row.get("text"), str | None)
            and _is_number(row.get("logprob"))
            for row in top
        )
    )


def _is_draft(draft: Mapping[str, Any]) -> bool:
    shares = draft.get("shares")
    return (
        _is(draft.get("depth"), int)
        and _is(draft.get("starts"), int)
        and _is_number(draft.get("length"))
        and isinstance(shares, list)
        and all(map(_is_number, shares))
    )


def _is_agreement(agreement: Mapping[str, Any]) -> bool:
    layers, reference = agreement.get("layers"), agreement.get("reference")
    return (
        isinstance(reference, dict)
        and _is(reference.get("name"), str)
        and _is(agreement.get("expectation"), str)
        and (agreement.get("limit") is None or _is_number(agreement["limit"]))
        and _is_number(agreement.get("logits"))
        and _is(agreement.get("equal_tokens"), int)
        and isinstance(agreement.get("tokens"), list)
        and isinstance(layers, list)
        and all(map(_is_layer, layers))
    )


def _is_layer(row: Any) -> bool:
    numbers = ("attention", "routed", "shared", "streams", "chosen")
    return (
        isinstance(row, dict)
        and _is(row.get("layer"), str)
        and all(_is_number(row.get(key)) for key in numbers)
        and (row.get("picked") is None or _is_number(row["picked"]))
    )
