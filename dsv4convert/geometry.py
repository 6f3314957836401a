"""The numbers of `config.json` that decide which tensors exist and what shape they have.

`read_geometry` turns the flat V4 and the nested V4.1 config into one frozen `Geometry`, or says in
findings which field is absent or impossible. It knows no tensor name and no file.

Two traps of the official configs are handled here and nowhere else: 0731 and Pro-0813 say
``num_nextn_predict_layers: 1`` but ship one draft stage per entry of ``dspark_target_layer_ids``; and
``expert_dtype`` may be absent in early previews, where the experts are FP4 all the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from dsv4convert.errors import Finding, finding
from dsv4convert.releases import RELEASES, Release, config

_DSPARK = ("dspark_block_size", "dspark_noise_token_id", "dspark_target_layer_ids", "dspark_markov_rank")
_VISION_FLAT = {
    "layers": "vision_n_layers",
    "dim": "vision_dim",
    "inter": "vision_inter_dim",
    "patch": "vision_patch_size",
    "downsample": "vision_downsample_ratio",
}
_VISION_NESTED = {
    "layers": "num_hidden_layers",
    "dim": "hidden_size",
    "inter": "intermediate_size",
    "patch": "patch_size",
    "downsample": "downsample_ratio",
}


@dataclass(frozen=True, slots=True)
class Vision:
    """Numbers of the vision tower: blocks, width, MLP width, patch side, merge side."""

    layers: int
    dim: int
    inter: int
    patch: int
    downsample: int


@dataclass(frozen=True, slots=True)
class Draft:
    """Numbers of the draft layers ``mtp.*``.

    Attributes:
        stages: Number of ``mtp.N`` blocks.
        targets: Trunk layers whose hidden states feed a DSpark draft; empty for the preview's MTP.
        markov_rank: Rank of the Markov head; 0 without DSpark.
        block_size: Tokens a DSpark draft proposes; 0 without DSpark.
        noise_token: Placeholder token id of the draft; 0 without DSpark.
        experts: Routed experts of a stage.
    """

    stages: int
    targets: tuple[int, ...]
    markov_rank: int
    block_size: int
    noise_token: int
    experts: int

    @property
    def is_dspark(self) -> bool:
        """Tell a DSpark draft from the preview's MTP layer."""
        return bool(self.targets)


@dataclass(frozen=True, slots=True)
class Engram:
    """Numbers of the V4.1 Engram tables: layers that have one, rows of each, ``wkv`` input, row width."""

    layers: tuple[int, ...]
    rows: tuple[int, ...]
    inputs: int
    dim: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """Everything about a model that its tensor names, dtypes and shapes depend on.

    ``family`` is ``v4`` or ``v41``. ``ratios`` holds the compress ratio of each trunk layer;
    ``kv_sources`` and ``index_sources`` the layers with a compressor and an indexer (V4.1 names
    them; for V4 they follow from the ratios). ``block`` is the FP8 block (rows, columns).
    """

    family: str
    hidden: int
    vocab: int
    layers: int
    heads: int
    head_dim: int
    q_lora: int
    o_lora: int
    o_groups: int
    moe_inter: int
    shared: int
    experts: int
    top_k: int
    hash_layers: int
    hc_mult: int
    ratios: tuple[int, ...]
    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    index_heads: int
    index_dim: int
    block: tuple[int, int]
    draft: Draft
    vision: Vision | None
    engram: Engram | None


class _Fields:
    """Typed access to a JSON object that notes every absent or impossible field as a finding."""

    def __init__(self, data: Mapping[str, Any], section: str = "") -> None:
        self.data = data
        self.prefix = f"{section}." if section else ""
        self.findings: list[Finding] = []

    def wrong(self, key: str, expected: str, code: str = "config.field") -> None:
        found = json.dumps(self.data[key])[:80] if key in self.data else "nothing"
        problem = "field of `config.json` cannot be used"
        self.findings.append(finding(code, self.prefix + key, problem, expected=expected, found=found))

    def integer(self, key: str, low: int = 1, default: int | None = None, code: str = "config.field") -> int:
        value = self.data.get(key, default)
        # The upper limit keeps products of hostile numbers out of big-int territory.
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= 1 << 40:
            return value
        self.wrong(key, f"a whole number >= {low}", code)
        return low

    def integers(self, key: str, low: int = 0, code: str = "config.field") -> tuple[int, ...]:
        value = self.data.get(key)
        if (
            not isinstance(value, list)
            or len(value) > 4096
            or any(type(v) is not int or v < low for v in value)
        ):
            self.wrong(key, f"a list of whole numbers >= {low}", code)
            return ()
        return tuple(value)

    def section(self, key: str) -> _Fields:
        value = self.data.get(key)
        if not isinstance(value, dict):
            self.wrong(key, "a JSON object")
            value = {}
        child = _Fields(value, self.prefix + key)
        child.findings = self.findings
        return child


