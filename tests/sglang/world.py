"""The state that SGLang expects around a model: arguments, a process group, a parallel layout; all on CPU.

Ranks other than the first are pretended: SGLang asks one object for rank and size, which can be overridden.
Building and loading need no communication.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt import server_args as arguments
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.utils import initialize_moe_config
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.model_loader import loader
from sglang.srt.models import deepseek_v4
from torch.nn import Module


class Loaded(NamedTuple):
    """A model with its weights, and what SGLang derived from its directory."""

    model: Module
    config: ModelConfig


def server_args(root: Path) -> arguments.ServerArgs:
    """Return SGLang's resolved arguments for a converted checkpoint, with the flags of the SM80 runtime."""
    return arguments.ServerArgs(
        model_path=str(root),
        device="cpu",
        dtype="bfloat16",
        quantization="fp8",
        moe_runner_backend="marlin",
        kv_cache_dtype="bfloat16",
        skip_tokenizer_init=True,
    )


@contextmanager
def of_one_process(root: Path, store: Path) -> Iterator[None]:
    """Set up arguments and groups for the models of this session."""
    args = server_args(root)
    runtime_context._CONTEXT.set_server_args(args)
    initialize_moe_config(args)
    parallel_state.init_distributed_environment(
        world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{store}", backend="gloo"
    )
    parallel_state.initialize_model_parallel(backend="gloo")
    with pytest.MonkeyPatch.context() as patch:
        # On CPU SGLang takes rotary embedding from vLLM and loads experts into padded buffers.
        patch.setattr(deepseek_v4, "get_rope_wrapper", lambda *args, **kwargs: Module())
        patch.setattr(FusedMoE, "use_padded_loading", False)
        with as_rank(0, 1):
            yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


@contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    """Make SGLang believe that this process is one of several tensor-parallel ranks."""
    names = ("tp", "moe_tp", "attn_tp")
    ranks = {f"{name}_rank": rank for name in names} | {f"{name}_size": size for name in names}
    with runtime_context.get_parallel().override(**ranks, attn_dp_size=1, attn_dp_rank=0):
        yield


def build(root: Path, *, draft: bool = False) -> Loaded:
    """Build the target or the draft model of a checkpoint, without weights."""
    config = ModelConfig(model_path=str(root), quantization="fp8", dtype="bfloat16", is_draft_model=draft)
    quantization = loader._get_quantization_config(config, LoadConfig())
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return Loaded(loader._initialize_model(config, LoadConfig(), quantization), config)
    finally:
        torch.set_default_dtype(default)


def load(root: Path, *, draft: bool = False, rank: int = 0, size: int = 1) -> Loaded:
    """Build a model as one rank of several and load its weights, all by SGLang's own code."""
    with as_rank(rank, size):
        built = build(root, draft=draft)
        cpu = torch.device("cpu")
        loader.DefaultModelLoader.load_weights_and_postprocess(built.model, weights_of(built), cpu)
    return built


def weights_of(built: Loaded) -> Iterator[tuple[str, torch.Tensor]]:
    """Return what SGLang's loader reads from the checkpoint of a model."""
    yield from loader.DefaultModelLoader(LoadConfig())._get_all_weights(built.config, built.model)


def make_pool(dtype: torch.dtype = torch.bfloat16, **options: bool) -> DeepSeekV4TokenToKVPool:
    """Return SGLang's KV pool of the tiny target: 4 window pages, ratios 0, 0, 4, 128, 4."""
    return DeepSeekV4TokenToKVPool(
        max_num_reqs=2,
        swa_size=1024,
        c4_size=1024,
        c128_size=32,
        c4_state_pool_size=64,
        c128_state_pool_size=0,
        page_size=256,
        swa_page_size=256,
        dtype=dtype,
        c4_state_dtype=torch.float32,
        c128_state_dtype=torch.float32,
        qk_nope_head_dim=448,
        qk_rope_head_dim=64,
        indexer_head_dim=128,
        layer_num=5,
        device="cpu",
        enable_memory_saver=False,
        compression_ratios=[0, 0, 4, 128, 4],
        **options,
    )
