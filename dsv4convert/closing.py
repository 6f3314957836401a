"""Everything of a checkpoint but its shards; the index comes last, and without one it is no checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from dsv4convert.card import CARD, copied_files, model_card
from dsv4convert.checkpoint import Checkpoint
from dsv4convert.errors import EnvironmentFault, finding
from dsv4convert.handoff import converted_config, encode_config
from dsv4convert.journal import INDEX, MANIFEST, Journal
from dsv4convert.limits import Limits, judge_again
from dsv4convert.manifest import build_manifest, encode_manifest, memory_per_gpu
from dsv4convert.origin import recorded_sha256
from dsv4convert.plan import Plan
from dsv4convert.survey import survey
from dsv4convert.writer import PendingFile, sync_directory, write_bytes

_CHUNK: Final = 4 << 20


def close(
    checkpoint: Checkpoint, plan: Plan, journal: Journal, limits: Limits, run: Mapping[str, Any]
) -> dict[str, Any]:
    """Copy the side files, write config, model card, manifest and index, and remove the journal.

    Args:
        checkpoint: The source.
        plan: The plan; all of its shards are done.
        journal: Journal of the destination.
        limits: What is still acceptable, for the shards of earlier runs too.
        run: Facts about this run for the manifest.

    Returns:
        The manifest.

    Raises:
        Refused: a shard lost more than `limits` allow.
        EnvironmentFault: reading or writing failed.
    """
    root, scratch = journal.root, journal.path
    records = [record for record in map(journal.done, plan.shards) if record]
    judge_again(records, limits)
    names = copied_files(checkpoint.root, plan.side_files)
    files = {to: _copy_side_file(checkpoint.root / name, root / to, scratch) for to, name in names.items()}
    seen = survey(checkpoint)
    config = encode_config(converted_config(checkpoint.config, seen.units, plan.layout, plan.revision))
    write_bytes(root / "config.json", scratch, config)
    files["config.json"] = hashlib.sha256(config).hexdigest()
    known = recorded_sha256(checkpoint.root, plan.source_headers)
    memory = memory_per_gpu(seen, plan.layout)
    manifest = build_manifest(plan, records, files, known, memory, {**run, "resume_key": plan.resume_key})
    write_bytes(root / CARD, scratch, model_card(plan, manifest, checkpoint.root))
    write_bytes(root / MANIFEST, scratch, encode_manifest(manifest))
    write_bytes(root / INDEX, scratch, encode_index(plan))
    journal.finish()
    sync_directory(root)
    return manifest


def _copy_side_file(source: Path, target: Path, scratch: Path) -> str:
    """Copy a file's bytes, never its mode or its being a link; return its SHA-256."""
    digest = hashlib.sha256()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(source, "rb") as reading, PendingFile(target, scratch) as pending:
            while chunk := reading.read(_CHUNK):
                digest.update(chunk)
                pending.write(chunk)
    except OSError as error:
        problem = f"cannot be copied: {error.strerror or error}"
        raise EnvironmentFault(finding("io.read", source.name, problem)) from error
    return digest.hexdigest()


def encode_index(plan: Plan) -> bytes:
    """Return the bytes of the index: the official form, in shard and data order."""
    weight_map = {step.name: shard.name for shard in plan.shards for step in shard.steps}
    index = {"metadata": {"total_size": plan.data_bytes}, "weight_map": weight_map}
    return json.dumps(index, indent=2).encode()
