"""Checks that read headers, index and small JSON files only: seconds for a terabyte, no torch.

`check_original` judges a download, `check_converted` a conversion, whoever made it. Both say what they did
not check: that every byte of tensor data is the right one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from dsv4convert.catalog import CATALOG
from dsv4convert.checkpoint import Checkpoint
from dsv4convert.errors import EnvironmentFault, Finding, encodable, errors_of, finding
from dsv4convert.files import identity, printable
from dsv4convert.formats.spec import PACKING, ROUNDING
from dsv4convert.handoff import (
    SECTION,
    SKIP_KEYS,
    is_matched,
    is_skipped,
    runtime_modules,
    split_findings,
)
from dsv4convert.journal import DIRECTORY, INDEX, MANIFEST
from dsv4convert.names import Layout, official_shard_count
from dsv4convert.survey import Survey, survey
from dsv4convert.table import Role
from dsv4convert.validate.provenance import (
    MANIFEST_CHECKED,
    MANIFEST_NOT_CHECKED,
    STRUCTURAL,
    manifest_findings,
    read_manifest,
)
from dsv4convert.validate.report import Report

_STRUCTURE = (
    "shards: headers, offsets and sizes",
    "index: against the headers of all shards",
    "tensors: names, dtypes, shapes and scale grids against `config.json`",
)
_CONTENTS = "contents: no tensor byte was compared with a hash or a reference"

#: Files of the official repositories that a deployment misses later, and what for.
_SIDE_FILES = {
    "tokenizer.json": "no text can be encoded without it",
    "tokenizer_config.json": "loaders need it beside `tokenizer.json`",
    "generation_config.json": "sampling defaults and stop tokens",
    "encoding/": "the official prompt format; there is no chat template",
    "inference/": "the official reference code and its config",
}


def check_original(checkpoint: Checkpoint, seen: Survey | None = None) -> Report:
    """Check the structure of a downloaded official checkpoint.

    Args:
        checkpoint: What was opened.
        seen: Its survey, if it was made before.
    """
    seen = seen or survey(checkpoint)
    findings = [*seen.findings]
    if seen.layout in (Layout.MXFP4, Layout.INT8):
        problem = f"stored in the `{seen.layout.value}` layout: somebody converted it"
        findings.append(finding("src.not-official", checkpoint.root.name, problem))
    if seen.geometry and seen.release:
        findings += _shard_count(seen)
    findings += _missing_side_files(checkpoint, seen)
    return _report(seen, findings, _STRUCTURE, (f"{_CONTENTS}; `--checksums auto` does",))


def check_converted(checkpoint: Checkpoint, tp: int | None = None, seen: Survey | None = None) -> Report:
    """Check the structure of a converted checkpoint, its config and its manifest.

    Args:
        checkpoint: A conversion by this tool, or an MXFP4-BF16 checkpoint of other origin.
        tp: Tensor-parallel size whose splits must fall on block or group borders; None to leave it.
        seen: Its survey, if it was made before.
    """
    seen = seen or survey(checkpoint)
    findings = [*seen.findings]
    if (checkpoint.root / DIRECTORY).is_dir():
        problem = "a conversion was begun here and is not finished"
        # A half-made checkpoint lacks index and config: those are consequences, not faults.
        findings = [finding("dst.unfinished", checkpoint.root.name, problem)]
        return _report(seen, findings, (), ("everything: the conversion is not finished",))
    checked = [*_STRUCTURE]
    if seen.layout is Layout.OFFICIAL:
        problem = "its dense weights are FP8: nothing was converted"
        findings.append(finding("dst.not-converted", checkpoint.root.name, problem))
    elif seen.layout and seen.geometry:
        findings += _config_findings(checkpoint, seen, seen.layout)
        findings += _metadata_findings(checkpoint, seen.layout)
        findings += split_findings(seen.geometry, seen.layout, tp) if tp else ()
        findings += _missing_side_files(checkpoint, seen)
        checked.append("config: skip list against the modules of the runtime")
    manifest, faults = read_manifest(checkpoint.root)
    findings += faults
    not_checked = [_CONTENTS]
    if manifest:
        findings += manifest_findings(seen, manifest, errors_of(findings))
        if any(f.code.startswith(STRUCTURAL) for f in findings):
            not_checked.insert(
                0, "manifest: shards and tensors are compared with it when the errors are gone"
            )
        else:
            checked.append(MANIFEST_CHECKED)
            not_checked.append(MANIFEST_NOT_CHECKED)
    findings = [_made_here(f) for f in findings] if manifest else findings
    report = _report(seen, findings, tuple(checked), tuple(not_checked))
    if not manifest:
        return report
    # They tell which conversion a saved report is about, and which copy of it.
    digests = {
        "manifest_sha256": hashlib.sha256((checkpoint.root / MANIFEST).read_bytes()).hexdigest(),
        "identity_sha256": _identity_digest(checkpoint),
    }
    return replace(report, facts={**report.facts, **digests})


def _identity_digest(checkpoint: Checkpoint) -> str:
    """Return what changes with every write to a shard and differs in every copy."""
    rows = []
    for shard in sorted(checkpoint.shards.values(), key=lambda s: s.name):
        try:
            now = os.stat(shard.path)
        except OSError as error:
            problem = f"cannot be read any more: {error.strerror}"
            raise EnvironmentFault(finding("file.unreadable", printable(shard.name), problem)) from None
        rows.append([shard.name, *identity(now)])
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


_MEND = "run the same `convert` command again, which makes damaged shards anew, or fetch the published file"
_DAMAGE = ("shard.", "file.", "index.", "tensor.", "unit.missing", "unit.orphan")


def _made_here(f: Finding) -> Finding:
    """Return a finding about damage with the way to mend what was converted, not downloaded."""
    if f.hint != CATALOG[f.code].hint or not f.code.startswith(_DAMAGE) or f.severity != "error":
        return f
    return replace(
        f,
        hint=_MEND,
    )


def _report(
    seen: Survey, findings: Iterable[Finding], checked: tuple[str, ...], not_checked: tuple[str, ...]
) -> Report:
    if seen.layout is None:
        not_checked = ("tensors: see the errors", *not_checked)
        checked = checked[:2]
    ordered = tuple(sorted(findings, key=lambda f: f.severity))
    return Report(
        encodable(seen.checkpoint.root.name), seen.title, ordered, facts(seen), checked, not_checked
    )


def facts(seen: Survey) -> dict[str, Any]:
    """Return the numbers of a checkpoint that reports show."""
    checkpoint = seen.checkpoint
    codes = (".weight", ".weight_codes")
    experts = sum(".ffn.experts." in n and n.endswith(codes) for n in checkpoint.tensors)
    result: dict[str, Any] = {
        "release": seen.release.key if seen.release else None,
        "layout": seen.layout.value if seen.layout else None,
        "revision": checkpoint.revision,
        "shards": len(checkpoint.shards),
        "tensors": len(checkpoint.tensors),
        "data_bytes": sum(t.nbytes for t in checkpoint.tensors.values()),
        "file_bytes": sum(s.size for s in checkpoint.shards.values()),
        "dtypes": dtype_counts(checkpoint),
        "expert_weights": experts,
        "mtp_tensors": sum(n.startswith("mtp.") for n in checkpoint.tensors),
    }
    if seen.geometry and seen.geometry.draft.is_dspark:
        draft = seen.geometry.draft
        result["dspark"] = {
            "block_size": draft.block_size,
            "noise_token_id": draft.noise_token,
            "target_layer_ids": list(draft.targets),
            "markov_rank": draft.markov_rank,
        }
    return result


def dtype_counts(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the number of tensors of each dtype."""
    return dict(Counter(t.dtype for t in checkpoint.tensors.values()).most_common())


