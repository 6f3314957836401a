"""transformers' implementation of the model: written by others, loaded from the same files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.reference.tiny import prompt

#: Long enough for two entries of ratio 128, and for more entries of ratio 4 than the indexer may pick.
LENGTH = 260
#: Where greedy decoding begins: just before a group of 128 is complete.
DECODE_FROM, DECODE_TOKENS = 120, 16

_NAMES = {
    "attn.wq_a": "self_attn.q_a_proj",
    "attn.wq_b": "self_attn.q_b_proj",
    "attn.wkv": "self_attn.kv_proj",
    "attn.wo_a": "self_attn.o_a_proj",
    "attn.wo_b": "self_attn.o_b_proj",
    "attn.indexer.wq_b": "self_attn.compressor.indexer.q_b_proj",
    "ffn.shared_experts.w1": "mlp.shared_experts.gate_proj",
    "ffn.shared_experts.w2": "mlp.shared_experts.down_proj",
    "ffn.shared_experts.w3": "mlp.shared_experts.up_proj",
}


@contextmanager
def _quiet() -> Iterator[None]:
    import warnings

    import transformers

    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with warnings.catch_warnings():
        # The judge's own future is not our concern.
        warnings.simplefilter("ignore")
        yield
    transformers.logging.set_verbosity(before)


@dataclass
class Judge:
    """The model of a checkpoint directory, in float32 arithmetic on exact weights.

    Attributes:
        root: The directory.
    """

    root: Path

    @cached_property
    def _model(self) -> Any:
        from transformers import AutoModelForCausalLM, FineGrainedFP8Config

        with _quiet():
            model, info = AutoModelForCausalLM.from_pretrained(
                self.root,
                dtype=torch.bfloat16,
                quantization_config=FineGrainedFP8Config(dequantize=True),
                output_loading_info=True,
            )
        found = {kind: sorted(info[f"{kind}_keys"]) for kind in ("missing", "unexpected", "mismatched")}
        assert not any(found.values()), found
        return model.float().eval()

    @cached_property
    def logits(self) -> Tensor:
        """[LENGTH, V] float32 logits of `tiny.prompt`."""
        with torch.inference_mode(), _quiet():
            return self._model(prompt(LENGTH)[None]).logits[0]

    @cached_property
    def greedy(self) -> list[int]:
        """Tokens that follow the beginning of the prompt, through the cache of transformers."""
        ids, cache, found = prompt(LENGTH)[None, :DECODE_FROM], None, []
        with torch.inference_mode(), _quiet():
            for _ in range(DECODE_TOKENS):
                out = self._model(ids, past_key_values=cache, use_cache=True)
                ids, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
                found.append(int(ids))
        return found

    @cached_property
    def values(self) -> dict[str, Tensor]:
        """Official name of every block-scaled matrix -> its values as transformers decoded them, float32."""
        stored = self._model.state_dict()
        found = {}
        for layer in range(self._model.config.num_hidden_layers):
            prefix = f"model.layers.{layer}"
            for ours, theirs in _NAMES.items():
                if f"{prefix}.{theirs}.weight" in stored:
                    found[f"layers.{layer}.{ours}"] = stored[f"{prefix}.{theirs}.weight"]
            stacked = zip(
                stored[f"{prefix}.mlp.experts.gate_up_proj"],
                stored[f"{prefix}.mlp.experts.down_proj"],
                strict=True,
            )
            for index, (gate_up, down) in enumerate(stacked):
                expert = f"layers.{layer}.ffn.experts.{index}"
                found[f"{expert}.w1"], found[f"{expert}.w3"] = gate_up.chunk(2)
                found[f"{expert}.w2"] = down
        return found
