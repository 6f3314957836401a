"""The tensor names of the DeepSeek-V4 family, as one table.

A row is an anchored pattern with its role, its storage, the places of a model that have it and its logical
shape there. The table is total: every name of every supported release matches a row, and for a given
geometry exactly one. Nothing else in the package spells a tensor name or decides how a tensor is stored;
`names` turns the table into the tensors of a model.

In a pattern ``{b}`` stands for ``layers`` and ``mtp``, ``#`` for a decimal number. Row order is the order
in which reports list things; it has no meaning for files.

Source: shard headers of the published checkpoints; see ``docs/releases.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from dsv4convert.formats.spec import Shape
from dsv4convert.place import (
    At,
    always,
    has_bias,
    has_engram,
    has_stage_end,
    has_vision,
    is_dspark,
    is_preview_stage,
    v4,
)


class Role(str, Enum):
    """What the model uses a tensor for."""

    EMBEDDING = "embedding"
    HEAD = "output head"
    NORM = "norm"
    HYPER_CONNECTION = "hyper-connection"
    ATTENTION = "attention"
    COMPRESSOR = "compressor"
    INDEXER = "indexer"
    ROUTER = "router"
    SHARED_EXPERT = "shared expert"
    ROUTED_EXPERT = "routed expert"
    DRAFT = "draft head"
    VISION = "vision tower"
    ALIGNER = "aligner"
    IMAGE_TOKEN = "image token"
    ENGRAM = "engram"


class Storage(str, Enum):
    """How an official checkpoint stores a weight."""

    PLAIN = "plain"
    DENSE_FP8 = "fp8 block"
    EXPERT_MXFP4 = "mxfp4"
    TABLE_FP8 = "fp8 table"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        pattern: Tensor name, or for quantized weights the name without ``.weight`` / ``.scale``.
        role: What the tensor is for.
        storage: How the official checkpoint stores it.
        dtype: safetensors dtype of a plain tensor; empty for quantized ones.
        shape: Logical shape at a place.
        when: Tells whether the place has this tensor.
    """

    pattern: str
    role: Role
    storage: Storage
    dtype: str
    shape: Callable[[At], Shape]
    when: Callable[[At], bool]


Measure = Callable[[At], Shape]
Condition = Callable[[At], bool]


def _plain(pattern: str, role: Role, dtype: str, shape: Measure, when: Condition = always) -> Row:
    return Row(pattern, role, Storage.PLAIN, dtype, shape, when)


def _fp8(pattern: str, role: Role, shape: Measure, when: Condition = always) -> Row:
    return Row(pattern, role, Storage.DENSE_FP8, "", shape, when)


def _hidden(at: At) -> Shape:
    return (at.g.hidden,)


def _hyper_connection(prefix: str) -> tuple[Row, ...]:
    role = Role.HYPER_CONNECTION
    return (
        _plain(
            f"{prefix}_fn", role, "F32", lambda a: (a.g.hc_mult * (a.g.hc_mult + 2), a.g.hc_mult * a.g.hidden)
        ),
        _plain(f"{prefix}_base", role, "F32", lambda a: (a.g.hc_mult * (a.g.hc_mult + 2),)),
        _plain(f"{prefix}_scale", role, "F32", lambda a: (3,)),
    )


def _head_connection(prefix: str, when: Condition) -> tuple[Row, ...]:
    role = Role.HYPER_CONNECTION
    return (
        _plain(f"{prefix}hc_head_fn", role, "F32", lambda a: (a.g.hc_mult, a.g.hc_mult * a.g.hidden), when),
        _plain(f"{prefix}hc_head_base", role, "F32", lambda a: (a.g.hc_mult,), when),
        _plain(f"{prefix}hc_head_scale", role, "F32", lambda a: (1,), when),
    )


