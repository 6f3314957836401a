"""Synthetic checkpoints of any release: for tests, demos, benchmarks and rehearsals.

Four scales. ``tiny`` has every kind of tensor of a release in a few megabytes. ``served`` is the smallest
that SGLang's kernels take: true hidden size, heads and indexer, everything else small. ``slice`` has the
true shapes of a release in fewer layers and experts. ``full`` has the true names, shapes, shards and file
sizes, as sparse files of zeros that take no room. Names, dtypes, shapes and shards come
from the same table that judges real checkpoints, so a synthetic one is structurally indistinguishable.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4convert import releases
from dsv4convert.errors import Refused, finding
from dsv4convert.files import VOLUME
from dsv4convert.formats.spec import Shape, nbytes
from dsv4convert.geometry import Geometry, read_geometry
from dsv4convert.lookalike import tensor_bytes
from dsv4convert.names import (
    Layout,
    Unit,
    expected_units,
    official_shard,
    official_shard_count,
)
from dsv4convert.vision.layout import PLACEHOLDER
from dsv4convert.writer import encode_header, in_data_order, writing

#: Special tokens of the official tokenizer: begin and end of text, then those of a chat.
_MARKERS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
)

#: Small numbers with which every branch of the table is still taken. FP8 sides are whole blocks.
_TINY = {
    "hidden_size": 256,
    "vocab_size": 512,
    "num_attention_heads": 4,
    "head_dim": 128,
    "q_lora_rank": 128,
    "o_lora_rank": 128,
    "o_groups": 2,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "index_n_heads": 4,
    "index_topk": 8,
    "sliding_window": 16,
}
#: What the kernels of SGLang 0.5.16 leave free: they are made for the hidden size (hyper-connections), for 64
#: heads of 512 (attention) and for the indexer as it is. Halves of these are whole blocks and groups of 128.
_SERVED = {
    "vocab_size": 1024,
    "q_lora_rank": 256,
    "o_lora_rank": 128,
    "moe_intermediate_size": 256,
    "n_routed_experts": 16,
}
#: Sides that end in partial 128-blocks, partial 128-groups and partial 32-blocks of V4.1.
_RAGGED = {
    "hidden_size": 288,
    "vocab_size": 500,
    "q_lora_rank": 144,
    "o_lora_rank": 72,
    "moe_intermediate_size": 96,
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to make.

    Attributes:
        release: Key of `releases.RELEASES`.
        scale: ``tiny``, ``served``, ``slice`` or ``full``.
        layers: Trunk layers; 0 for the default of the scale.
        experts: Routed experts; 0 for the default of the scale.
        vocab: Vocabulary; 0 for the default of the scale.
        ragged: Tiny only: sides that are no multiple of any block.
        seed: Values depend on the seed and the tensor name alone.
        intermediate: Intermediate size of an expert, a multiple of 32; 0 for the default of the scale.

    Raises:
        ValueError: `intermediate` is no whole number of MXFP4 blocks.
    """

    release: str
    scale: str
    layers: int = 0
    experts: int = 0
    vocab: int = 0
    ragged: bool = False
    seed: int = 0
    intermediate: int = 0

    def __post_init__(self) -> None:
        if self.intermediate < 0 or self.intermediate % 32:
            raise ValueError(f"intermediate size: expected a multiple of 32, found {self.intermediate}")


