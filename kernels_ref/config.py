"""What the model needs to know of a checkpoint's ``config.json``.

Every number is read, none is assumed: ``rms_norm_eps`` is 1e-6 in one release and 1e-20 in another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

#: Most entries that a query may attend to of one kind, and a bound for every other number: a larger one is
#: a mistake, and memory is asked for by it.
_ROWS: Final = 1 << 13
_MANY: Final = 1 << 24
#: What the model has no other form of.
_FIXED: Final[Mapping[str, Any]] = {
    "scoring_func": "sqrtsoftplus",
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "attention_bias": False,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, slots=True)
class Yarn:
    """Parameters of the rotary extension: stretch, trained length, and where the ramp begins and ends."""

    factor: float
    original_length: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Numbers of the draft layers ``mtp.*``.

    Attributes:
        stages: Number of ``mtp.N`` blocks.
        targets: Trunk layers whose outputs feed a DSpark draft; empty for the preview's MTP layer.
        block_size: Tokens a DSpark draft proposes; 0 without DSpark.
        noise_token: Placeholder token id of a DSpark draft; 0 without DSpark.
    """

    stages: int
    targets: tuple[int, ...]
    block_size: int
    noise_token: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The numbers of a DeepSeek-V4 model.

    Attributes:
        hidden: Width D of a stream.
        vocab: Rows of ``embed`` and ``head``.
        ratios: Compress ratio of each trunk layer: 0 (window only), 4 or 128.
        heads, head_dim: Query heads H and their width d, which is also the width of the KV latent.
        rope_dim: Rotated dims at the end of every vector.
        q_lora, o_lora, o_groups: Inner widths of the low-rank projections and groups of the output.
        window: Positions a query sees uncompressed, its own included.
        index_heads, index_dim, index_topk: Indexer of the layers with ratio 4.
        experts, top_k: Routed experts, and how many of them a token activates.
        hash_layers: Leading layers that route by token id.
        route_scale: Sum of the route weights of a token.
        swiglu_limit: Clamp of gate (above) and up (both sides) before they are multiplied.
        hc_mult, hc_iters, hc_eps: Residual streams, Sinkhorn iterations, and their epsilon.
        norm_eps: Epsilon of every RMS norm, that of the streams included.
        rope_theta: Base of layers with ratio 0.
        compress_theta, yarn: Base and extension of the other layers.
        draft: The draft layers.
    """

    hidden: int
    vocab: int
    ratios: tuple[int, ...]
    heads: int
    head_dim: int
    rope_dim: int
    q_lora: int
    o_lora: int
    o_groups: int
    window: int
    index_heads: int
    index_dim: int
    index_topk: int
    experts: int
    top_k: int
    hash_layers: int
    route_scale: float
    swiglu_limit: float
    hc_mult: int
    hc_iters: int
    hc_eps: float
    norm_eps: float
    rope_theta: float
    compress_theta: float
    yarn: Yarn
    draft: DraftConfig

    @property
    def layers(self) -> int:
        """Number of trunk layers."""
        return len(self.ratios)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a parsed ``config.json``, of an official or of a converted checkpoint.

        Raises:
            ValueError: the model is of another kind, or a key is absent or not usable; the message names it.
        """
        fields = _Fields(config)
        _require_v4(fields)
        layers = fields.count("num_hidden_layers")
        ratios = fields.counts("compress_ratios")
        rope_dim = fields.count("qk_rope_head_dim")
        if rope_dim % 2:
            raise _unusable("qk_rope_head_dim", "an even number: dims are rotated in pairs", rope_dim)
        if len(ratios) < layers or set(ratios[:layers]) - {0, 4, 128}:
            raise _unusable("compress_ratios", f"0, 4 or 128 for each of {layers} layers", ratios)
        return cls(
            hidden=fields.count("hidden_size"),
            vocab=fields.count("vocab_size"),
            ratios=ratios[:layers],
            heads=fields.count("num_attention_heads"),
            head_dim=fields.count("head_dim"),
            rope_dim=rope_dim,
            q_lora=fields.count("q_lora_rank"),
            o_lora=fields.count("o_lora_rank"),
            o_groups=fields.count("o_groups"),
            window=fields.count("sliding_window", high=_ROWS),
            index_heads=fields.count("index_n_heads"),
            index_dim=fields.count("index_head_dim"),
            index_topk=fields.count("index_topk", high=_ROWS),
            experts=fields.count("n_routed_experts"),
            top_k=fields.count("num_experts_per_tok"),
            hash_layers=fields.count("num_hash_layers", low=0),
            route_scale=fields.number("routed_scaling_factor"),
            swiglu_limit=fields.number("swiglu_limit"),
            hc_mult=fields.count("hc_mult"),
            hc_iters=fields.count("hc_sinkhorn_iters"),
            hc_eps=fields.number("hc_eps"),
            norm_eps=fields.number("rms_norm_eps"),
            rope_theta=fields.number("rope_theta"),
            compress_theta=fields.number("compress_rope_theta"),
            yarn=_yarn(fields),
            draft=_draft(fields),
        )