def _feed_forward(prefix: str, role: Role, storage: Storage, width: Callable[[At], int]) -> tuple[Row, ...]:
    def wide(at: At) -> Shape:
        return width(at), at.g.hidden

    def narrow(at: At) -> Shape:
        return at.g.hidden, width(at)

    shapes: dict[str, Measure] = {"w1": wide, "w2": narrow, "w3": wide}
    return tuple(Row(f"{prefix}.{w}", role, storage, "", shape, always) for w, shape in shapes.items())


def _compressor(
    prefix: str, when: Condition, width: Callable[[At], int], norm: Callable[[At], int]
) -> tuple[Row, ...]:
    """Rows of a V4 compressor: positional bias, value and gate projections, norm."""
    role = Role.COMPRESSOR
    return (
        _plain(f"{prefix}.ape", role, "F32", lambda a: (a.ratio, width(a)), when),
        _plain(f"{prefix}.wkv.weight", role, "BF16", lambda a: (width(a), a.g.hidden), when),
        _plain(f"{prefix}.wgate.weight", role, "BF16", lambda a: (width(a), a.g.hidden), when),
        _plain(f"{prefix}.norm.weight", role, "BF16", lambda a: (norm(a),), when),
    )


_MODEL = (
    _plain("embed.weight", Role.EMBEDDING, "BF16", lambda a: (a.g.vocab, a.g.hidden)),
    _plain("head.weight", Role.HEAD, "BF16", lambda a: (a.g.vocab, a.g.hidden)),
    _plain("norm.weight", Role.NORM, "BF16", _hidden),
    *_head_connection("", v4),
    _plain("image_start", Role.IMAGE_TOKEN, "BF16", _hidden, has_vision),
    _plain("image_end", Role.IMAGE_TOKEN, "BF16", _hidden, has_vision),
    _plain("image_newline", Role.IMAGE_TOKEN, "BF16", _hidden, has_vision),
    _plain("image_pad", Role.IMAGE_TOKEN, "BF16", _hidden, lambda a: has_vision(a) and v4(a)),
)

