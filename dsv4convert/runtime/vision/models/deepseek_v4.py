"""The model of a checkpoint with a vision tower: SGLang's own, and what pictures add to it.

Rows of pictures take the place of embeddings, and their routed experts are chosen with a bias of their own.
Which positions see which is the business of the attention's metadata (patch V1). A step without pictures
runs SGLang's code and nothing else: the hooks look at one attribute and return.

Source: DeepSeek-V4-Flash-Vision-Exp ``inference/model.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from sglang.srt.managers.mm_utils import embed_mm_inputs
from sglang.srt.managers.schedule_batch import MM_PAD_SHIFT_VALUE, MultimodalProcessorOutput
from sglang.srt.models import deepseek_v4 as stock
from sglang.srt.runtime_context import get_server_args
from torch import Tensor
from torch.nn import Module, Parameter

from dsv4convert.errors import finding
from dsv4convert.runtime.patches import guard
from dsv4convert.runtime.refusal import refusal, refuse_all
from dsv4convert.runtime.vision.blocks import extended
from dsv4convert.runtime.vision.options import SMALLEST_CHUNK
from dsv4convert.vision.config import VisionConfig
from dsv4convert.vision.layout import Grid, lead_pads
from dsv4convert.vision.tower import Tower

_TOWER: Final = ("vision.", "aligner.", "image_")
#: Arguments of SGLang under which rows of pictures would not be those of the ids that this class sees, or a
#: step could end inside a picture -> the only value that is right. `serve` refuses them before a start.
_NEEDED: Final = {
    "enable_dp_attention": False,
    "enable_two_batch_overlap": False,
    "enable_prefill_cp": False,
    "attn_cp_size": 1,
    "pp_size": 1,
    "moe_a2a_backend": "none",
    "allow_auto_truncate": False,
    "enable_mixed_chunk": False,
    "enable_dynamic_chunking": False,
}
#: Layers that route text by token id have this bias for form's sake; the official code never reads it.
_HASH_BIAS: Final = re.compile(r"layers\.(\d+)\.ffn\.gate\.bias")


class DeepseekV4ForCausalLM(stock.DeepseekV4ForCausalLM):  # type: ignore[misc]
    """SGLang finds it by this name in place of its own."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        _require_supported(get_server_args())
        super().__init__(config, quant_config, prefix)
        vision = VisionConfig.from_config(config.to_dict())
        if vision is None:
            problem = "this model class is for checkpoints with a vision tower"
            raise refusal("shim.vision", "config.json", problem, expected="`vision_n_layers`", found="none")
        self.numbers = vision
        self.tower = Tower(vision)
        #: Of the step that runs: which rows are pictures', and all rows of embeddings. None without pictures.
        self._is_picture: Tensor | None = None
        self._embedded: Tensor | None = None
        self.model.embed_tokens.register_forward_hook(self._replace_embeddings)
        for layer in self.model.layers:
            experts = layer.mlp.gate.weight.shape[0]
            # What SGLang's renaming of `gate.bias` makes of `gate.bias_vl`, so that its loader fills it.
            bias = Parameter(torch.empty(experts, dtype=torch.float32), requires_grad=False)
            layer.mlp.gate.e_score_correction_bias_vl = bias
            layer.mlp.topk.register_forward_hook(partial(self._replace_routing, bias))

    # ---- a step

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: Any,
        input_embeds: Tensor | None = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        """Run the model; `input_ids` of pictures are SGLang's, 1,000,000 and a hash."""
        if not extended(forward_batch):
            return super().forward(input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
        is_picture = input_ids >= MM_PAD_SHIFT_VALUE
        with self._showing(is_picture, self._embed(input_ids, forward_batch)):
            # Any id that exists: its embedding is replaced, its hash-routed experts too.
            ids = input_ids.masked_fill(is_picture, 0)
            return super().forward(ids, positions, forward_batch, input_embeds, pp_proxy_tensors)

    @contextmanager
    def _showing(self, is_picture: Tensor, embedded: Tensor) -> Iterator[None]:
        self._is_picture, self._embedded = is_picture, embedded
        try:
            yield
        finally:
            self._is_picture = self._embedded = None

    def _embed(self, input_ids: Tensor, batch: Any) -> Tensor:
        """Return the embeddings [T, D] of a step, rows of pictures in their places."""
        given = zip(batch.mm_inputs, batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=True)
        inputs, prefixes, lengths = zip(*(g for g in given if g[0] is not None), strict=True)
        # It clamps the ids in place.
        rows: Tensor = embed_mm_inputs(
            mm_inputs_list=list(inputs),
            extend_prefix_lens=list(prefixes),
            extend_seq_lens=list(lengths),
            input_ids=input_ids.clone(),
            input_embedding=self.model.embed_tokens,
            multimodal_model=self,
        )[0]
        return rows

    def get_image_feature(self, items: list[Any]) -> Tensor:
        """Return the rows of pictures, one after the other; SGLang keeps them by the hash of the item."""
        p, device = self.numbers.patch, self.tower.image_start.device
        rows = []
        for item in items:
            height, width = item.patch_grid
            grid = Grid.of(p * width, p * height, self.numbers)
            rows.append(self.tower.rows(item.feature.to(device), grid, lead_pads(item.offsets[0][0])))
            # SGLang moved it to the card for good; a retracted request needs it again, but not there.
            item.feature = item.feature.cpu()
        return torch.cat(rows)

    def pad_input_ids(self, input_ids: list[int], mm_inputs: Any) -> list[int]:
        """Put the id that stands for a picture at each of its positions."""
        padded: list[int] = MultimodalProcessorOutput.build_padded_input_ids(input_ids, mm_inputs.mm_items)
        return padded

    # ---- hooks

    def _replace_embeddings(self, module: Module, args: Any, output: Tensor) -> Tensor | None:
        return self._embedded

    def _replace_routing(self, bias: Tensor, topk: Any, args: Any, output: Any) -> Any:
        if self._is_picture is None:
            return None
        on_output = getattr(topk, "topk_config", topk).apply_routed_scaling_factor_on_output
        factor = self.config.routed_scaling_factor if on_output else 1.0
        return route(output, self._is_picture, bias, factor)

    # ---- weights

    def _load(self, weights: Iterable[tuple[str, Tensor]], is_nextn: bool = False) -> None:
        tower = self.tower
        # SGLang would take parameters that it did not fill itself for missing ones.
        del self.tower
        try:
            super().load_weights(self._without_tower(tower, weights), is_nextn)
        finally:
            self.tower = tower

    load_weights = guard.load(_load, stock)

    def _without_tower(
        self, tower: Tower, weights: Iterable[tuple[str, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        """Fill the tower and pass on what SGLang knows; its renaming would break the names of the tower."""
        for name, tensor in weights:
            if name.startswith(_TOWER):
                tower.get_parameter(name).data.copy_(tensor)
            elif not self._is_unused(name):
                yield name, tensor

    def _is_unused(self, name: str) -> bool:
        match = _HASH_BIAS.fullmatch(name)
        return match is not None and int(match[1]) < self.config.num_hash_layers


def _require_supported(args: Any) -> None:
    """Refuse arguments of SGLang that cannot be combined with pictures; not every launcher is ours."""
    faults = [
        (name, wanted, found) for name, wanted in _NEEDED.items() if (found := getattr(args, name)) != wanted
    ]
    algorithm, chunk = args.speculative_algorithm, args.chunked_prefill_size
    if algorithm not in (None, "DSPARK"):
        faults.append(("speculative_algorithm", "DSPARK or none", algorithm))
    if chunk is not None and 0 < chunk < SMALLEST_CHUNK:
        faults.append(("chunked_prefill_size", f"at least {SMALLEST_CHUNK}, or -1", chunk))
    problem = "pictures cannot be combined with this argument of SGLang"
    findings = [
        finding("shim.option", name, problem, expected=str(wanted), found=str(found))
        for name, wanted, found in faults
    ]
    if findings:
        raise refuse_all(findings)


def route(output: Any, is_picture: Tensor, bias: Tensor, factor: float) -> Any:
    """Choose the experts of rows of pictures by score plus bias; rows of text stay as they are.

    Args:
        output: SGLang's ``StandardTopKOutput`` of all rows; its logits [T, E] are without bias.
        is_picture: [T] bool.
        bias: [E] float32, ``gate.bias_vl``.
        factor: What weights are multiplied by.
    """
    scores = F.softplus(output.router_logits.float()).sqrt()
    ids = (scores + bias).topk(output.topk_ids.shape[1], dim=-1).indices
    weights = scores.gather(1, ids)
    weights = weights / weights.sum(-1, keepdim=True) * factor
    rows = is_picture[:, None]
    return output._replace(
        topk_ids=torch.where(rows, ids.to(output.topk_ids.dtype), output.topk_ids),
        topk_weights=torch.where(rows, weights.to(output.topk_weights.dtype), output.topk_weights),
    )


EntryClass = DeepseekV4ForCausalLM
