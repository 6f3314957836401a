"""A config is read as it stands; what cannot be used is refused by name."""

from __future__ import annotations

import pytest

from dsv4convert import releases
from kernels_ref.config import ModelConfig

CONFIG = releases.config("deepseek-v4-flash-0731")


@pytest.mark.parametrize("release", sorted(releases.RELEASES))
def test_every_v4_release_has_a_config(release: str) -> None:
    config = releases.config(release)
    if release == "deepseek-v4.1-flash":
        with pytest.raises(ValueError, match=r"deepseek_v41.*single-pass hyper-connections"):
            ModelConfig.from_dict(config)
        return
    found = ModelConfig.from_dict(config)
    assert found.norm_eps == config["rms_norm_eps"]
    assert (found.layers, found.top_k) == (config["num_hidden_layers"], 6)
    assert len(found.ratios) + found.draft.stages == len(config["compress_ratios"])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("rms_norm_eps", None, "`rms_norm_eps` is absent"),
        ("hidden_size", "4096", "`hidden_size` must be a whole number from 1 to 16777216, found '4096'"),
        ("swiglu_limit", 0, "`swiglu_limit` must be a number > 0"),
        ("rope_scaling", None, "`rope_scaling` is absent"),
        ("rope_scaling", {"factor": 16}, r"`rope_scaling\.original_max_position_embeddings` is absent"),
        ("compress_ratios", [0, 4], "`compress_ratios` must be 0, 4 or 128 for each of 43 layers"),
        ("compress_ratios", [64] * 46, "`compress_ratios` must be 0, 4 or 128"),
        ("model_type", "deepseek_v3", "`model_type` must be `deepseek_v4`"),
        ("scoring_func", "sigmoid", '`scoring_func` must be `"sqrtsoftplus"`'),
        ("scoring_func", None, "`scoring_func` is absent"),
        ("hidden_act", "gelu", '`hidden_act` must be `"silu"`'),
        ("norm_topk_prob", False, "`norm_topk_prob` must be `true`"),
        ("norm_topk_prob", 1, "`norm_topk_prob` must be `true`"),
        ("attention_bias", True, "`attention_bias` must be `false`"),
        ("tie_word_embeddings", True, "`tie_word_embeddings` must be `false`"),
        ("qk_rope_head_dim", 63, "`qk_rope_head_dim` must be an even number"),
        ("sliding_window", 8193, "`sliding_window` must be a whole number from 1 to 8192"),
        ("index_topk", 10**9, "`index_topk` must be a whole number from 1 to 8192"),
    ],
)
def test_a_config_that_cannot_be_used_is_named(key: str, value: object, message: str) -> None:
    config = {k: v for k, v in CONFIG.items() if k != key} | ({} if value is None else {key: value})
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(config)


@pytest.mark.parametrize(
    ("key", "value"), [("sliding_window", 8192), ("index_topk", 8192), ("hidden_act", None)]
)
def test_their_neighbours_are_read(key: str, value: object) -> None:
    config = {k: v for k, v in CONFIG.items() if k != key} | ({} if value is None else {key: value})
    ModelConfig.from_dict(config)
