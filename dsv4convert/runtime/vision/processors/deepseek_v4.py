"""From the pictures of a request to the positions and patches that the model gets; runs beside the tokenizer.

Whatever is wrong with a request is a `ValueError` here, which SGLang answers with 400. Behind this point an
error ends the server, so that counts and sizes are settled before.

Source: DeepSeek-V4-Flash-Vision-Exp ``inference/image_processor.py``.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, Final

import torch
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput
from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor
from sglang.srt.utils.common import ImageData, get_image_bytes
from torch import Tensor

from dsv4convert.runtime.refusal import refusal
from dsv4convert.vision.config import VisionConfig
from dsv4convert.vision.layout import PLACEHOLDER, Block, Grid, expand, salted_hash
from dsv4convert.vision.tower import open_picture, picture_patches

#: Where a picture may come from. SGLang would open files of the server, too.
_SOURCES: Final = ("data:", "http://", "https://")


class DeepseekV4ForCausalLM:
    """Names the model for SGLang's table of processors, which is by name; the class itself loads much."""


class DeepseekV4VisionProcessor(BaseMultimodalProcessor):  # type: ignore[misc]
    """Processor of pictures; one per server, in the process of the tokenizer."""

    models: ClassVar = [DeepseekV4ForCausalLM]

    def __init__(self, hf_config: Any, server_args: Any, _processor: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(hf_config, server_args, _processor, *args, **kwargs)
        vision = VisionConfig.from_config(hf_config.to_dict())
        if vision is None:
            problem = "this processor is for checkpoints with a vision tower"
            raise refusal("shim.vision", "config.json", problem, expected="`vision_n_layers`", found="none")
        self.numbers = vision
        found = self._tokenizer.encode(PLACEHOLDER, add_special_tokens=False)
        if len(found) != 1:
            problem, tokens = f"{PLACEHOLDER} is no token of its own", f"{len(found)} tokens"
            raise refusal("shim.vision", "tokenizer.json", problem, expected="1 token", found=tokens)
        self.placeholder: int = found[0]

    async def process_mm_data_async(
        self,
        image_data: Any = None,
        audio_data: Any = None,
        input_text: str | list[int] = "",
        request_obj: Any = None,
        **others: Any,
    ) -> MultimodalProcessorOutput:
        """Return ids with a run of placeholders for each picture, and its patches.

        Args:
            image_data: URLs, ``data:`` or ``http``, or bytes; one per placeholder.
            audio_data: Refused.
            input_text: The prompt, as text or as token ids.
            request_obj: SGLang's request.
            others: What other processors need.

        Raises:
            ValueError: the request is refused; the message is for whoever sent it.
        """
        _require_plain(request_obj, audio_data)
        loop = asyncio.get_running_loop()
        jobs = [loop.run_in_executor(self.io_executor, self._load, source) for source in image_data or ()]
        # All of them, so that no job is left behind with an error that nobody asks for.
        loaded = await asyncio.gather(*jobs, return_exceptions=True)
        pictures: list[tuple[Tensor, Grid]] = []
        for number, result in enumerate(loaded, 1):
            if isinstance(result, BaseException):
                raise ValueError(f"picture {number} of {len(loaded)}: {result}") from None
            pictures.append(result)
        ids = self._tokenizer(input_text)["input_ids"] if isinstance(input_text, str) else input_text
        prompt = expand(ids, [grid for _, grid in pictures], self.placeholder, self.numbers.vocab)
        items = [_item(*picture, block) for picture, block in zip(pictures, prompt.blocks, strict=True)]
        # Pseudo ids are outside of the vocabulary, which is where SGLang's own begin.
        plain = [token if token < self.numbers.vocab else self.placeholder for token in prompt.ids]
        return MultimodalProcessorOutput(
            mm_items=items,
            input_ids=plain,
            padded_input_ids=MultimodalProcessorOutput.build_padded_input_ids(plain, items),
            im_token_id=self.placeholder,
        )

    def _load(self, source: Any) -> tuple[Tensor, Grid]:
        source = source.url if isinstance(source, ImageData) else source
        if isinstance(source, str) and source.startswith(_SOURCES):
            source = _fetch(source)
        if not isinstance(source, bytes):
            raise ValueError(f"expected a URL that begins with {', '.join(_SOURCES)}")
        return picture_patches(open_picture(source), self.numbers)


def _fetch(url: str) -> bytes:
    try:
        data: bytes = get_image_bytes(url)
    # Whatever a client library for HTTP raises: the client named this address.
    except Exception as error:
        raise ValueError(f"cannot be read from its URL: {str(error)[:200]}") from None
    return data


def _require_plain(request: Any, audio: Any) -> None:
    """Refuse what would reach the model in another form than it was checked in."""
    for given, name in ((audio, "audio"), (getattr(request, "video_data", None), "video")):
        if given:
            raise ValueError(f"this model sees pictures, and the request holds {name} data")
    # A hash of the client's choice could be that of another picture, or of another size.
    if getattr(request, "mm_hashes", None):
        raise ValueError("`mm_hashes` cannot be given: rows of pictures are kept by hashes of ours")
    if getattr(request, "session_params", None) or getattr(request, "session_id", None):
        # Positions would be counted from the end of what the session holds.
        raise ValueError("a request of a session cannot hold pictures: send the whole conversation instead")


def _item(patches: Tensor, grid: Grid, block: Block) -> MultimodalDataItem:
    # As bytes, because numpy has no bfloat16.
    data = patches.view(torch.uint8).numpy().tobytes()
    item = MultimodalDataItem(
        modality=Modality.IMAGE,
        hash=salted_hash(data, grid, block.lead),
        offsets=[(block.start, block.stop - 1)],
        feature=patches,
        model_specific_data={"patch_grid": (grid.patch_rows, grid.patch_cols)},
    )
    item.set_pad_value()
    return item
