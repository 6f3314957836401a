"""Several ranks of an attention group, each a process with the real SGLang, that select index keys together.

    python -m tests.sglang.ranks CHECKPOINT SIZE...

Prints a JSON object: size of the group -> for every rank, for every case of `steps`: what it finds alone
(`alone`), with the others (`split`) and when rank 1 takes the queries of rank 0 (`fault`): places, how many
queries it scored, and of how many tokens it stored the keys. SGLang is imported once; ranks are forked before
anything else has happened, and talk through gloo.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["ENABLE_DSV4_SM80"] = os.environ["DSV4_SM80_PARALLEL_INDEXER"] = "1"
os.environ["DSV4_SM80_PARALLEL_INDEXER_FROM"] = "1"
os.environ["SGLANG_DSV4_MHC_PREWARM"] = "0"
os.environ["SGLANG_TOPK_TRANSFORM_512_TORCH"] = "1"

from dsv4convert.runtime import hook

hook.install()

# What follows imports SGLang.
import torch  # noqa: E402
from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.distributed import parallel_state  # noqa: E402
from sglang.srt.layers.attention.dsv4.indexer import C4IndexerBackendMixin  # noqa: E402

from dsv4convert.runtime.patches import indexer  # noqa: E402
from tests.sglang import world  # noqa: E402
from tests.sglang.steps import CASES, Step  # noqa: E402

#: Seconds; a rank that fails must not leave the others waiting for longer.
_PATIENCE = 60


def _rank(rank: int, size: int, store: str, config: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    parallel_state.init_distributed_environment(
        world_size=size,
        rank=rank,
        local_rank=rank,
        distributed_init_method=f"file://{store}",
        backend="gloo",
        timeout=_PATIENCE,
    )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size, backend="gloo")
    # The operator in between, which hides the call from a compiler, is registered for CUDA only.
    coordinator = parallel_state.GroupCoordinator
    coordinator.all_gather_into_tensor = coordinator._all_gather_into_tensor
    with torch.inference_mode():
        found = {name: _case(number, name, config) for number, name in enumerate(CASES)}
    answers.send(found)


def _case(seed: int, name: str, config: Any) -> dict[str, Any]:
    torch.manual_seed(seed)
    step, split = Step(config, CASES[name]), C4IndexerBackendMixin.forward_c4_indexer
    found = {"alone": _run(step, split.__wrapped__), "split": _run(step, split)}
    own = indexer.attention_group
    group = own()
    wrong = SimpleNamespace(
        rank_in_group=0 if group.rank_in_group == 1 else group.rank_in_group,
        world_size=group.world_size,
        all_gather_into_tensor=group.all_gather_into_tensor,
    )
    indexer.attention_group = lambda: wrong
    try:
        return found | {"fault": _run(step, split)}
    finally:
        indexer.attention_group = own


def _run(step: Step, forward: Any) -> dict[str, Any]:
    places = step.run(forward).tolist()
    return {"places": places, "scored": step.scored, "compressed": step.compressed}


def _ranks(size: int, config: Any) -> list[dict[str, Any]]:
    """Fork the ranks of a group and return what each found."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank, (_, end) in enumerate(pipes):
            arguments = rank, size, f"{folder}/store", config, end
            started.append(context.Process(target=_rank, args=arguments, daemon=True))
            started[-1].start()
            # Only the rank holds this end now, so that one which dies is heard.
            end.close()
        found = [end.recv() for end, _ in pipes]
        for process in started:
            process.join()
    return found


def main(root: str, sizes: list[int]) -> None:
    """Print what the ranks of every group found."""
    runtime_context._CONTEXT.set_server_args(world.server_args(Path(root)))
    config = ModelConfig(model_path=root, quantization="fp8", dtype="bfloat16").hf_config
    print(json.dumps({size: _ranks(size, config) for size in sizes}))


if __name__ == "__main__":
    main(sys.argv[1], [int(size) for size in sys.argv[2:]])
