"""An outside judge: transformers computes the same logits from an official checkpoint and its conversion.

Equality is bit for bit: every weight is exact in BF16, so any difference is a converter's bug. transformers
ignores the draft layers; `test_convert` judges those tensor by tensor.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4convert.convert import convert
from tests.shardfile import rows

pytestmark = [
    pytest.mark.slow,
    # The judge's own future is not our concern.
    pytest.mark.filterwarnings("ignore"),
]

MXFP4, EXPERT = "mxfp4", "layers.4.ffn.experts.3.w2.scale"


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    transformers = pytest.importorskip("transformers", minversion="5.12")
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.set_verbosity(before)


def logits(path: Path) -> torch.Tensor:
    """Return the logits of 2 x 64 random ids, in float32 arithmetic on exact weights."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    model, info = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=torch.bfloat16,
        quantization_config=FineGrainedFP8Config(dequantize=True),
        output_loading_info=True,
    )
    loading: dict[str, Any] = info
    strange = {kind: sorted(loading[f"{kind}_keys"]) for kind in ("missing", "unexpected", "mismatched")}
    assert strange == {"missing": [], "unexpected": [], "mismatched": []}
    vocab = json.loads((path / "config.json").read_bytes())["vocab_size"]
    ids = torch.randint(0, vocab, (2, 64), generator=torch.Generator().manual_seed(64))
    with torch.inference_mode():
        found: torch.Tensor = model.float().eval()(ids).logits
    assert found.shape == (2, 64, vocab)
    return found


@pytest.fixture(scope="module")
def converted(sample: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the `mxfp4` conversion of the sample `plain`."""
    target = tmp_path_factory.mktemp("oracle") / MXFP4
    convert(sample("plain"), target, experts=MXFP4)
    return target


@pytest.fixture(scope="module")
def official_logits(sample: Callable[[str], Path]) -> torch.Tensor:
    """Return what the official checkpoint gives."""
    return logits(sample("plain"))


def test_logits_of_the_official_checkpoint_are_no_degenerate_ones(official_logits: torch.Tensor) -> None:
    """Equality of zeros or of NaN would prove nothing."""
    assert torch.isfinite(official_logits).all()
    assert official_logits.std() > 0.05
    assert official_logits.argmax(-1).unique().numel() > 20


def test_logits_of_the_conversion_are_equal_bit_for_bit(
    official_logits: torch.Tensor, converted: Path
) -> None:
    assert torch.equal(logits(converted), official_logits)


def _place(path: Path, name: str) -> int:
    raw = path.read_bytes()
    header = 8 + int.from_bytes(raw[:8], "little")
    return int(header + json.loads(raw[8:header])[name]["data_offsets"][0])


def test_oracle_sees_one_scale_byte_that_is_one_too_large(
    official_logits: torch.Tensor, converted: Path, tmp_path: Path
) -> None:
    """One block of 32 weights twice as large; a judge that cannot fail is none."""
    copy = tmp_path / "copy"
    shutil.copytree(converted, copy)
    index = json.loads((copy / "model.safetensors.index.json").read_bytes())
    path = copy / index["weight_map"][EXPERT]
    (data,) = (data for name, _, _, data in rows(path) if name == EXPERT)
    with open(path, "r+b") as file:
        file.seek(_place(path, EXPERT))
        file.write(bytes([data[0] + 1]))
    different = logits(copy)
    assert not torch.equal(different, official_logits)
    assert torch.allclose(different, official_logits, atol=1.0), "one block is no other model"