def read_geometry(config: Mapping[str, Any]) -> tuple[Geometry | None, tuple[Finding, ...]]:
    """Read the numbers of a parsed `config.json`.

    Args:
        config: The parsed object of an official, pruned or converted checkpoint.

    Returns:
        The geometry, or None when a field it needs is absent or impossible; and the findings.
    """
    root = _Fields(config)
    model_type = config.get("model_type")
    if model_type not in ("deepseek_v4", "deepseek_v41"):
        problem = "`model_type` is none of this family"
        expected = "`deepseek_v4` or `deepseek_v41`"
        return None, (
            finding(
                "config.unknown-model", "config.json", problem, expected=expected, found=repr(model_type)[:80]
            ),
        )
    nested = model_type == "deepseek_v41"
    text = root.section("text_config") if nested else root
    geometry = _common(root, text, nested)
    root.findings += _contradictions(geometry, text) if not root.findings else []
    return (None if root.findings else geometry), tuple(root.findings)


def _common(root: _Fields, text: _Fields, nested: bool) -> Geometry:
    layers = text.integer("num_hidden_layers")
    draft = _draft(text)
    ratios = text.integers("compress_ratios")
    experts = text.integer("n_routed_experts")
    if "dspark_n_routed_experts" in text.data:
        draft = replace(draft, experts=text.integer("dspark_n_routed_experts"))
    else:
        draft = replace(draft, experts=experts)
    trunk = ratios[:layers]
    if nested:
        kv, index = text.integers("kv_source_layer_ids"), text.integers("index_source_layer_ids")
    else:
        kv = tuple(i for i, r in enumerate(trunk) if r)
        index = tuple(i for i, r in enumerate(trunk) if r == 4)
    return Geometry(
        family="v41" if nested else "v4",
        hidden=text.integer("hidden_size"),
        vocab=text.integer("vocab_size"),
        layers=layers,
        heads=text.integer("num_attention_heads"),
        head_dim=text.integer("head_dim"),
        q_lora=text.integer("q_lora_rank"),
        o_lora=text.integer("o_lora_rank"),
        o_groups=text.integer("o_groups"),
        moe_inter=text.integer("moe_intermediate_size"),
        shared=text.integer("n_shared_experts"),
        experts=experts,
        top_k=text.integer("num_experts_per_tok"),
        hash_layers=0 if nested else text.integer("num_hash_layers", low=0),
        hc_mult=text.integer("hc_mult"),
        ratios=trunk,
        kv_sources=kv,
        index_sources=index,
        index_heads=text.integer("index_n_heads"),
        index_dim=text.integer("index_head_dim"),
        block=_block(root),
        draft=draft,
        vision=_vision(root, nested),
        engram=_engram(text),
    )


def _draft(text: _Fields) -> Draft:
    present = [k for k in _DSPARK if k in text.data]
    if not present:
        stages = text.integer("num_nextn_predict_layers", low=0, default=0)
        return Draft(stages, (), 0, 0, 0, 0)
    code = "config.dspark"
    for key in _DSPARK:
        if key not in text.data:
            text.wrong(key, "all four `dspark_*` fields or none", code)
    if len(present) < len(_DSPARK):
        return Draft(0, (), 0, 0, 0, 0)
    targets = text.integers("dspark_target_layer_ids", code=code)
    return Draft(
        stages=len(targets),
        targets=targets,
        markov_rank=text.integer("dspark_markov_rank", code=code),
        block_size=text.integer("dspark_block_size", code=code),
        noise_token=text.integer("dspark_noise_token_id", low=0, code=code),
        experts=0,
    )


def _block(root: _Fields) -> tuple[int, int]:
    if not isinstance(root.data.get("quantization_config"), dict):
        root.wrong("quantization_config", "a JSON object", "config.quantization")
        return 1, 1
    quantization = root.section("quantization_config")
    block = quantization.integers("weight_block_size", low=1)
    if len(block) != 2:
        if block:
            quantization.wrong("weight_block_size", "two numbers: rows and columns")
        return 1, 1
    return block[0], block[1]