def _shard_count(seen: Survey) -> Iterator[Finding]:
    if seen.geometry is None:
        return
    wanted, found = official_shard_count(seen.geometry), len(set(seen.checkpoint.weight_map.values()))
    if found and found != wanted:
        problem = "another number of shards than the official release"
        yield finding("shard.count", INDEX, problem, expected=str(wanted), found=str(found))


def _missing_side_files(checkpoint: Checkpoint, seen: Survey) -> Iterator[Finding]:
    for name, purpose in _SIDE_FILES.items():
        if name == "generation_config.json" and seen.geometry and seen.geometry.family == "v41":
            continue  # V4.1 ships none.
        present = any(f == name or (name.endswith("/") and f.startswith(name)) for f in checkpoint.side_files)
        reported = any(f.where == name for f in checkpoint.findings)
        if not present and not reported:
            yield finding("side.missing", name, f"not there: {purpose}")


def _config_findings(checkpoint: Checkpoint, seen: Survey, layout: Layout) -> Iterator[Finding]:
    quantization = checkpoint.config["quantization_config"]
    lists = {key: quantization[key] for key in SKIP_KEYS if quantization.get(key)}
    if not lists and SECTION not in checkpoint.config and layout is Layout.INT8:
        problem = "neither section nor skip list is there: this is the `config.json` of the source"
        yield finding("config.section", SECTION, problem)
        return
    if not lists:
        problem = "no skip list: a loader would quantize every BF16 weight again"
        yield finding("config.skip-list", "quantization_config", problem, expected=" or ".join(SKIP_KEYS))
    for key, entries in lists.items():
        yield from _skip_list_findings(f"quantization_config.{key}", entries, seen)
    dtype = checkpoint.config.get("torch_dtype", checkpoint.config.get("dtype"))
    if dtype != "bfloat16":
        problem = "dense weights are BF16 now"
        yield finding("config.field", "torch_dtype", problem, expected="`bfloat16`", found=repr(dtype)[:40])
    yield from _section_findings(checkpoint, layout)