class _Fields:
    """Typed access to a JSON object; an error names the key with the path that leads to it."""

    def __init__(self, data: Mapping[str, Any], path: str = "") -> None:
        self._data = data
        self._path = path

    def __contains__(self, key: str) -> bool:
        return key in self._data

    def get(self, key: str) -> Any:
        if key not in self._data:
            raise ValueError(
                f"config.json: `{self._path}{key}` is absent, and the model cannot run without it"
            )
        return self._data[key]

    def count(self, key: str, low: int = 1, high: int = _MANY) -> int:
        value = self.get(key)
        if type(value) is not int or not low <= value <= high:
            raise _unusable(self._path + key, f"a whole number from {low} to {high}", value)
        return value

    def counts(self, key: str) -> tuple[int, ...]:
        value = self.get(key)
        if not isinstance(value, list) or any(type(v) is not int or v < 0 for v in value):
            raise _unusable(self._path + key, "a list of whole numbers >= 0", value)
        return tuple(value)

    def number(self, key: str) -> float:
        value = self.get(key)
        if type(value) not in (int, float) or not value > 0:
            raise _unusable(self._path + key, "a number > 0", value)
        return float(value)

    def section(self, key: str) -> _Fields:
        value = self.get(key)
        if not isinstance(value, Mapping):
            raise _unusable(self._path + key, "a JSON object", value)
        return _Fields(value, f"{self._path}{key}.")


def _unusable(key: str, expected: str, found: object) -> ValueError:
    return ValueError(f"config.json: `{key}` must be {expected}, found {str(found)[:80]!r}")


def _require_v4(fields: _Fields) -> None:
    kind = fields.get("model_type")
    if kind == "deepseek_v41":
        raise ValueError(
            "config.json: `model_type` is deepseek_v41, and the reference model computes deepseek_v4. V4.1 "
            "has single-pass hyper-connections, shared compressed caches and Engram tables: not written here"
        )
    if kind != "deepseek_v4":
        raise _unusable("model_type", "`deepseek_v4`", kind)
    fields.get("scoring_func")
    for key, only in _FIXED.items():
        if key in fields and (fields.get(key) != only or type(fields.get(key)) is not type(only)):
            raise _unusable(key, f"`{json.dumps(only)}`, as in every release", fields.get(key))


def _yarn(fields: _Fields) -> Yarn:
    scaling = fields.section("rope_scaling")
    return Yarn(
        factor=scaling.number("factor"),
        original_length=scaling.count("original_max_position_embeddings"),
        beta_fast=scaling.number("beta_fast"),
        beta_slow=scaling.number("beta_slow"),
    )


def _draft(fields: _Fields) -> DraftConfig:
    if "dspark_target_layer_ids" not in fields:
        key = "num_nextn_predict_layers"
        return DraftConfig(fields.count(key, low=0) if key in fields else 0, (), 0, 0)
    # `num_nextn_predict_layers` says 1 in releases that ship one stage per target layer.
    targets = fields.counts("dspark_target_layer_ids")
    block_size = fields.count("dspark_block_size")
    return DraftConfig(len(targets), targets, block_size, fields.count("dspark_noise_token_id", low=0))
