"""`dsv4convert.json` against the checkpoint it lies in: every field that headers and small files can judge.

What they cannot judge is named by `MANIFEST_NEVER_CHECKED` and `MANIFEST_NOT_CHECKED`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from dsv4convert import __version__
from dsv4convert.checkpoint import CONFIG, Checkpoint
from dsv4convert.errors import Finding, finding
from dsv4convert.formats.spec import PACKING, ROUNDING
from dsv4convert.handoff import SECTION
from dsv4convert.journal import MANIFEST
from dsv4convert.manifest import (
    SCHEMA,
    command_line,
    expert_totals,
    losses,
    memory_per_gpu,
    repack_figures,
)
from dsv4convert.names import Layout
from dsv4convert.plan import Op, source_digest
from dsv4convert.survey import Survey
from dsv4convert.table import Storage

#: Errors of these kinds explain why a shard is not the recorded one.
STRUCTURAL: Final = ("dir.", "file.", "index.", "shard.", "tensor.", "name.", "unit.")
MANIFEST_CHECKED: Final = "manifest: against shards, tensors, metadata, config, side files; sums added up"
MANIFEST_NEVER_CHECKED: Final = "manifest: `tool`, `run`, single figures"
#: The same where no source is at hand.
MANIFEST_NOT_CHECKED: Final = (
    f"{MANIFEST_NEVER_CHECKED}; without a reference plan digest, size and contents of SRC"
)


def read_manifest(root: Path) -> tuple[dict[str, Any] | None, tuple[Finding, ...]]:
    """Read `dsv4convert.json`.

    Returns:
        The manifest, or None; and the findings about its absence or damage.
    """
    try:
        manifest = json.loads((root / MANIFEST).read_bytes())
    except FileNotFoundError:
        return None, (finding("manifest.missing", MANIFEST, "not there: the checkpoint is of other origin"),)
    except OSError as error:
        return None, (finding("file.unreadable", MANIFEST, f"cannot be read: {error.strerror}"),)
    except (ValueError, RecursionError):
        return None, (finding("manifest.not-json", MANIFEST, "is not JSON"),)
    fault = _manifest_shape(manifest)
    return (None, (fault,)) if fault else (manifest, ())


def _manifest_shape(manifest: Any) -> Finding | None:
    schema = manifest.get("schema") if isinstance(manifest, dict) else None
    if schema != SCHEMA:
        problem = "has no schema this version knows"
        return finding(
            "manifest.not-json", MANIFEST, problem, expected=f"`{SCHEMA}`", found=repr(schema)[:60]
        )
    for section, keys in _SECTIONS.items():
        part = manifest.get(section)
        if not isinstance(part, dict) or not all(isinstance(part.get(k), t) for k, t in keys.items()):
            return finding("manifest.not-json", MANIFEST, f"section `{section}` is incomplete")
    hashes = (manifest["source"]["header_sha256"], manifest["source"]["content_sha256"])
    if not all(isinstance(h, str) for table in hashes for h in table.values()):
        return finding("manifest.not-json", MANIFEST, "section `source` holds something that is no hash")
    notes = manifest.get("rounded")
    if not isinstance(notes, list) or not all(isinstance(f, dict) for f in notes):
        return finding("manifest.not-json", MANIFEST, "section `rounded` is incomplete")
    if absent := sorted({"experts", "losses", "memory"} - manifest.keys()):
        return finding("manifest.not-json", MANIFEST, f"section `{absent[0]}` is missing")
    rows, shards = manifest.get("tensors"), manifest["output"]["shards"]
    if not isinstance(rows, dict) or not _all_hold(rows, {"xxh3_128": str}):
        return finding("manifest.not-json", MANIFEST, "section `tensors` is incomplete")
    if not _all_hold(shards, {"bytes": int, "digest": str}):
        return finding("manifest.not-json", MANIFEST, "section `output.shards` is incomplete")
    return None


_SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "tool": {"version": str},
    "source": {
        "release": str | None,
        "title": str,
        "layout": str,
        "revision": str | None,
        "file_bytes": int,
        "header_sha256": dict,
        "content_sha256": dict,
    },
    "plan": {
        "digest": str,
        "layout": str,
        "packing": str | None,
        "rounding": str | None,
        "writer_version": str,
        "command": str,
    },
    "output": {"tensors": int, "data_bytes": int, "shards": dict, "files_sha256": dict},
}


def _all_hold(rows: Mapping[str, Any], fields: Mapping[str, Any]) -> bool:
    return all(
        isinstance(row, dict) and all(isinstance(row.get(k), t) for k, t in fields.items())
        for row in rows.values()
    )


def manifest_findings(
    seen: Survey, manifest: Mapping[str, Any], errors: tuple[Finding, ...]
) -> Iterator[Finding]:
    """Compare with the manifest whatever `errors`, found before, do not explain."""
    checkpoint, layout = seen.checkpoint, seen.layout
    if layout and manifest["plan"]["layout"] != layout.value:
        expected, found = f"`{manifest['plan']['layout']}`", f"`{layout.value}`"
        yield finding("manifest.mismatch", MANIFEST, "records another layout", expected=expected, found=found)
        return
    explained = {f.where for f in errors}
    if any(f.code.startswith("config.") for f in errors):
        explained.add(CONFIG)
    files = {n: h for n, h in manifest["output"]["files_sha256"].items() if n not in explained}
    changed = list(_file_findings(checkpoint.root, files))
    if not any(f.code.startswith(STRUCTURAL) for f in errors):
        yield from _recorded_findings(checkpoint, manifest)
        # Release and title follow from the config; one that was edited explains them.
        config_kept = CONFIG not in explained and not any(f.where == CONFIG for f in changed)
        yield from _field_findings(seen, manifest, config_kept)
    yield from changed


def _recorded_findings(checkpoint: Checkpoint, manifest: Mapping[str, Any]) -> Iterator[Finding]:
    unavailable = set(checkpoint.weight_map.values()) - checkpoint.shards.keys()
    recorded = {n: s["bytes"] for n, s in manifest["output"]["shards"].items() if n not in unavailable}
    present = {n: s.size for n, s in checkpoint.shards.items()}
    for name in sorted(recorded.keys() | present.keys()):
        # A shard without tensors is in no index, so the reader does not list it.
        if recorded.get(name) != present.get(name) and not (name in recorded and name not in present):
            expected, found = f"{recorded.get(name, 0):,} bytes", f"{present.get(name, 0):,}"
            yield finding("manifest.mismatch", name, "not the recorded shard", expected=expected, found=found)
    names = set(checkpoint.tensors) | {n for n, s in checkpoint.weight_map.items() if s in unavailable}
    strange = sorted(names ^ set(manifest["tensors"]))
    if strange:
        problem = f"{len(strange):,} tensors are recorded or stored, but not both"
        yield finding("manifest.mismatch", strange[0], problem)


def _field_findings(seen: Survey, manifest: Mapping[str, Any], config_kept: bool) -> Iterator[Finding]:
    """Compare single fields with what config, shard metadata and the other fields say."""
    wanted: dict[str, object] = _decisions(seen, manifest) | _sums(manifest)
    if config_kept:
        section = seen.checkpoint.config.get(SECTION)
        wanted |= {"source.release": seen.release.key if seen.release else None, "source.title": seen.title}
        wanted["source.revision"] = section.get("source_revision") if isinstance(section, dict) else None
        # Another version may reckon with other numbers of the runtime.
        if seen.layout and manifest["tool"]["version"] == __version__:
            wanted["memory"] = memory_per_gpu(seen, seen.layout)
    for key, value in wanted.items():
        part, _, name = key.partition(".")
        recorded = manifest[part][name] if name else manifest[part]
        if recorded != value:
            problem = f"`{key}` is not what the checkpoint says"
            # Sums are too long for a line.
            shown = {"expected": f"`{value}`", "found": f"`{str(recorded)[:80]}`"} if name else {}
            yield finding("manifest.mismatch", MANIFEST, problem, **shown)
    yield from _op_findings(seen, manifest)


def _decisions(seen: Survey, manifest: Mapping[str, Any]) -> dict[str, object]:
    checkpoint, int8 = seen.checkpoint, seen.layout is Layout.INT8
    wanted: dict[str, object] = {
        "output.tensors": len(checkpoint.tensors),
        "output.data_bytes": sum(t.nbytes for t in checkpoint.tensors.values()),
        "plan.packing": PACKING if int8 else None,
        "plan.rounding": ROUNDING if int8 else None,
        "plan.command": command_line(manifest["plan"]["layout"], bool(manifest["rounded"])),
    }
    # Shards that were written again by another tool have lost their metadata, which is a warning by itself.
    for shard in checkpoint.shards.values():
        if "dsv4convert.source" in shard.metadata:
            if source_digest(manifest["source"]["header_sha256"]) != shard.metadata["dsv4convert.source"]:
                wanted["source.header_sha256"] = f"those of {shard.metadata['dsv4convert.source'][:12]}…"
            wanted["plan.writer_version"] = shard.metadata.get("dsv4convert.writer")
    return wanted


def _sums(manifest: Mapping[str, Any]) -> dict[str, object]:
    """Return the sections that add up the figures of the tensors, added up again."""
    return {
        "experts": _added_up(expert_totals, manifest),
        "losses": _added_up(losses, manifest),
    }


def _added_up(total: Callable[[dict[str, Mapping[str, Any]]], object], manifest: Mapping[str, Any]) -> object:
    try:
        return total(repack_figures(manifest["tensors"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        return "figures that cannot be added up"


def _op_findings(seen: Survey, manifest: Mapping[str, Any]) -> Iterator[Finding]:
    """Compare the recorded operation of every tensor with what its storage leaves possible."""
    rows, wrong = manifest["tensors"], []
    from_official = manifest["source"]["layout"] == Layout.OFFICIAL.value
    rounded = {str(f.get("tensor")) for f in manifest["rounded"] if f.get("code") == "value.inexact"}
    for unit in seen.units:
        op = Op.KEEP
        if unit.row.storage is Storage.DENSE_FP8 and from_official:
            op = Op.DEQUANTIZE_BF16
        elif unit.row.storage is Storage.EXPERT_MXFP4 and seen.layout is Layout.INT8:
            op = Op.REPACK_INT8_SHIFT
        for name in unit.stored(seen.layout or Layout.OFFICIAL):
            row = rows.get(name)
            if row is None:
                continue
            inexact = isinstance(row.get("figures"), dict) and "inexact_blocks" in row["figures"]
            figured = op is not Op.REPACK_INT8_SHIFT or "figures" in row or not name.endswith(".weight_codes")
            if row.get("op") != op.value or not figured or inexact != (name in rounded):
                wrong.append(name)
    if wrong:
        problem = f"{len(wrong):,} tensors have another operation, or other figures, than their kind allows"
        yield finding("manifest.mismatch", wrong[0], problem)


def _file_findings(root: Path, recorded: Mapping[str, str]) -> Iterator[Finding]:
    for name, wanted in recorded.items():
        path = root / name
        inside = not os.path.isabs(name) and ".." not in Path(name).parts
        if not inside or not path.is_file():
            yield finding("manifest.mismatch", name, "recorded, but not there")
            continue
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != wanted:
            problem = "was changed after the conversion"
            expected = f"sha256 {str(wanted)[:12]}…"
            yield finding("content.hash", name, problem, expected=expected, found=f"{found[:12]}…")
