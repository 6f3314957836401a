"""From the URL of a picture to the rows of every step: what one long step gives, short steps give too."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers import mm_utils
from sglang.srt.managers.schedule_batch import MultimodalInputs, Req
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams
from transformers import AutoTokenizer

from dsv4convert.runtime.vision.processors.deepseek_v4 import DeepseekV4VisionProcessor
from dsv4convert.vision.layout import PLACEHOLDER
from tests.sglang import pictures, world
from tests.sglang.test_vision_schedule import prefill
from tests.sglang.world import Loaded

_SIZES = [(640, 640), (1920, 1080), (60, 1500), (640, 640), (100, 90), (2000, 120), (800, 450)]


@pytest.fixture(scope="module")
def sent(loaded: Callable[..., Loaded], shelf: Path) -> Any:
    """Return what the processor makes of a prompt with seven pictures, some of them packed."""
    root = shelf / "vision-int8"
    config, tokenizer = loaded("vision-int8").config.hf_config, AutoTokenizer.from_pretrained(root)
    processor = DeepseekV4VisionProcessor(config, world.server_args(root), tokenizer, None)
    text = f"{'a' * 70}{PLACEHOLDER}{PLACEHOLDER}{'b' * 301}{PLACEHOLDER * 3}c{PLACEHOLDER * 2}{'d' * 200}"
    urls = [pictures.url(*size, color=(40 * n, 9, 200)) for n, size in enumerate(_SIZES)]
    made = asyncio.run(
        processor.process_mm_data_async(
            image_data=urls, input_text=text, request_obj=SimpleNamespace(), max_req_input_len=1 << 20
        )
    )
    processor.io_executor.shutdown()
    return made


@pytest.mark.parametrize("chunk", [1024, 1536])
def test_steps_compute_the_rows_of_one_long_step(
    loaded: Callable[..., Loaded], sent: Any, chunk: int
) -> None:
    model, ids = loaded("vision-int8").model, sent.padded_input_ids
    inputs = MultimodalInputs.from_processor_output(sent)
    mm_utils.init_mm_embedding_cache(100 << 20)

    def rows(start: int, end: int) -> torch.Tensor:
        step = pictures.step(ForwardMode.EXTEND, [start], [end - start], [inputs])
        return model._embed(torch.tensor(ids[start:end]), step)

    whole = rows(0, len(ids))
    mm_utils.init_mm_embedding_cache(100 << 20)
    request = Req("r", "", array("q", ids), SamplingParams(max_new_tokens=8), vocab_size=1 << 31)
    request.multimodal_inputs = inputs
    ends = prefill(request, chunk)
    assert len(ends) > 1 and ends[-1] == len(ids)
    assert any(end % 256 for end in ends[:-1])
    steps = [rows(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    assert torch.equal(torch.cat(steps), whole)
    # The two squares have the same size and other colours, and so have their rows.
    first, fourth = (inputs.mm_items[n].offsets[0] for n in (0, 3))
    assert not torch.equal(whole[first[1] - 200 : first[1]], whole[fourth[1] - 200 : fourth[1]])
