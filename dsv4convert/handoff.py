"""What a loader must be told: the `config.json` of a converted checkpoint, and how TP splits it.

`quantization_config` stays, because loaders route by it: ``quant_method: fp8`` makes SGLang and
transformers build the MXFP4 expert classes. What is BF16 now goes on the skip list, or a loader would
quantize it again without a word. Names are the runtime's, not the checkpoint's: SGLang 0.5.16 matches dotted
components anywhere in a module path, so one component per kind of module covers target, MTP and DSpark.

Source: SGLang 0.5.16 ``layers/quantization/fp8.py`` and ``models/deepseek_v4*.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from dsv4convert.errors import Finding, finding
from dsv4convert.formats.spec import INT8_SHIFT, MXFP4, PACKING, ROUNDING, ceil_div
from dsv4convert.geometry import Geometry
from dsv4convert.names import Layout, Unit
from dsv4convert.table import Storage
from dsv4convert.writer import WRITER_VERSION

SECTION = "dsv4convert"
#: Both spellings are read, by different loaders.
SKIP_KEYS = ("ignored_layers", "modules_to_not_convert")

#: Component of a checkpoint name -> component of the runtime's module path.
_RUNTIME_COMPONENT = {"attn": "self_attn"}


def skip_list(units: Iterable[Unit]) -> list[str]:
    """Return the runtime modules that hold dense weights stored as BF16, in the order of the model."""
    found: dict[str, None] = {}
    for unit in units:
        if unit.row.storage is Storage.DENSE_FP8:
            parts = unit.base.split(".")[2:]
            # `layers.0.ffn.shared_experts.w1` is skipped by its module, `mtp.0.main_proj` by its own name.
            component = parts[1] if parts[0] == "ffn" else parts[0]
            found.setdefault(_RUNTIME_COMPONENT.get(component, component))
    return list(found)


#: Module names of SGLang 0.5.16 for leaves of checkpoint names; several leaves may be fused into one module.
_RUNTIME_LEAF = {
    "embed": "embed_tokens",
    "head": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "w1": "gate_up_proj",
    "w3": "gate_up_proj",
    "w2": "down_proj",
}


def runtime_modules(units: Iterable[Unit]) -> tuple[list[str], list[str]]:
    """Return the module paths of SGLang 0.5.16: those of dense quantized weights, and all others.

    The target fuses ``wq_a`` and ``wkv`` into ``wqkv_a``; draft stages do not, so that a skip-list entry has
    to match both spellings.
    """
    dense: dict[str, None] = {}
    other: dict[str, None] = {}
    for unit in units:
        storage = unit.row.storage
        # One path stands for all experts of a layer.
        paths = other if storage in (Storage.PLAIN, Storage.EXPERT_MXFP4) else dense
        paths.setdefault(_module_path(unit.base))
    return list(dense), [m for m in other if m not in dense]


def _module_path(base: str) -> str:
    parts = base.removesuffix(".weight").removesuffix(".bias").split(".")
    if parts[0] == "mtp":
        # DSpark draft classes call them stages; the preview's NextN class has one and no index.
        parts[0] = "stages"
    parts = [{"attn": "self_attn", "ffn": "mlp"}.get(p, p) for p in parts]
    if "experts" in parts:
        return ".".join(["model", *parts[: parts.index("experts") + 1]])
    if parts[0] == "layers" and parts[-1] in ("wq_a", "wkv") and parts[-2] == "self_attn":
        parts[-1] = "wqkv_a"
    if parts[0] not in ("vision", "aligner"):
        parts[-1] = _RUNTIME_LEAF.get(parts[-1], parts[-1])
    return ".".join(parts if parts[0] in ("stages", "lm_head") else ["model", *parts])


#: Modules that SGLang fuses and asks about by the names of their parts; `wqkv_a` is not among them.
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "qkv_proj": ("q_proj", "k_proj", "v_proj")}


def is_skipped(module: str, entries: Iterable[str]) -> bool:
    """Tell whether SGLang 0.5.16 leaves a module unquantized, given a skip list.

    A module whose parts are not skipped alike is none: SGLang refuses to build it.

    Args:
        module: Path of the runtime's module.
        entries: The list as `config.json` holds it.

    Source: ``layers/quantization/utils.py`` and ``Fp8Config.from_config`` of SGLang 0.5.16.
    """
    entries = tuple(entries)
    if all(any(is_matched(entry, name) for entry in entries) for name in _asked(module)):
        return True
    # The name of one expert, written in full, skips all experts of its layer.
    return (
        "experts" in module
        and _asked(module) == (module,)
        and any(module in f for e in entries for f in _forms(e))
    )


def is_matched(entry: str, module: str) -> bool:
    """Tell whether an entry matches a name that is asked about, or one of the parts of a fused module."""
    return any(f".{form.rstrip('.')}." in f".{name}." for form in _forms(entry) for name in _asked(module))


def _forms(entry: str) -> tuple[str, str]:
    # Lists come with and without the first component.
    base = entry.removeprefix("model.")
    return base, f"model.{base}"


def _asked(module: str) -> tuple[str, ...]:
    head, _, leaf = module.rpartition(".")
    return tuple(f"{head}.{part}" for part in _PARTS[leaf]) if leaf in _PARTS else (module,)


def converted_config(
    config: Mapping[str, Any], units: Iterable[Unit], layout: Layout, revision: str | None
) -> dict[str, Any]:
    """Return the `config.json` of a converted checkpoint; unknown keys and key order are kept.

    Args:
        config: The source's config.
        units: The logical weights of the model.
        layout: Layout of the output.
        revision: Commit of the source, if known.
    """
    result = dict(config)
    quantization = dict(config["quantization_config"])
    for key in SKIP_KEYS:
        quantization[key] = skip_list(units)
    result["quantization_config"] = quantization
    # Old releases say `torch_dtype`, V4.1 says `dtype`; whichever is there is the one its loader reads.
    result["torch_dtype" if "dtype" not in config else "dtype"] = "bfloat16"
    result[SECTION] = own_section(layout, revision)
    return result


def own_section(layout: Layout, revision: str | None) -> dict[str, Any]:
    """Return the section that tells our runtime how the experts are stored."""
    section: dict[str, Any] = {"experts": layout.value, "writer_version": WRITER_VERSION}
    if layout is Layout.INT8:
        section |= {"packing": PACKING, "rounding": ROUNDING}
    return section | {"source_revision": revision}


def encode_config(config: Mapping[str, Any]) -> bytes:
    """Return the bytes of a `config.json`."""
    return (json.dumps(config, indent=2) + "\n").encode()


def split_findings(g: Geometry, layout: Layout, tp: int) -> tuple[Finding, ...]:
    """Return a finding for every matrix that `tp` GPUs cannot share evenly, in whole blocks or groups."""
    if tp < 1:
        raise ValueError(f"a tensor-parallel size is at least 1, got {tp}")
    unit_name, step = ("group", INT8_SHIFT.group) if layout is Layout.INT8 else ("block", MXFP4.block[1])
    splits = (
        ("routed experts w2", g.moe_inter, step, f"{unit_name}s of {step} along K"),
        ("shared experts", g.moe_inter * g.shared, 1, "whole rows"),
        ("attention heads", g.heads, 1, "whole heads"),
        ("output groups of wo_a", g.o_groups, 1, "whole groups"),
        ("vocabulary", ceil_div(g.vocab, 64) * 64, 1, "whole rows"),
    )
    return tuple(
        finding(
            "tp.split",
            what,
            f"cannot be split over {tp} GPUs in {pieces}",
            expected=f"a multiple of {tp * multiple:,}",
            found=f"{size:,} ({size / tp:,.4g} per GPU)",
        )
        for what, size, multiple, pieces in splits
        if size % (tp * multiple)
    )