def _vision(root: _Fields, nested: bool) -> Vision | None:
    if nested:
        if "vision_config" not in root.data:
            return None
        section, keys = root.section("vision_config"), _VISION_NESTED
    else:
        if not any(k in root.data for k in _VISION_FLAT.values()):
            return None
        section, keys = root, _VISION_FLAT
    return Vision(**{name: section.integer(key) for name, key in keys.items()})


def _engram(text: _Fields) -> Engram | None:
    if "engram_layer_ids" not in text.data:
        return None
    layers, rows = text.integers("engram_layer_ids"), text.integers("engram_num_embeddings", low=1)
    dim = text.integer("engram_head_dim")
    inputs = (text.integer("engram_max_ngram_size", low=2) - 1) * text.integer("engram_n_heads") * dim
    if len(layers) != len(rows):
        text.wrong("engram_num_embeddings", f"{len(layers)} numbers, one per `engram_layer_ids`")
    return Engram(layers, rows, inputs, dim)


def _contradictions(g: Geometry, text: _Fields) -> list[Finding]:
    """Return findings on fields that are well-formed one by one but do not fit together."""
    check = _Fields(text.data, text.prefix.rstrip("."))
    limits = {
        "num_hidden_layers": g.layers <= 1024,
        "n_routed_experts": max(g.experts, g.draft.experts) <= 1 << 16,
    }
    for key, fits in limits.items():
        if not fits:
            check.wrong(key, "a number a real model could have")
    if check.findings:
        return check.findings  # What depends on an absurd number is no fault of its own.
    total = len(text.data["compress_ratios"])
    if total != g.layers + g.draft.stages:
        key = "compress_ratios"
        where, problem = check.prefix + key, "field does not fit the number of layers and draft stages"
        expected = f"{g.layers} + {g.draft.stages} entries"
        check.findings.append(finding("config.field", where, problem, expected=expected, found=str(total)))
    if g.heads * g.head_dim % g.o_groups:
        check.wrong("o_groups", f"a divisor of {g.heads * g.head_dim} (heads x head_dim)")
    if g.hash_layers > g.layers:
        check.wrong("num_hash_layers", f"at most {g.layers}")
    if g.draft.is_dspark:
        targets = g.draft.targets
        if list(targets) != sorted(set(targets)) or targets[-1] >= g.layers:
            check.wrong(
                "dspark_target_layer_ids", f"increasing layer numbers below {g.layers}", "config.dspark"
            )
        if g.draft.noise_token >= g.vocab:
            check.wrong("dspark_noise_token_id", f"a token id below {g.vocab:,}", "config.dspark")
    for key in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        if any(i >= g.layers for i in text.data.get(key) or ()):
            check.wrong(key, f"layer numbers below {g.layers}")
    return check.findings


@cache
def official_geometry(key: str) -> Geometry:
    """Return the geometry of a release in `RELEASES`."""
    geometry, findings = read_geometry(config(key))
    if geometry is None:
        raise ValueError(f"package data of {key} is damaged: {findings[0]}")
    return geometry


def identify(geometry: Geometry) -> Release | None:
    """Return the release that has exactly this geometry, or None for a derivative or test model.

    DSpark's own numbers are left out of the comparison: a release with a wrong ``dspark_*`` field is
    still that release, and `dspark_findings` says what is wrong with it.
    """
    for key, release in RELEASES.items():
        official = official_geometry(key)
        if _without_dspark_numbers(official) == _without_dspark_numbers(geometry):
            return release
    return None


def _without_dspark_numbers(g: Geometry) -> Geometry:
    if not g.draft.is_dspark:
        return g
    plain = replace(g.draft, targets=tuple(range(g.draft.stages)), block_size=0, noise_token=0)
    return replace(g, draft=plain)


def dspark_findings(geometry: Geometry, release: Release) -> tuple[Finding, ...]:
    """Compare the four DSpark numbers with those of the release the geometry belongs to."""
    official, actual = official_geometry(release.key).draft, geometry.draft
    pairs = {
        "dspark_block_size": (official.block_size, actual.block_size),
        "dspark_noise_token_id": (official.noise_token, actual.noise_token),
        "dspark_target_layer_ids": (list(official.targets), list(actual.targets)),
        "dspark_markov_rank": (official.markov_rank, actual.markov_rank),
    }
    return tuple(
        finding("config.dspark", key, f"not the value of {release.title}", expected=str(want), found=str(got))
        for key, (want, got) in pairs.items()
        if want != got
    )
