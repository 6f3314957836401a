"""The model card of a conversion: what was changed, how exact it is, how to check it and make it again.

A copied card of the official weights would be a wrong one, so the source's is kept as ``README.source.md``
and a stub of ours takes its place. It holds nothing but facts of plan and manifest, so it is the same on
every machine; its author completes it before publishing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dsv4convert import __version__
from dsv4convert.names import Layout
from dsv4convert.origin import front_matter, license_fields, read_text
from dsv4convert.plan import Op, Plan
from dsv4convert.releases import RELEASES
from dsv4convert.table import Role

CARD = "README.md"
SOURCE_CARD = "README.source.md"
_MARK = "<!-- Stub by dsv4convert: complete it before you publish, then remove this line. -->"
_EXPERTS = {Layout.INT8: "INT8_SHIFT experts", Layout.MXFP4: "MXFP4 experts"}
_HOW = {
    Op.KEEP: "kept",
    Op.DEQUANTIZE_BF16: "FP8 to BF16",
    Op.REPACK_INT8_SHIFT: "MXFP4 to INT8_SHIFT",
}


def copied_files(root: Path, side_files: tuple[str, ...]) -> dict[str, str]:
    """Return target name -> source name of every file that goes along; no target is our own card's."""
    names = {name: name for name in side_files if name != CARD}
    ours = _MARK in read_text(root / CARD)
    # The source's own card, not the stub of a conversion that is being converted further.
    if CARD in side_files and SOURCE_CARD not in names and not ours:
        names[SOURCE_CARD] = CARD
    return dict(sorted(names.items()))


def model_card(plan: Plan, manifest: Mapping[str, Any], root: Path) -> bytes:
    """Return the bytes of the card.

    Args:
        plan: The plan that was carried out.
        manifest: Its manifest.
        root: The source, whose card and LICENSE say what the license is.
    """
    original = front_matter(read_text(root / SOURCE_CARD) or read_text(root / CARD))
    lines = [*_front(plan, original, read_text(root / "LICENSE")), "", *_what(plan, manifest)]
    return "\n".join(
        [*lines, *_changes(plan, manifest), *_checks(plan), *_making(plan, manifest), ""]
    ).encode()


def _front(plan: Plan, original: Mapping[str, str], license_text: str) -> Iterator[str]:
    base = RELEASES[plan.release].repo if plan.release else original.get("base_model")
    fields = {"base_model": base, "base_model_relation": "quantized"} if base else {}
    fields |= license_fields(original, license_text)
    yield "---"
    # A JSON string is a YAML string, whatever it holds.
    yield from (f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in fields.items())
    yield from ("tags:", "- deepseek", "- bf16", f"- {plan.layout.value}", "- dsv4convert", "---")


def _what(plan: Plan, manifest: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"# {plan.title}, converted: BF16 dense weights, {_EXPERTS[plan.layout]}", "", _MARK, "")
    yield "This is not an official checkpoint: it was made from the one below, without training."
    if SOURCE_CARD in manifest["output"]["files_sha256"]:
        yield f"The card of the source is [{SOURCE_CARD}]({SOURCE_CARD})."
    if plan.layout is Layout.INT8:
        yield "The experts are in a layout of dsv4convert: a loader that does not know it cannot read them."


def _changes(plan: Plan, manifest: Mapping[str, Any]) -> Iterator[str]:
    rows = manifest["tensors"]
    yield from ("", "## What was changed", "")
    yield "| family | tensors before | bytes before | tensors | bytes | how | exact |"
    yield "|---|---:|---:|---:|---:|---|---|"
    ops: dict[Role, dict[Op, None]] = {}
    rounded: dict[Role, int] = {}
    for step in (s for p in plan.shards for s in p.steps):
        ops.setdefault(step.role, {}).setdefault(step.op)
        figures = rows[step.name].get("figures", {})
        rounded[step.role] = rounded.get(step.role, 0) + figures.get("inexact_blocks", 0)
    for role, t in plan.roles.items():
        numbers = (t.tensors_in, t.bytes_in, t.tensors_out, t.bytes_out)
        done = [op for op in Op if op in ops.get(role, {})]
        how, exact = ", ".join(_HOW[op] for op in done), _exactness(done, rounded.get(role, 0), manifest)
        yield f"| {role.value} | {' | '.join(f'{n:,}' for n in numbers)} | {how} | {exact} |"
    yield from (
        "",
        f"In all {plan.tensors:,} tensors, {plan.data_bytes:,} bytes of data, {len(plan.shards):,} shards.",
    )


def _exactness(ops: list[Op], rounded: int, manifest: Mapping[str, Any]) -> str:
    if Op.REPACK_INT8_SHIFT in ops:
        e = manifest["experts"]
        found = f"{e['exact_matrices']:,} of {e['matrices']:,} matrices"
        if not e["codes_changed"]:
            return f"{found}: every weight has its value"
        worst = f"worst relative error {e['max_relative_error']:.3g}"
        return f"{found}; {e['codes_changed']:,} codes rounded, {worst}"
    if Op.DEQUANTIZE_BF16 in ops:
        return (
            f"{rounded:,} blocks rounded" if rounded else "yes: code times scale is a BF16 number everywhere"
        )
    return "byte for byte"


def _checks(plan: Plan) -> Iterator[str]:
    yield from ("", "## How to check it", "")
    yield f"With dsv4convert {__version__}, by the manifest's hashes or by recomputing all weights:"
    yield from ("", "```sh", "dsv4convert converted DIRECTORY --read-data")
    yield from ("dsv4convert converted DIRECTORY --reference SOURCE --read-data", "```")
    if plan.layout is Layout.INT8:
        yield from ("", "What was lost per layer and projection is in `dsv4convert.json`, `losses`.")


def _making(plan: Plan, manifest: Mapping[str, Any]) -> Iterator[str]:
    decisions = manifest["plan"]
    yield from ("", "## How to make it again", "", "```sh")
    if plan.release:
        revision = f" --revision {plan.revision}" if plan.revision else ""
        yield f"hf download {RELEASES[plan.release].repo}{revision} --local-dir SOURCE"
    yield from (decisions["command"].replace("SRC DST", "SOURCE DIRECTORY"), "```", "", "| | |", "|---|---|")
    yield f"| source | {plan.title}, layout {plan.source_layout.value} |"
    yield f"| source revision | {plan.revision or 'not known: the download client left none'} |"
    yield f"| plan digest | `{plan.digest}` |"
    names = [f"{key} `{decisions[key]}`" for key in ("packing", "rounding") if decisions[key]]
    yield f"| bytes | {', '.join([*names, 'writer version `' + decisions['writer_version'] + '`'])} |"