_ATTENTION = (
    _plain("{b}.#.attn.attn_sink", Role.ATTENTION, "F32", lambda a: (a.g.heads,)),
    _plain("{b}.#.attn.q_norm.weight", Role.NORM, "BF16", lambda a: (a.g.q_lora,)),
    _plain("{b}.#.attn.kv_norm.weight", Role.NORM, "BF16", lambda a: (a.g.head_dim,)),
    _fp8("{b}.#.attn.wq_a", Role.ATTENTION, lambda a: (a.g.q_lora, a.g.hidden)),
    _fp8("{b}.#.attn.wq_b", Role.ATTENTION, lambda a: (a.g.heads * a.g.head_dim, a.g.q_lora)),
    _fp8("{b}.#.attn.wkv", Role.ATTENTION, lambda a: (a.g.head_dim, a.g.hidden)),
    # Block-diagonal over o_groups: each group of heads has its own o_lora rows.
    _fp8(
        "{b}.#.attn.wo_a",
        Role.ATTENTION,
        lambda a: (a.g.o_groups * a.g.o_lora, a.g.heads * a.g.head_dim // a.g.o_groups),
    ),
    _fp8("{b}.#.attn.wo_b", Role.ATTENTION, lambda a: (a.g.hidden, a.g.o_groups * a.g.o_lora)),
)

_SPARSE_V4 = (
    *_compressor(
        "{b}.#.attn.compressor",
        lambda a: v4(a) and a.has_compressor,
        # Ratio 4 overlaps two windows and keeps both halves side by side.
        lambda a: a.g.head_dim * (2 if a.ratio == 4 else 1),
        lambda a: a.g.head_dim,
    ),
    *_compressor(
        "{b}.#.attn.indexer.compressor",
        lambda a: v4(a) and a.has_indexer,
        lambda a: a.g.index_dim * 2,
        lambda a: a.g.index_dim,
    ),
)

_SPARSE = (
    _fp8(
        "{b}.#.attn.indexer.wq_b",
        Role.INDEXER,
        lambda a: (a.g.index_heads * a.g.index_dim, a.g.q_lora),
        lambda a: a.has_indexer,
    ),
    _plain(
        "{b}.#.attn.indexer.weights_proj.weight",
        Role.INDEXER,
        "BF16",
        lambda a: (a.g.index_heads, a.g.hidden),
        lambda a: a.has_indexer,
    ),
)


def _v41_sparse(suffix: str, role: Role, shape: Measure, when: Condition = always) -> Row:
    """Row of a V4.1 compressor or index key, which share names with V4 but not shapes."""
    return _plain(
        f"{{b}}.#.attn.{suffix}.weight",
        role,
        "BF16",
        shape,
        lambda a: not v4(a) and a.has_compressor and when(a),
    )


_SPARSE_V41 = (
    _v41_sparse("compressor.wkv", Role.COMPRESSOR, lambda a: (a.g.head_dim, a.g.hidden)),
    _v41_sparse("compressor.norm", Role.COMPRESSOR, lambda a: (a.g.head_dim,)),
    # Ratio 1 keeps every position: there is nothing to gate.
    _v41_sparse(
        "compressor.wgate", Role.COMPRESSOR, lambda a: (a.g.head_dim, a.g.hidden), lambda a: a.ratio > 1
    ),
    _v41_sparse("indexer.wk", Role.INDEXER, lambda a: (a.g.index_dim, a.g.head_dim)),
    _v41_sparse("indexer.k_norm", Role.INDEXER, lambda a: (a.g.index_dim,)),
)

_FFN = (
    _plain("{b}.#.ffn.gate.weight", Role.ROUTER, "BF16", lambda a: (a.experts, a.g.hidden)),
    _plain(
        "{b}.#.ffn.gate.tid2eid", Role.ROUTER, "I64", lambda a: (a.g.vocab, a.g.top_k), lambda a: a.is_hash
    ),
    _plain("{b}.#.ffn.gate.bias", Role.ROUTER, "F32", lambda a: (a.experts,), has_bias),
    _plain("{b}.#.ffn.gate.bias_vl", Role.ROUTER, "F32", lambda a: (a.experts,), has_vision),
    *_feed_forward(
        "{b}.#.ffn.shared_experts",
        Role.SHARED_EXPERT,
        Storage.DENSE_FP8,
        lambda a: a.g.moe_inter * a.g.shared,
    ),
    *_feed_forward("{b}.#.ffn.experts.#", Role.ROUTED_EXPERT, Storage.EXPERT_MXFP4, lambda a: a.g.moe_inter),
)

_ENGRAM = (
    Row(
        "{b}.#.engram.embed",
        Role.ENGRAM,
        Storage.TABLE_FP8,
        "",
        lambda a: (a.engram.rows[a.engram.layers.index(a.index)], a.engram.dim),
        has_engram,
    ),
    _fp8(
        "{b}.#.engram.wkv",
        Role.ENGRAM,
        lambda a: ((a.g.hc_mult + 1) * a.g.hidden, a.engram.inputs),
        has_engram,
    ),
    _plain("{b}.#.engram.q_weight", Role.ENGRAM, "BF16", lambda a: (a.g.hc_mult, a.g.hidden), has_engram),
    _plain("{b}.#.engram.k_weight", Role.ENGRAM, "BF16", lambda a: (a.g.hc_mult, a.g.hidden), has_engram),
)


def _markov(suffix: str, family: str) -> Row:
    def when(at: At) -> bool:
        return is_dspark(at) and at.is_last_stage and at.g.family == family

    shape: Measure = lambda a: (a.g.vocab, a.g.draft.markov_rank)  # noqa: E731
    return _plain(f"{{b}}.#.markov_head.{suffix}.weight", Role.DRAFT, "BF16", shape, when)


_DRAFT = (
    _fp8(
        "{b}.#.main_proj",
        Role.DRAFT,
        lambda a: (a.g.hidden, len(a.g.draft.targets) * a.g.hidden),
        lambda a: is_dspark(a) and a.is_first_stage,
    ),
    _plain("{b}.#.main_norm.weight", Role.NORM, "BF16", _hidden, lambda a: is_dspark(a) and a.is_first_stage),
    _fp8("{b}.#.e_proj", Role.DRAFT, lambda a: (a.g.hidden, a.g.hidden), is_preview_stage),
    _fp8("{b}.#.h_proj", Role.DRAFT, lambda a: (a.g.hidden, a.g.hidden), is_preview_stage),
    _plain("{b}.#.enorm.weight", Role.NORM, "BF16", _hidden, is_preview_stage),
    _plain("{b}.#.hnorm.weight", Role.NORM, "BF16", _hidden, is_preview_stage),
    _plain("{b}.#.norm.weight", Role.NORM, "BF16", _hidden, has_stage_end),
    *_head_connection("{b}.#.", lambda a: v4(a) and has_stage_end(a)),
    _markov("markov_w1", "v4"),
    _markov("markov_w2", "v4"),
    _markov("embed", "v41"),
    _markov("head", "v41"),
    _plain(
        "{b}.#.confidence_head.proj.weight",
        Role.DRAFT,
        "BF16",
        lambda a: (1, a.g.hidden + a.g.draft.markov_rank),
        lambda a: is_dspark(a) and a.is_last_stage,
    ),
)


def _vision(suffix: str, shape: Measure, role: Role = Role.VISION) -> Row:
    return _plain(suffix, role, "BF16", shape, has_vision)


_VISION = (
    _vision("vision.patch_embed.proj.weight", lambda a: (a.tower.dim, 3 * a.tower.patch**2)),
    _vision("vision.patch_embed.proj.bias", lambda a: (a.tower.dim,)),
    _vision("vision.norm.weight", lambda a: (a.tower.dim,)),
    _vision("vision.blocks.#.norm1.weight", lambda a: (a.tower.dim,)),
    _vision("vision.blocks.#.norm2.weight", lambda a: (a.tower.dim,)),
    _vision("vision.blocks.#.attn.wqkv.weight", lambda a: (3 * a.tower.dim, a.tower.dim)),
    _vision("vision.blocks.#.attn.wqkv.bias", lambda a: (3 * a.tower.dim,)),
    _vision("vision.blocks.#.attn.wo.weight", lambda a: (a.tower.dim, a.tower.dim)),
    _vision("vision.blocks.#.attn.wo.bias", lambda a: (a.tower.dim,)),
    # w1 holds gate and up, one below the other.
    _vision("vision.blocks.#.mlp.w1.weight", lambda a: (2 * a.tower.inter, a.tower.dim)),
    _vision("vision.blocks.#.mlp.w2.weight", lambda a: (a.tower.dim, a.tower.inter)),
    _vision("aligner.w1.weight", lambda a: (a.g.hidden, a.tower.dim * a.tower.downsample**2), Role.ALIGNER),
    _vision("aligner.w1.bias", _hidden, Role.ALIGNER),
    _vision("aligner.w2.weight", lambda a: (a.g.hidden, a.g.hidden), Role.ALIGNER),
    _vision("aligner.w2.bias", _hidden, Role.ALIGNER),
)

#: Every name of every supported release matches exactly one of these rows for its geometry.
TABLE: tuple[Row, ...] = (
    *_MODEL,
    _plain("{b}.#.attn_norm.weight", Role.NORM, "BF16", _hidden),
    _plain("{b}.#.ffn_norm.weight", Role.NORM, "BF16", _hidden),
    *_hyper_connection("{b}.#.hc_attn"),
    *_hyper_connection("{b}.#.hc_ffn"),
    *_ATTENTION,
    *_SPARSE_V4,
    *_SPARSE,
    *_SPARSE_V41,
    *_FFN,
    *_ENGRAM,
    *_DRAFT,
    *_VISION,
)