def synthesize(target: Path, recipe: Recipe, progress: Callable[[int], None] | None = None) -> int:
    """Write a synthetic checkpoint.

    Args:
        target: Directory to create; must not exist or be empty.
        recipe: What to make.
        progress: Called with the number of bytes after each strip.

    Returns:
        Bytes of all shard files.

    Raises:
        Refused: `target` is not empty.
        EnvironmentFault: it cannot be written.
    """
    target = target.resolve()
    if target.exists() and (not target.is_dir() or set(os.listdir(target)) - {VOLUME}):
        raise Refused(
            finding("dst.not-empty", target.name, "the directory for the synthetic checkpoint is in use")
        )
    config = make_config(recipe)
    geometry, faults = read_geometry(config)
    if geometry is None:
        raise Refused(faults)
    total, size, weight_map = 0, 0, dict[str, str]()
    with writing(target):
        target.mkdir(parents=True, exist_ok=True)
        for name, units in _shards(geometry):
            entries, by_name = _entries(units)
            header = encode_header(entries)
            data = sum(nbytes(dtype, shape) for _, dtype, shape in entries)
            with open(target / name, "wb") as file:
                file.write(header)
                if recipe.scale != "full":
                    for tensor, _, shape in entries:
                        unit, tiny = by_name[tensor], recipe.scale == "tiny"
                        for strip in tensor_bytes(tensor, shape, unit, geometry, recipe.seed, tiny):
                            file.write(strip.data)
                            if progress:
                                progress(len(strip))
                file.truncate(len(header) + data)
            weight_map |= {tensor: name for tensor, _, _ in entries}
            size += data
            total += len(header) + data
        _write_small_files(target, config, weight_map, size)
    return total


def data_bytes(recipe: Recipe) -> int:
    """Return the bytes of tensor data a recipe makes."""
    geometry, _ = read_geometry(make_config(recipe))
    return sum(unit.nbytes(Layout.OFFICIAL) for unit in expected_units(geometry)) if geometry else 0


def make_config(recipe: Recipe) -> dict[str, Any]:
    """Return the `config.json` of a synthetic checkpoint, with the release's own keys in their order."""
    config = releases.config(recipe.release)
    if recipe.scale == "full":
        return config
    text = config.get("text_config", config)
    layers = recipe.layers or (4 if recipe.scale == "slice" else 5)
    _shorten(text, layers)
    if recipe.scale == "tiny":
        text |= {k: v for k, v in _TINY.items() if k in text}
        text |= _RAGGED if recipe.ragged else {}
        _shrink_vision(config)
        _shrink_draft(text)
    if recipe.scale == "served":
        text |= {k: v for k, v in _SERVED.items() if k in text}
        text |= {k: text["vocab_size"] - 1 for k in ("dspark_noise_token_id",) if k in text}
        _shrink_vision(config)
    if recipe.experts or recipe.scale in ("served", "slice"):
        text["n_routed_experts"] = recipe.experts or 16
        if "dspark_n_routed_experts" in text:
            text["dspark_n_routed_experts"] = text["n_routed_experts"]
        text["num_experts_per_tok"] = min(text["num_experts_per_tok"], text["n_routed_experts"])
    if recipe.intermediate:
        text["moe_intermediate_size"] = recipe.intermediate
    if recipe.vocab:
        text["vocab_size"] = recipe.vocab
        if "dspark_noise_token_id" in text:
            text["dspark_noise_token_id"] = min(text["dspark_noise_token_id"], recipe.vocab - 1)
    return config


def _shorten(text: dict[str, Any], layers: int) -> None:
    """Cut the trunk to its first layers, and everything that names layers with it."""
    stages = len(text["compress_ratios"]) - text["num_hidden_layers"]
    text["num_hidden_layers"] = layers
    text["compress_ratios"] = text["compress_ratios"][:layers] + [0] * stages
    if "num_hash_layers" in text:
        text["num_hash_layers"] = min(2, layers)
    if "dspark_target_layer_ids" in text:
        text["dspark_target_layer_ids"] = list(range(layers))[-stages:]
    if "kv_source_layer_ids" in text:
        # One source with a gate (ratio 2), one without (ratio 1), one layer that only has an indexer.
        text["compress_ratios"] = [0, 0, 2, 1, *[1] * (layers - 4), *[0] * stages][: layers + stages]
        text["kv_source_layer_ids"] = [2, 3][: max(0, layers - 2)]
        text["index_source_layer_ids"] = [2, 3, 4][: max(0, layers - 2)]
        text["candidate_source_layer_id"] = 3
    if "engram_layer_ids" in text:
        text["engram_layer_ids"] = [1, layers - 1]
        text["engram_num_embeddings"] = [1009, 1013]


