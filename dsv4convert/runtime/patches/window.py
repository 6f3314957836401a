"""What the positions of a picture see in a prefill: the whole picture, not only what came before.

SGLang lists, for every query, the window that ends at it. With pictures in a step the list is made once more
by SGLang's own function, ending at the last key that each query sees, and cut to its number of keys. Only
the list of uncompressed keys changes; compressed ones stay as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Final

import torch

from dsv4convert.runtime.vision.blocks import blocks, extended
from dsv4convert.vision.layout import Span, lead_pads, visible_range

_LOG = logging.getLogger("dsv4convert.runtime")
#: What a log shows when a step divided a picture; a sound server never says it.
CUT: Final = "dsv4convert: a prefill step divided a picture, whose positions saw the ordinary window"


def widen(stock: Any, module: ModuleType) -> Callable[..., Any]:
    """V1: metadata of a step, with the keys of its pictures."""

    def _build_forward_metadata(
        self: Any,
        forward_batch: Any,
        *,
        max_seq_len_override: int | None = None,
        use_prefill_cuda_graph: bool = False,
    ) -> Any:
        metadata = stock(
            self,
            forward_batch,
            max_seq_len_override=max_seq_len_override,
            use_prefill_cuda_graph=use_prefill_cuda_graph,
        )
        # A draft sees pictures through the hidden states of the target only.
        steps = [] if self.is_draft_runner else extended(forward_batch)
        if steps:
            _list_keys(self, module, metadata.core_attn_metadata, forward_batch, steps)
        return metadata

    return _build_forward_metadata


def _list_keys(
    backend: Any, module: ModuleType, core: Any, batch: Any, steps: list[tuple[range, Any]]
) -> None:
    seen = [
        keys
        for step, inputs in steps
        for keys in visible_range(step.start, step.stop, _whole_spans(step, inputs), module.SWA_WINDOW)
    ]
    device, rows = core.seq_lens_casual.device, len(seen)
    first, last = torch.tensor(seen, dtype=torch.int32).T.contiguous().to(device, non_blocking=True)
    # Rows that pad the step, behind those of its tokens, stay as they are.
    ends, counts = core.seq_lens_casual.clone(), core.swa_topk_lengths.clone()
    ends[:rows], counts[:rows] = last + 1, last + 1 - first
    lengths = torch.tensor([len(step) for step, _ in steps], device=device)
    requests = batch.req_pool_indices.repeat_interleave(lengths, output_size=rows)
    width = max(b - a + 1 for a, b in seen)
    width = -(-width // module.PAGE_INDEX_ALIGNED_SIZE) * module.PAGE_INDEX_ALIGNED_SIZE
    keys = module.BuildCausalSwaPageIndices.execute(
        req_to_token=backend.req_to_token,
        full_to_swa_mapping=backend.token_to_kv_pool.full_to_swa_index_mapping,
        req_pool_indices_repeated=torch.nn.functional.pad(requests, (0, len(ends) - rows)),
        seq_lens_casual=ends,
        swa_window=width,
        page_index_aligned_size=module.PAGE_INDEX_ALIGNED_SIZE,
    )
    # Newest first, so that the keys of a row are its first ones.
    behind = torch.arange(width, device=device) >= counts[:, None]
    core.swa_page_indices, core.swa_topk_lengths = keys.masked_fill_(behind, -1), counts


def _whole_spans(step: range, inputs: Any) -> Iterator[Span]:
    """Yield START and END of the pictures that lie in a step as a whole."""
    for block in blocks(inputs):
        if step.start <= block.start and block.stop <= step.stop:
            yield Span(block.start + lead_pads(block.start), block.stop - 1)
        elif block.start < step.stop and step.start < block.stop:
            # An exception here would end the server with everyone's requests.
            _LOG.error(
                "%s: positions %d to %d, step %d to %d", CUT, block.start, block.stop, step.start, step.stop
            )
