"""What a checkpoint is, and whether its tensors are those its `config.json` requires.

`survey` names the release and the layout, and says in findings every tensor that is missing, unknown or
stored otherwise than its role demands. Only names, dtypes and shapes are looked at; no tensor is read. What
the reader has already reported (a tensor whose shard is missing, a tensor outside the index) is not
reported again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dsv4convert.checkpoint import Checkpoint
from dsv4convert.errors import Finding, finding
from dsv4convert.formats.spec import DTYPE_BITS, Shape, Stored
from dsv4convert.geometry import Geometry, dspark_findings, identify, read_geometry
from dsv4convert.header import TensorInfo
from dsv4convert.names import Layout, Unit, expected_units, lookup, pattern_of
from dsv4convert.releases import Release
from dsv4convert.table import Role, Storage

_RESAVED = ("model.", "lm_head.")
_FOREIGN_SUFFIXES = (".weight_scale_inv", ".weight_scale", ".weight_packed")
_VISION_ROLES = (Role.VISION, Role.ALIGNER, Role.IMAGE_TOKEN)
_EXPERT = re.compile(r"(?:layers|mtp)\.\d+\.ffn\.experts\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Survey:
    """What `survey` found.

    Attributes:
        checkpoint: The checkpoint that was looked at.
        geometry: Numbers of its config, or None when the config cannot be used.
        release: The official release with this geometry, or None for a derivative or test model.
        layout: How its weights are stored; None when the names are of another family altogether.
        units: The logical weights the config requires, whether or not they were found.
        findings: Everything wrong, the reader's findings included; errors first.
    """

    checkpoint: Checkpoint
    geometry: Geometry | None
    release: Release | None
    layout: Layout | None
    units: tuple[Unit, ...]
    findings: tuple[Finding, ...]

    @property
    def title(self) -> str:
        """Name of the release for people."""
        if self.release:
            return self.release.title
        if self.geometry is None:
            return "unknown model"
        return "DeepSeek-V4.1 derivative" if self.geometry.family == "v41" else "DeepSeek-V4 derivative"


def survey(checkpoint: Checkpoint) -> Survey:
    """Say what a checkpoint is and compare its tensors with what its config requires."""
    known = list(checkpoint.findings)
    if not checkpoint.config or any(f.code == "dir.no-weights" for f in known):
        return Survey(checkpoint, None, None, None, (), tuple(known))
    geometry, faults = read_geometry(checkpoint.config)
    foreign = _foreign_layout(checkpoint.tensors, checkpoint.config)
    if geometry is None or foreign:
        # A foreign layout explains an odd config better than the config's own fields do.
        known += (foreign,) if foreign else faults
        return Survey(checkpoint, geometry, None, None, (), _sorted(known))
    release = identify(geometry)
    known += dspark_findings(geometry, release) if release else ()
    known += _quantization_findings(checkpoint.config)
    held = _experts_held(checkpoint.tensors)
    if held not in (None, geometry.experts) and geometry.draft.experts in (0, geometry.experts):
        known.append(_pruned(geometry, held))
        # Everything else is compared with the model that the tensors belong to.
        draft = replace(geometry.draft, experts=held if geometry.draft.experts else 0)
        geometry = replace(geometry, experts=held, draft=draft)
    units = tuple(expected_units(geometry))
    impossible = _impossible_shapes(units)
    if impossible:
        return Survey(checkpoint, geometry, release, None, units, _sorted([*known, impossible]))
    layout = detect_layout(checkpoint.tensors)
    # Without a single readable shard the reader has said what is wrong.
    known += () if not checkpoint.tensors else _compare(checkpoint, geometry, layout, units)
    return Survey(checkpoint, geometry, release, layout, units, _sorted(known))


def _experts_held(tensors: Mapping[str, TensorInfo]) -> int | None:
    """Return the number of routed experts if all routers and expert names agree on it."""
    rows = {t.shape[:1] for n, t in tensors.items() if n.endswith(".ffn.gate.weight")}
    numbers = {int(m[1]) for m in map(_EXPERT.match, tensors) if m and len(m[1]) < 9}
    count = len(numbers)
    return count if rows == {(count,)} and max(numbers, default=0) == count - 1 else None


def _pruned(geometry: Geometry, held: int) -> Finding:
    key = "text_config.n_routed_experts" if geometry.family == "v41" else "n_routed_experts"
    problem = "is not the number of routed experts that routers and shards hold"
    hint = "a pruned checkpoint needs its own `config.json`; otherwise download the official shards"
    return finding(
        "config.field", key, problem, expected=f"{held:,}", found=f"{geometry.experts:,}", hint=hint
    )


def _sorted(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda f: f.severity))


def _quantization_findings(config: Mapping[str, Any]) -> Iterator[Finding]:
    quantization = config["quantization_config"]
    wanted = {
        "quant_method": ("fp8",),
        "scale_fmt": ("ue8m0",),
        "fmt": ("e4m3", None),
        "activation_scheme": ("dynamic",),
    }
    for key, values in wanted.items():
        value = quantization.get(key)
        if value not in values:
            problem = "does not describe block-FP8 weights with UE8M0 scales"
            where, expected = f"quantization_config.{key}", f"`{values[0]}`"
            yield finding("config.quantization", where, problem, expected=expected, found=repr(value)[:40])


def _compare(
    checkpoint: Checkpoint, geometry: Geometry, layout: Layout, units: Iterable[Unit]
) -> Iterator[Finding]:
    expected: dict[str, tuple[Stored, Unit]] = {}
    for unit in units:
        for name, stored in unit.stored(layout).items():
            expected[name] = stored, unit
    tensors = checkpoint.tensors
    reported = {n for n in checkpoint.weight_map if n not in tensors}
    return _merge_alike(
        [
            *_missing(expected, tensors, reported, geometry),
            *_otherwise_stored(expected, tensors),
            *_surplus(expected, checkpoint, geometry),
        ]
    )


def detect_layout(tensors: Mapping[str, TensorInfo]) -> Layout:
    """Tell the layout from the stored dtypes of dense weights and the names of routed experts."""
    dense: Counter[str] = Counter()
    for name, info in tensors.items():
        if name.endswith(".weight_codes"):
            return Layout.INT8
        # The vision tower is BF16 in every layout, and beside a few layers it has most of the matrices.
        if ".attn.w" in name and name.endswith(".weight") and not name.startswith("vision."):
            dense[info.dtype] += 1
    return Layout.OFFICIAL if dense["F8_E4M3"] >= dense["BF16"] else Layout.MXFP4


def _foreign_layout(tensors: Mapping[str, TensorInfo], config: Mapping[str, object]) -> Finding | None:
    resaved = [n for n in tensors if n.startswith(_RESAVED)]
    if resaved:
        problem = f"{len(resaved):,} tensors carry library names instead of the official ones"
        return finding("name.resaved", resaved[0], problem)
    suffixed = [n for n in tensors if n.endswith(_FOREIGN_SUFFIXES)]
    if suffixed:
        suffix = suffixed[0].rsplit(".", 1)[1]
        problem = f"{len(suffixed):,} tensors end in `.{suffix}`, a Hugging Face or compressed-tensors layout"
        return finding("name.scale-suffix", suffixed[0], problem)
    return _base_release(tensors, config)


def _base_release(tensors: Mapping[str, TensorInfo], config: Mapping[str, object]) -> Finding | None:
    quantization = config.get("quantization_config")
    declared = config.get("expert_dtype") or (
        isinstance(quantization, dict) and quantization.get("expert_dtype")
    )
    for name, info in tensors.items():
        if ".ffn.experts." not in name or not name.endswith(".weight"):
            continue
        scale = tensors.get(name.removesuffix(".weight") + ".scale")
        if info.dtype == "F8_E4M3" and (scale is None or scale.dtype == "F32"):
            expected = "packed MXFP4 (I8) with F8_E8M0 scales"
            found = f"{info.dtype} with {scale.dtype if scale else 'no'} scales"
            problem = "routed experts are FP8: this is a Base checkpoint"
            return finding("release.base", name, problem, expected=expected, found=found)
        break
    if declared not in (None, False, "fp4"):
        problem = "the config announces other routed experts than MXFP4"
        return finding("release.base", "expert_dtype", problem, expected="`fp4`", found=repr(declared)[:40])
    return None


def _impossible_shapes(units: Iterable[Unit]) -> Finding | None:
    for unit in units:
        if unit.row.storage is Storage.EXPERT_MXFP4 and unit.shape[1] % 32:
            problem = "the config makes an MXFP4 row that is no whole number of blocks"
            found = f"K = {unit.shape[1]:,}"
            return finding(
                "unit.shape", f"{unit.base}.weight", problem, expected="a multiple of 32", found=found
            )
    return None


def _missing(
    expected: Mapping[str, tuple[Stored, Unit]],
    tensors: Mapping[str, TensorInfo],
    reported: set[str],
    geometry: Geometry,
) -> Iterator[Finding]:
    absent = [n for n in expected if n not in tensors and n not in reported]
    if not absent:
        return
    if geometry.vision and not any(
        u.row.role in _VISION_ROLES for n, (_, u) in expected.items() if n in tensors
    ):
        problem = "the config describes a vision tower, but no vision tensor is there"
        yield finding("config.vision", "config.json", problem)
        absent = [
            n for n in absent if expected[n][1].row.role not in _VISION_ROLES and not n.endswith(".bias_vl")
        ]
    wanted = Counter(_block_of(n) for n in expected)
    lost = Counter(_block_of(n) for n in absent)
    gone = {block for block, count in lost.items() if block and count == wanted[block]}
    for block in sorted(gone):
        problem = f"all {wanted[block]:,} tensors of this block are missing"
        yield finding("unit.missing-tensor", f"{block}.*", problem)
    units = {expected[n][1].base: expected[n][1] for n in absent if _block_of(n) not in gone}
    lacking = set(absent)
    for unit in units.values():
        yield _missing_part(unit, [n for n in expected_names(unit, expected) if n in lacking], tensors)


def expected_names(unit: Unit, expected: Mapping[str, tuple[Stored, Unit]]) -> list[str]:
    """Return the names that store a unit in the layout that `expected` was built for."""
    candidates = [unit.base, *(name for layout in Layout for name in unit.stored(layout))]
    return [n for n in dict.fromkeys(candidates) if n in expected]


def _missing_part(unit: Unit, lacking: list[str], tensors: Mapping[str, TensorInfo]) -> Finding:
    codes = next((n for n in lacking if n.endswith((".weight", ".weight_codes", unit.base))), None)
    kept = next((n for n in (unit.base + s for s in (".weight", ".weight_codes")) if n in tensors), None)
    if codes is None and kept:
        problem = f"{unit.row.storage.value} weight has no block scale"
        return finding("unit.missing-scale", kept, problem, expected=f"`{lacking[0]}` in the index")
    scale = f"{unit.base}.scale"
    if codes and scale in tensors:
        return finding(
            "unit.orphan-scale", scale, "block scale has no weight", expected=f"`{codes}` in the index"
        )
    return finding("unit.missing-tensor", lacking[0], "required by `config.json`, but no shard holds it")


def _block_of(name: str) -> str:
    parts = name.split(".", 2)
    return ".".join(parts[:2]) if parts[0] in ("layers", "mtp") and len(parts) > 2 else ""


def _otherwise_stored(
    expected: Mapping[str, tuple[Stored, Unit]], tensors: Mapping[str, TensorInfo]
) -> Iterator[Finding]:
    for name, (stored, unit) in expected.items():
        info = tensors.get(name)
        if info is None or (info.dtype, info.shape) == stored or _same_codes(info, stored, unit):
            continue
        if info.dtype not in DTYPE_BITS:
            continue  # The reader has said so.
        yield _stored_finding(info, stored, unit, name.endswith(".scale"))


def _same_codes(info: TensorInfo, stored: Stored, unit: Unit) -> bool:
    """Tell whether packed E2M1 codes are stored under one of their other dtypes, with the same bytes."""
    dtype, shape = stored
    if unit.row.storage is not Storage.EXPERT_MXFP4 or dtype != "I8":
        return False
    # F4 headers give the logical shape, one element per code.
    return (info.dtype, info.shape) in (("U8", shape), ("F4", unit.shape))


def _stored_finding(info: TensorInfo, stored: Stored, unit: Unit, is_scale: bool) -> Finding:
    dtype, shape = stored
    if info.dtype != dtype:
        code = "unit.scale-dtype" if is_scale else "unit.dtype"
        problem = "block scale has another dtype" if is_scale else f"{unit.row.role.value} has another dtype"
        return finding(code, info.name, problem, expected=dtype, found=info.dtype)
    if is_scale:
        block = "x".join(map(str, unit.block))
        problem = f"scale grid does not match {list(unit.shape)} in {block} blocks"
        return finding(
            "unit.scale-grid", info.name, problem, expected=_shape(shape), found=_shape(info.shape)
        )
    problem = f"{unit.row.role.value} has another shape"
    return finding("unit.shape", info.name, problem, expected=_shape(shape), found=_shape(info.shape))


def _shape(shape: Shape) -> str:
    return str(list(shape))


def _surplus(
    expected: Mapping[str, tuple[Stored, Unit]], checkpoint: Checkpoint, geometry: Geometry
) -> Iterator[Finding]:
    vision = 0
    # Routers of hash layers have a bias only beside a vision tower.
    tower = (".bias_vl", ".gate.bias") if "vision.norm.weight" in checkpoint.tensors else (".bias_vl",)
    for name in checkpoint.tensors:
        if name in expected or name not in checkpoint.weight_map:
            continue
        match = lookup(name)
        if match is None:
            yield finding("name.unknown", name, "no rule knows this name")
        elif geometry.vision is None and (match.row.role in _VISION_ROLES or name.endswith(tower)):
            vision += 1
        elif match.suffix == ".scale":
            weight = checkpoint.tensors.get(name.removesuffix(".scale") + ".weight")
            if weight and weight.dtype == "F8_E4M3" and weight.name in expected:
                continue  # The dtype of the weight is the fault.
            yield finding("unit.orphan-scale", name, "block scale of a weight that needs none here")
        else:
            yield finding("name.unexpected", name, "known, but `config.json` describes a model without it")
    if vision:
        problem = f"{vision:,} vision tensors are there, but the config has no vision fields"
        yield finding("config.vision", "config.json", problem)


def _merge_alike(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Merge findings that differ only in numbers or expert matrix of the tensor name; keep the first name."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for f in findings:
        groups.setdefault((f.code, _family(f.where), f.problem, _family(f.expected), f.found), []).append(f)
    for first, *others in groups.values():
        if not others:
            yield first
            continue
        problem = f"{first.problem} (and {len(others):,} more tensors like it)"
        yield finding(first.code, first.where, problem, expected=first.expected, found=first.found)


def _family(name: str) -> str:
    """Return the pattern of a name; the three matrices of a routed expert have one."""
    pattern = pattern_of(name)
    return re.sub(r"\.w[123]\b", ".w#", pattern) if ".experts.#." in pattern else pattern
