"""The rows of the contract that are in force with a vision tower, and options of `serve` about pictures."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.configs import model_config
from sglang.srt.server_args import ServerArgs

from dsv4convert.memory import Demand
from dsv4convert.runtime import contract, launch
from dsv4convert.runtime.vision import options

_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    ServerArgs.add_cli_args(made)
    return made


@pytest.mark.parametrize("patch", contract.PICTURE_PATCHES, ids=lambda p: p.id)
def test_each_target_is_replaced_by_ours(patch: contract.Patch) -> None:
    found: Any = importlib.import_module(patch.module)
    for part in patch.attribute.split("."):
        found = getattr(found, part)
    assert found.__globals__["__name__"].startswith("dsv4convert.runtime.patches.")
    assert found.__wrapped__.__globals__["__name__"] == patch.module
    assert tuple(inspect.signature(found.__wrapped__).parameters) == patch.parameters
    assert patch.module.removeprefix("sglang.").replace(".", "/") + ".py" in contract.HASHES


_RESOLVE = """
import importlib, sys
importlib.import_module(sys.argv[1])
from sglang.srt.managers import multimodal_processor as table
from sglang.srt.models.registry import ModelRegistry
table.import_processors(sys.argv[2], overwrite=True)
found = [c for m, c in table.PROCESSOR_MAPPING.items() if m.__name__ == "DeepseekV4ForCausalLM"]
print(ModelRegistry.models["DeepseekV4ForCausalLM"].__module__, *(c.__module__ for c in found))
"""


@pytest.mark.parametrize("first", ["sglang.srt.models.registry", "sglang.srt.entrypoints.http_server"])
def test_our_classes_are_found_whatever_is_imported_first(first: str) -> None:
    """SGLang imports them in the middle of its own modules, and would ignore that one is half there."""
    paths = [contract.SITE, _ROOT, _ROOT / "tests/sglang/stubs"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [
        sys.executable,
        "-c",
        _RESOLVE,
        first,
        contract.PICTURES["SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE"],
    ]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, cwd="/")
    ours = "dsv4convert.runtime.vision"
    wanted = f"{ours}.models.deepseek_v4 {ours}.processors.deepseek_v4"
    assert done.stdout.splitlines()[-1:] == [wanted], done.stderr[-2000:]


def test_the_architecture_takes_pictures() -> None:
    assert model_config.is_multimodal_model(["DeepseekV4ForCausalLM"])
    # Otherwise SGLang would switch chunked prefill off.
    assert model_config.is_multimodal_chunked_prefill_supported(["DeepseekV4ForCausalLM"])


@pytest.mark.parametrize("whole", [False, True])
def test_arguments_are_those_of_sglang(parser: argparse.ArgumentParser, whole: bool) -> None:
    demand = Demand(context=131072, concurrency=8)
    asked = launch.Launch(
        Path("/m"), 4, False, "127.0.0.1", 30000, None, demand, limit_images=8, whole_prompts=whole
    )
    words = launch.arguments(asked, name="n", context=65536, chunk=-1 if whole else 4096, pictures=True)
    read = parser.parse_args(words)
    limit = read.limit_mm_data_per_request
    assert (json.loads(limit) if isinstance(limit, str) else limit) == {"image": 8}
    assert (read.chunked_prefill_size, read.disable_radix_cache) == ((-1, True) if whole else (4096, False))
    # SGLang would lower its own default of it for models with pictures (trap 21).
    assert read.mem_fraction_static == demand.fraction


def test_options_that_pictures_rule_out_are_those_of_sglang(parser: argparse.ArgumentParser) -> None:
    names = {name for action in parser._actions for name in action.option_strings}
    assert set(options._REFUSED) <= names
    for name in options._REFUSED:
        assert [f.where for f in options.conflicts([name, "1"], 4096)] == [name]
    free = sorted(names - set(options._REFUSED) - {"--chunked-prefill-size"})
    # By their beginnings too: argparse takes them for what they stand for here.
    assert [n for n in free if list(options.conflicts([n], 4096))] == []