def _shrink_vision(config: dict[str, Any]) -> None:
    vision = config.get("vision_config", config)
    small = {"layers": 2, "dim": 64, "inter": 96, "heads": 4}
    flat = {
        "layers": "vision_n_layers",
        "dim": "vision_dim",
        "inter": "vision_inter_dim",
        "heads": "vision_n_heads",
    }
    nested = {
        "layers": "num_hidden_layers",
        "dim": "hidden_size",
        "inter": "intermediate_size",
        "heads": "num_attention_heads",
    }
    for name, key in (nested if "vision_config" in config else flat).items():
        if key in vision:
            vision[key] = small[name]


def _shrink_draft(text: dict[str, Any]) -> None:
    if "dspark_markov_rank" in text:
        text |= {"dspark_markov_rank": 32, "dspark_noise_token_id": text["vocab_size"] - 1}
    if "dspark_n_routed_experts" in text:
        text["dspark_n_routed_experts"] = 4


def _shards(geometry: Geometry) -> Iterator[tuple[str, list[Unit]]]:
    count = official_shard_count(geometry)
    members: dict[int, list[Unit]] = {number: [] for number in range(1, count + 1)}
    for unit in expected_units(geometry):
        members[official_shard(geometry, unit)].append(unit)
    for number, units in members.items():
        yield f"model-{number:05d}-of-{count:05d}.safetensors", units


def _entries(units: list[Unit]) -> tuple[list[tuple[str, str, Shape]], dict[str, Unit]]:
    by_name = {name: unit for unit in units for name in unit.stored(Layout.OFFICIAL)}
    stored = [(n, *unit.stored(Layout.OFFICIAL)[n]) for n, unit in by_name.items()]
    return in_data_order(stored), by_name


def _write_small_files(target: Path, config: dict[str, Any], weight_map: dict[str, str], size: int) -> None:
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    vocab = config.get("text_config", config)["vocab_size"]
    tokenizer = _tokenizer(min(vocab, 4096), sees=bool(config.get("vision_n_layers")))
    files: dict[str, Any] = {
        "config.json": config,
        "model.safetensors.index.json": index,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1048576},
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 1, "do_sample": True},
        "inference/config.json": {"synthetic": True},
        "encoding/README.md": "A synthetic checkpoint has no prompt encoder.\n",
        "README.md": "Made by `dsv4convert synth`; the weights are random.\n",
        "LICENSE": "Random numbers; do with them what you like.\n",
    }
    for name, content in files.items():
        path = target / name
        path.parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content, indent=2)
        path.write_text(text, encoding="utf-8")


def _tokenizer(vocab: int, sees: bool) -> dict[str, Any]:
    """Return a `tokenizer.json` that encodes any text byte by byte and knows the markers of a chat.

    A vocabulary without room for all bytes encodes its first bytes only; all others become id 0.

    Args:
        vocab: Its size.
        sees: The model takes pictures, so that a token behind all bytes stands for one.
    """
    tokens = [*_MARKERS, *map(_byte_token, range(256)), *([PLACEHOLDER] if sees else [])][:vocab]
    special = {*_MARKERS, PLACEHOLDER}
    tokens += [f"<|id_{i}|>" for i in range(len(tokens), vocab)]
    plain = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False, "type": "ByteLevel"}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": m, **flags} for i, m in enumerate(tokens) if m in special],
        "pre_tokenizer": plain,
        "decoder": plain,
        "model": {
            "type": "BPE",
            "unk_token": tokens[0],
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [],
        },
    }


def _byte_token(byte: int) -> str:
    """Return the character that byte-level tokenizers use for a byte."""
    if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174:
        return chr(byte)
    hidden = [b for b in range(256) if not (33 <= b <= 126 or 161 <= b <= 172 or b >= 174)]
    return chr(256 + hidden.index(byte))


def disk_usage(directory: Path) -> int:
    """Return the bytes that the files of a directory really occupy."""
    return sum(
        p.stat().st_blocks * 512 for p in directory.rglob("*") if p.is_file() and os.access(p, os.R_OK)
    )
