"""From the pictures of a request to items of SGLang, and what is refused before the model sees it."""

from __future__ import annotations

import asyncio
import base64
import io
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers import multimodal_processor as table
from sglang.srt.managers.mm_utils import ShmPointerMMData
from sglang.srt.managers.schedule_batch import MultimodalInputs
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from transformers import AutoTokenizer

from dsv4convert.runtime import contract
from dsv4convert.vision.layout import PLACEHOLDER, Block, Grid, place, plan_size
from tests.sglang import pictures, world

_WIDE, _HIGH = (200, 150), (60, 1500)


@pytest.fixture(scope="module")
def tokenizer(shelf: Path) -> Any:
    return AutoTokenizer.from_pretrained(shelf / "vision-int8")


@pytest.fixture(scope="module")
def processor(shelf: Path, tokenizer: Any) -> Iterator[Any]:
    """Return what SGLang's tokenizer process makes: our class, found through its own table."""
    config = ModelConfig(model_path=str(shelf / "vision-int8"), quantization="fp8", dtype="bfloat16")
    assert config.is_multimodal
    table.import_processors(contract.PICTURES["SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE"], overwrite=True)
    args = world.server_args(shelf / "vision-int8")
    made = table.get_mm_processor(config.hf_config, args, tokenizer, None, model_config=config)
    assert type(made).__module__ == "dsv4convert.runtime.vision.processors.deepseek_v4"
    yield made
    made.io_executor.shutdown()


def _process(processor: Any, text: str | list[int], images: list[Any], **request: Any) -> Any:
    return asyncio.run(
        processor.process_mm_data_async(
            image_data=images,
            audio_data=None,
            input_text=text,
            request_obj=SimpleNamespace(**request),
            max_req_input_len=4096,
        )
    )


def _planned(processor: Any, size: tuple[int, int], start: int) -> tuple[Grid, Block]:
    grid = plan_size(*size, processor.numbers)
    return grid, place(grid, start)


@pytest.mark.parametrize("before", range(4))
def test_each_picture_becomes_an_item_with_its_positions(processor: Any, tokenizer: Any, before: int) -> None:
    text = f"{'x' * before}{PLACEHOLDER}{PLACEHOLDER} and"
    found = _process(processor, text, [pictures.url(*_WIDE), pictures.url(*_HIGH, color=(1, 2, 3))])
    first, one = _planned(processor, _WIDE, before)
    second, two = _planned(processor, _HIGH, one.stop)
    assert [item.offsets for item in found.mm_items] == [
        [(one.start, one.stop - 1)],
        [(two.start, two.stop - 1)],
    ]
    assert [item.patch_grid for item in found.mm_items] == [
        (first.patch_rows, first.patch_cols),
        (second.patch_rows, second.patch_cols),
    ]
    assert [tuple(item.feature.shape) for item in found.mm_items] == [
        (first.patches, 3, 14, 14),
        (second.patches, 3, 14, 14),
    ]
    (placeholder,) = tokenizer.encode(PLACEHOLDER)
    plain = [*tokenizer.encode("x" * before), *[placeholder] * (two.stop - before), *tokenizer.encode(" and")]
    assert found.input_ids == plain
    a, b = (item.pad_value for item in found.mm_items)
    assert a != b and min(a, b) >= 1_000_000
    padded = [*plain[:before], *[a] * len(one.kinds), *[b] * len(two.kinds), *plain[two.stop :]]
    assert found.padded_input_ids == padded
    # Every block is as long as the rows that the model will make: what would end the server in a step.
    assert all(last + 1 - first == len(block.kinds) for (first, last), block in zip(
        (item.offsets[0] for item in found.mm_items), (one, two), strict=True))  # fmt: skip


def test_token_ids_are_taken_as_they_are(processor: Any, tokenizer: Any) -> None:
    text = f"look: {PLACEHOLDER}"
    images = [pictures.url(*_WIDE)]
    by_ids = _process(processor, tokenizer.encode(text), images)
    assert by_ids.input_ids == _process(processor, text, images).input_ids


