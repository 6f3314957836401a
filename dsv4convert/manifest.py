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
from dsv4convert.handoff import split_findings
from dsv4convert.journal import ShardRecord
from dsv4convert.memory import Demand, budgets, bytes_per_gpu
from dsv4convert.names import Layout
from dsv4convert.plan import Op, Plan
from dsv4convert.survey import Survey

SCHEMA = "dsv4convert-manifest-1"
#: Tensor-parallel sizes for which the manifest says what a GPU holds.
SIZES = (4, 8)
_CODES = ".weight_codes"
_LIBRARIES = ("numpy", "safetensors", "torch", "xxhash")


def build_manifest(
    plan: Plan,
    records: Iterable[ShardRecord],
    files: Mapping[str, str],
    known: Mapping[str, str],
    memory: Mapping[str, Any],
    run: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the manifest of a finished conversion.

    Args:
        plan: The plan that was carried out.
        records: One record per shard.
        files: Other files of the output -> SHA-256.
        known: Source shards -> SHA-256 as the download client recorded it.
        memory: What `memory_per_gpu` returns.
        run: Facts about this run: jobs, seconds. Library and host facts are added here.
    """
    by_shard = {r.shard: r for r in records}
    decisions = plan.as_dict()
    rows = _tensors(plan, by_shard)
    figures = repack_figures(rows)
    rounded = [f for s in plan.shards for f in by_shard[s.name].rounded]
    made = {key: decisions[key] for key in ("digest", "layout", "packing", "rounding", "writer_version")}
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
            "content_sha256": dict(sorted(known.items())),
        },
        "plan": {**made, "command": command_line(plan.layout.value, bool(rounded))},
        "output": {
            "tensors": plan.tensors,
            "data_bytes": plan.data_bytes,
            "shards": {
                s.name: {"bytes": s.file_bytes, "digest": by_shard[s.name].digest} for s in plan.shards
            },
            "files_sha256": dict(sorted(files.items())),
        },
        "roles": decisions["roles"],
        "experts": expert_totals(figures),
        "losses": losses(figures),
        "rounded": rounded,
        "memory": memory,
        "tensors": rows,
        "run": {**run, **_host()},
    }


def memory_per_gpu(seen: Survey, layout: Layout) -> dict[str, Any]:
    """Return tensor-parallel size -> what each GPU holds, as far as it follows from config and layout.

    The budget is that of a server with the defaults of `Demand`; None for a model that is not served or that
    cannot be split over so many.
    """
    if seen.geometry is None:
        return {}
    rows = {}
    for size in SIZES:
        cuts = [f"{f.where} {f.problem}" for f in split_findings(seen.geometry, layout, size)]
        found = budgets(seen, () if cuts else (size,), Demand())
        # Nothing was asked for, so nothing can fail to fit.
        budget = {k: v for k, v in found[0].as_dict().items() if k != "fits"} if found else None
        rows[str(size)] = {
            "weight_bytes": bytes_per_gpu(seen.units, seen.geometry, seen.release, layout, size),
            "cuts": cuts,
            "budget": budget,
        }
    return rows


def command_line(layout: str, rounded: bool) -> str:
    """Return the command that makes the same output; limits that were kept change nothing."""
    return f"dsv4convert convert SRC DST --experts {layout}" + (" --allow-rounding" if rounded else "")


def _tensors(plan: Plan, by_shard: Mapping[str, ShardRecord]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for shard in plan.shards:
        record = by_shard[shard.name]
        for step in shard.steps:
            row: dict[str, Any] = {"op": step.op.value, "xxh3_128": record.tensors[step.name]}
            base = step.name.removesuffix(_CODES).removesuffix(".weight")
            if step.op is not Op.KEEP and base != step.name and base in record.figures:
                row["figures"] = record.figures[base]
            rows[step.name] = row
    return rows


def repack_figures(rows: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return matrix name -> figures of every repacked expert in the section `tensors` of a manifest."""
    return {
        name.removesuffix(_CODES): row["figures"]
        for name, row in rows.items()
        if name.endswith(_CODES) and "figures" in row
    }


def expert_totals(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return totals over all repacked experts, None when none was repacked."""
    if not figures:
        return None
    seen = list(figures.values())
    return {
        "matrices": len(seen),
        "exact_matrices": sum(f["codes_changed"] == 0 for f in seen),
        "codes_changed": sum(f["codes_changed"] for f in seen),
        "codes_flushed": sum(f["codes_flushed"] for f in seen),
        "max_span": max(f["max_span"] for f in seen),
        "max_relative_error": max(f["relative_error"] for f in seen),
    }


def losses(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return layer -> projection -> what the repack of its experts lost, None when none was repacked."""
    groups: dict[str, dict[str, dict[str, Mapping[str, Any]]]] = {}
    for base, row in figures.items():
        # `layers.3.ffn.experts.17.w1`: all experts of one layer and projection make one row.
        parts = base.split(".")
        projections = groups.setdefault(".".join(parts[:2]), {})
        projections.setdefault(parts[-1], {})[base] = row
    if not groups:
        return None
    return {layer: {p: _loss(found[p]) for p in sorted(found)} for layer, found in groups.items()}


def _loss(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    worst = max(figures, key=lambda base: figures[base]["relative_error"])
    rows = list(figures.values())
    changed = sum(f["codes_changed"] for f in rows)
    return {
        "matrices": len(rows),
        "exact_matrices": sum(f["codes_changed"] == 0 for f in rows),
        "codes_changed": changed,
        "min_exact_share": min(f["exact_share"] for f in rows),
        "max_relative_error": figures[worst]["relative_error"],
        "worst_block": max(f["worst_block"] for f in rows),
        "wide_rows": sum(f["wide_rows"] for f in rows),
        "worst_matrix": worst if changed else None,
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
