"""A destination that was finished before: is it what this plan makes, is it whole, and if not, mend it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dsv4convert.closing import encode_index
from dsv4convert.errors import Refused, finding
from dsv4convert.journal import INDEX, MANIFEST, Journal, ShardRecord
from dsv4convert.plan import Plan, ShardPlan


def finished_before(root: Path, plan: Plan, source: Path) -> Mapping[str, Any] | None:
    """Return the manifest of a destination in which this plan was carried out and which is whole.

    What is damaged or gone is not reported but made again: the index is removed, the good shards are noted
    in a new journal, and the caller converts the others.

    Args:
        root: The destination.
        plan: What is to be carried out.
        source: Where the source lies, for the journal.

    Raises:
        Refused: the destination was made from other files than those of `plan`.
    """
    manifest = _manifest(root)
    if manifest is None or manifest["plan"]["digest"] != plan.digest:
        return None
    if manifest["run"].get("resume_key") != plan.resume_key:
        problem = "holds a finished conversion of other source files with the same headers"
        hint = (
            "choose an empty directory; `converted --reference SRC --read-data` tells whether contents agree"
        )
        raise Refused(finding("dst.other-plan", root.name, problem, hint=hint))
    good = [shard for shard in plan.shards if _is_whole(root / shard.name, shard)]
    if len(good) == len(plan.shards) and _others_are_whole(root, plan, manifest):
        # A crash between index and clean-up leaves only this to do.
        Journal(root).finish()
        return manifest
    with suppress(FileNotFoundError):
        (root / INDEX).unlink()
    journal = Journal(root)
    journal.begin(plan, source)
    for shard in good:
        journal.record(_record(root, shard, manifest))
    return None


def _manifest(root: Path) -> Mapping[str, Any] | None:
    try:
        manifest = json.loads((root / MANIFEST).read_bytes())
        known = all(isinstance(manifest[key], dict) for key in ("plan", "run", "output", "tensors"))
        return manifest if known and isinstance(manifest["rounded"], list) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_whole(path: Path, shard: ShardPlan) -> bool:
    """Tell whether a shard has its planned size and header; its data is not read."""
    try:
        with open(path, "rb") as file:
            return (
                os.fstat(file.fileno()).st_size == shard.file_bytes
                and file.read(len(shard.header)) == shard.header
            )
    except OSError:
        return False


def _others_are_whole(root: Path, plan: Plan, manifest: Mapping[str, Any]) -> bool:
    try:
        if (root / INDEX).read_bytes() != encode_index(plan):
            return False
        recorded = manifest["output"]["files_sha256"]
        return all(hashlib.sha256((root / n).read_bytes()).hexdigest() == h for n, h in recorded.items())
    except (OSError, KeyError, AttributeError):
        return False


def _record(root: Path, shard: ShardPlan, manifest: Mapping[str, Any]) -> ShardRecord:
    rows = {step.name: manifest["tensors"][step.name] for step in shard.steps}
    sources = {source.name for step in shard.steps for source in step.sources}
    status = os.stat(root / shard.name)
    return ShardRecord(
        shard=shard.name,
        file_bytes=shard.file_bytes,
        digest=manifest["output"]["shards"][shard.name]["digest"],
        tensors={name: row["xxh3_128"] for name, row in rows.items()},
        figures={
            name.removesuffix(".weight_codes").removesuffix(".weight"): row["figures"]
            for name, row in rows.items()
            if "figures" in row
        },
        rounded=tuple(f for f in manifest["rounded"] if f["tensor"] in sources),
        mtime_ns=status.st_mtime_ns,
        inode=status.st_ino,
    )