def test_hashes_follow_pixels_grid_and_alignment(processor: Any) -> None:
    """Traps 1, 3 and 4: what a prefix cache and a cache of rows tell pictures apart by."""

    def hashes(text: str, *images: str) -> list[int]:
        return [item.hash for item in _process(processor, text, list(images)).mm_items]

    red, blue = pictures.url(*_WIDE), pictures.url(*_WIDE, color=(0, 0, 255))
    (at_0,), (again,) = hashes(PLACEHOLDER, red), hashes(PLACEHOLDER, red)
    assert at_0 == again
    others = [hashes(PLACEHOLDER, blue)[0], *(hashes("x" * n + PLACEHOLDER, red)[0] for n in (1, 2, 3))]
    assert len({at_0, *others}) == 5
    # Four tokens later it stands at the same alignment, and is the same.
    assert hashes("xxxx" + PLACEHOLDER, red) == [at_0]
    white = [pictures.url(*size, color=(255, 255, 255)) for size in ((392, 784), (784, 392))]
    assert hashes(PLACEHOLDER, white[0]) != hashes(PLACEHOLDER, white[1])


def test_a_swapped_picture_shares_no_key_with_the_other_one(processor: Any) -> None:
    """Trap 4: the prefix cache is keyed by these ids."""
    text = f"What is on {PLACEHOLDER}?"
    red, blue = (
        _process(processor, text, [pictures.url(*_WIDE, color=c)]) for c in ((255, 0, 0), (0, 0, 255))
    )
    assert red.input_ids == blue.input_ids
    same = [a == b for a, b in zip(red.padded_input_ids, blue.padded_input_ids, strict=True)]
    (first, last), *_ = red.mm_items[0].offsets
    assert same == [not first <= position <= last for position in range(len(same))]


