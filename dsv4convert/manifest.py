"""`dsv4convert.json`: what was made, from what, by which plan, and how exact it is.

Everything outside its ``run`` section is the same on every machine that converts the same source with the
same plan.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Iterable, Mapping
from typing import Any

from dsv4convert import __version__
from dsv4convert.journal import ShardRecord
from dsv4convert.plan import Op, Plan

SCHEMA = "dsv4convert-manifest-1"
_LIBRARIES = ("numpy", "safetensors", "torch", "xxhash")


def build_manifest(
    plan: Plan, records: Iterable[ShardRecord], files: Mapping[str, str], run: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the manifest of a finished conversion.

    Args:
        plan: The plan that was carried out.
        records: One record per shard.
        files: Other files of the output -> SHA-256.
        run: Facts about this run: jobs, seconds. Library and host facts are added here.
    """
    by_shard = {r.shard: r for r in records}
    decisions = plan.as_dict()
    return {
        "schema": SCHEMA,
        "tool": {"name": "dsv4convert", "version": __version__},
        "source": {
            "release": plan.release,
            "title": plan.title,
            "layout": plan.source_layout.value,
            "revision": plan.revision,
            "file_bytes": plan.source_bytes,
            "header_sha256": dict(plan.source_headers),
        },
        "plan": {
            key: decisions[key] for key in ("digest", "layout", "packing", "rounding", "writer_version")
        },
        "output": {
            "tensors": plan.tensors,
            "data_bytes": plan.data_bytes,
            "shards": {
                s.name: {"bytes": s.file_bytes, "digest": by_shard[s.name].digest} for s in plan.shards
            },
            "files_sha256": dict(sorted(files.items())),
        },
        "roles": decisions["roles"],
        "experts": _expert_totals(by_shard.values()),
        "rounded": [f for s in plan.shards for f in by_shard[s.name].rounded],
        "tensors": _tensors(plan, by_shard),
        "run": {**run, **_host()},
    }


def _tensors(plan: Plan, by_shard: Mapping[str, ShardRecord]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for shard in plan.shards:
        record = by_shard[shard.name]
        for step in shard.steps:
            row: dict[str, Any] = {"op": step.op.value, "xxh3_128": record.tensors[step.name]}
            base = step.name.removesuffix(".weight_codes").removesuffix(".weight")
            if step.op is not Op.KEEP and base != step.name and base in record.figures:
                row["figures"] = record.figures[base]
            rows[step.name] = row
    return rows


def _expert_totals(records: Iterable[ShardRecord]) -> dict[str, Any] | None:
    """Return totals over all repacked experts, None when none was repacked."""
    figures = [f for r in records for f in r.figures.values() if "rows" in f]
    if not figures:
        return None
    worst = max(figures, key=lambda f: f["relative_error"])
    return {
        "matrices": len(figures),
        "exact_matrices": sum(f["codes_changed"] == 0 for f in figures),
        "codes_changed": sum(f["codes_changed"] for f in figures),
        "codes_flushed": sum(f["codes_flushed"] for f in figures),
        "max_span": max(f["max_span"] for f in figures),
        "max_relative_error": worst["relative_error"],
    }


def _host() -> dict[str, Any]:
    libraries = {name: importlib.metadata.version(name) for name in _LIBRARIES if _installed(name)}
    return {"python": platform.python_version(), "machine": platform.machine(), "libraries": libraries}


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def encode_manifest(manifest: Mapping[str, Any]) -> bytes:
    """Return the bytes of `dsv4convert.json`: one tensor per line, so that two can be compared by eye."""
    head = {k: v for k, v in manifest.items() if k != "tensors"}
    text = json.dumps(head, indent=1)[: -len("\n}")]
    rows = ",\n".join(f"  {json.dumps(n)}: {json.dumps(row)}" for n, row in manifest["tensors"].items())
    return f'{text},\n "tensors": {{\n{rows}\n }}\n}}\n'.encode()