def _skip_list_findings(key: str, entries: Any, seen: Survey) -> Iterator[Finding]:
    if not isinstance(entries, list) or not all(isinstance(e, str) for e in entries):
        yield finding("config.skip-list", key, "is not a list of names", found=repr(entries)[:60])
        return
    dense, other = runtime_modules(seen.units)
    uncovered = [m for m in dense if not is_skipped(m, entries)]
    if uncovered:
        problem = (
            f"{len(uncovered):,} BF16 modules are not skipped: a loader would quantize them again silently"
        )
        draft = [m for m in uncovered if m.endswith(("main_proj", "e_proj", "h_proj"))]
        if draft and len(draft) == len(uncovered):
            problem = "a draft projection is not skipped: drafts would hardly ever be accepted, silently"
        yield finding("config.skip-list", key, problem, expected=f"an entry that matches `{uncovered[0]}`")
    experts = [m for m in other if m.endswith(".experts") and is_skipped(m, entries)]
    if experts:
        problem = (
            f"the routed experts of {len(experts):,} layers are skipped: a loader would expect them in BF16"
        )
        yield finding("config.skip-list", key, problem, expected=f"no entry that matches `{experts[0]}`")
    dead = [e for e in entries if not any(is_matched(e, m) for m in (*dense, *other))]
    for entry in dead:
        yield finding("config.skip-entry", key, f"`{entry[:80]}` matches no module of the runtime")


def _section_findings(checkpoint: Checkpoint, layout: Layout) -> Iterator[Finding]:
    section = checkpoint.config.get(SECTION)
    if section is None and layout is Layout.MXFP4:
        return  # Of other origin; the layout needs no explanation.
    if not isinstance(section, dict):
        problem = "does not say how the experts are stored"
        yield finding("config.section", SECTION, problem, expected="a JSON object", found=repr(section)[:40])
        return
    wanted = {"experts": layout.value}
    if layout is Layout.INT8:
        wanted |= {"packing": PACKING, "rounding": ROUNDING}
    for key, value in wanted.items():
        if section.get(key) != value:
            problem = "does not describe these shards"
            where, found = f"{SECTION}.{key}", repr(section.get(key))[:40]
            yield finding("config.section", where, problem, expected=f"`{value}`", found=found)


def _metadata_findings(checkpoint: Checkpoint, layout: Layout) -> Iterator[Finding]:
    bare = [n for n, s in checkpoint.shards.items() if s.metadata.get("format") != "pt"]
    if bare:
        problem = f"{len(bare):,} shards have no `format: pt` in their metadata"
        yield finding("shard.metadata", bare[0], problem)
    if layout is Layout.INT8:
        packings = {n: s.metadata.get("dsv4convert.packing") for n, s in checkpoint.shards.items()}
        # Without metadata config.json alone says it; two that disagree are an error.
        other = [n for n, packing in packings.items() if packing not in (PACKING, None)]
        if other:
            problem = f"{len(other):,} shards name another packing in their metadata"
            found = repr(packings[other[0]])[:40]
            yield finding("config.section", other[0], problem, expected=f"`{PACKING}`", found=found)


def role_table(seen: Survey) -> dict[Role, tuple[int, int]]:
    """Return role -> (tensors, bytes) of what is there, in the order of the table."""
    table: dict[Role, list[int]] = {}
    for unit in seen.units:
        row = table.setdefault(unit.row.role, [0, 0])
        for name in unit.stored(seen.layout or Layout.OFFICIAL):
            if name in seen.checkpoint.tensors:
                row[0] += 1
                row[1] += seen.checkpoint.tensors[name].nbytes
    return {role: (row[0], row[1]) for role, row in table.items()}