def test_pixels_are_those_of_the_official_preparation(processor: Any) -> None:
    rng = torch.Generator().manual_seed(3)
    pixels = torch.randint(0, 256, (640, 640, 3), generator=rng, dtype=torch.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(buffer, "PNG")
    found = _process(processor, PLACEHOLDER, [buffer.getvalue()]).mm_items[0]
    resized = Image.open(buffer).convert("RGB").resize((644, 644), Image.Resampling.BICUBIC)
    x = torch.frombuffer(bytearray(resized.tobytes()), dtype=torch.uint8).view(644, 644, 3).permute(2, 0, 1)
    x = ((x.float() / 255 - 0.5) / 0.5).bfloat16()
    wanted = x.unfold(1, 14, 14).unfold(2, 14, 14).permute(1, 2, 0, 3, 4).reshape(46 * 46, 3, 14, 14)
    assert torch.equal(found.feature, wanted)


# ---- refused, each with its legal neighbour


@pytest.mark.parametrize(("places", "given"), [(2, 1), (1, 2), (0, 1), (3, 2)])
def test_counts_must_agree(processor: Any, places: int, given: int) -> None:
    """Trap 7: one too many was dropped without a word, one too few ended in 500."""
    with pytest.raises(ValueError, match=f"has {places} places? for .*, and {given} pictures? "):
        _process(processor, f"x{PLACEHOLDER * places}", [pictures.url(*_WIDE)] * given)
    _process(processor, f"x{PLACEHOLDER * given}", [pictures.url(*_WIDE)] * given)


_TEXT = base64.b64encode(b"this is not a picture").decode()


@pytest.mark.parametrize(
    "source",
    [
        f"data:image/png;base64,{_TEXT}",
        "data:image/png;base64,%%%",
        "data:image/png",
        b"",
        pictures.url(*_WIDE)[:200],
        "http://127.0.0.1:9/nobody-listens.png",
    ],
    ids=["text", "no base64", "no data", "nothing", "cut off", "no server"],
)
def test_what_cannot_be_decoded_is_the_fault_of_the_request(processor: Any, source: Any) -> None:
    """Trap 8: a `ValueError` is answered with 400, anything else with 500."""
    with pytest.raises(ValueError, match="picture 2 of 2: "):
        _process(processor, PLACEHOLDER * 2, [pictures.url(*_WIDE), source])
    _process(processor, PLACEHOLDER, [pictures.url(*_WIDE)])


@pytest.mark.parametrize(
    "source", ["/etc/passwd", "file:///etc/passwd", "picture.png", _TEXT, {"format": "processor_output"}, 7]
)
def test_nothing_is_opened_on_the_machine_of_the_server(
    processor: Any, source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trap 6: stock opens any path that a request names."""
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", _WIDE).save(tmp_path / "picture.png")
    with pytest.raises(ValueError, match=re.escape("picture 1 of 1: expected a URL that begins with data:")):
        _process(processor, PLACEHOLDER, [source])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"video_data": ["x"]}, "the request holds video data"),
        ({"mm_hashes": ["ab"]}, "`mm_hashes` cannot be given"),
        ({"session_params": {"id": "s"}}, "a request of a session cannot hold pictures"),
        ({"session_id": "s"}, "a request of a session cannot hold pictures"),
    ],
)
def test_requests_that_would_arrive_in_another_form_are_refused(
    processor: Any, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _process(processor, PLACEHOLDER, [pictures.url(*_WIDE)], **fields)
    _process(processor, PLACEHOLDER, [pictures.url(*_WIDE)], **dict.fromkeys(fields))


@pytest.mark.parametrize(("count", "limit"), [(1, 96), (96, 96), (97, 96), (2, 1)])
def test_pictures_are_counted_by_sglang(count: int, limit: int) -> None:
    """Trap 20."""
    manager = object.__new__(TokenizerManager)
    manager.server_args = SimpleNamespace(limit_mm_data_per_request={"image": limit})
    request = SimpleNamespace(image_data=["x"] * count)
    if count > limit:
        with pytest.raises(ValueError, match=f"Image count {count} exceeds limit {limit} per request"):
            manager._validate_mm_limits(request)
    else:
        manager._validate_mm_limits(request)


def test_many_pictures_of_odd_sizes_fill_their_positions(processor: Any) -> None:
    sizes = [(37 + 53 * n % 1900, 29 + 97 * n % 1300) for n in range(48)]
    found = _process(
        processor, PLACEHOLDER * 48, [pictures.url(w, h, (w % 256, h % 256, 7)) for w, h in sizes]
    )
    start = 0
    for size, item in zip(sizes, found.mm_items, strict=True):
        _, block = _planned(processor, size, start)
        assert item.offsets == [(block.start, block.stop - 1)] and block.span.first % 4 == 3
        start = block.stop
    assert len(found.input_ids) == start


# ---- the way to the scheduler


def test_what_arrives_at_the_scheduler_is_what_was_sent(processor: Any, tokenizer: Any) -> None:
    sent = _process(processor, f"a{PLACEHOLDER}b", [pictures.url(*_WIDE)])
    (item,) = sent.mm_items
    patches = item.feature
    item.feature = ShmPointerMMData(patches, precomputed_hash=item.hash)
    received = pickle.loads(pickle.dumps(sent))
    received.mm_items[0].feature = received.mm_items[0].feature.materialize()
    inputs = MultimodalInputs.from_processor_output(received)
    assert torch.equal(inputs.mm_items[0].feature, patches)
    assert (inputs.mm_items[0].hash, inputs.mm_items[0].pad_value) == (item.hash, item.pad_value)
    assert inputs.mm_items[0].patch_grid == item.patch_grid
    # SGLang's own choice of the ids of a request.
    request = SimpleNamespace(origin_input_ids=list(sent.input_ids))
    message = SimpleNamespace(input_ids=list(sent.input_ids))
    assert Scheduler._try_apply_padded_mm_input_ids(message, request, inputs)
    (first, last), *_ = item.offsets
    assert set(request.origin_input_ids[first : last + 1]) == {item.pad_value}
    assert list(request.origin_input_ids[:first]) == tokenizer.encode("a")
    assert list(request.origin_input_ids[last + 1 :]) == tokenizer.encode("b")
