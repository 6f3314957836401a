"""Fresh processes: with the switch on the patches are there, also in children; without it SGLang is stock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from dsv4convert.runtime import contract

_ROOT = Path(__file__).resolve().parents[2]
_CHILD = """
import json, multiprocessing, os, sys

def tell(pipe=None):
    import sglang.srt.server_args
    from sglang.srt.utils import msgspec_utils
    from dsv4convert import runtime
    wrapped = hasattr(msgspec_utils.msgspec_to_builtins, "__wrapped__")
    fact = [list(runtime.applied()), wrapped, os.environ.get("SGLANG_OPT_USE_TOPK_V2")]
    pipe.send(fact) if pipe else print(json.dumps(fact), flush=True)

if __name__ == "__main__":
    tell()
    for method in sys.argv[1:]:
        context = multiprocessing.get_context(method)
        ours, theirs = context.Pipe()
        child = context.Process(target=tell, args=(theirs,))
        child.start()
        print(json.dumps(ours.recv()), flush=True)
        child.join()
"""


def _run(tmp_path: Path, switch: str, *methods: str) -> list[list[object]]:
    script = tmp_path / "child.py"
    script.write_text(_CHILD)
    paths = [contract.SITE, _ROOT, _ROOT / "tests/sglang/stubs"]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("ENABLE_DSV4", "SGLANG_", "DSV4_"))}
    env |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "ENABLE_DSV4_SM80": switch}
    done = subprocess.run(
        [sys.executable, str(script), *methods], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def test_enabled_in_the_process_and_in_forked_and_spawned_children(tmp_path: Path) -> None:
    seen = _run(tmp_path, "1", "fork", "spawn")
    assert [(sorted(ids), wrapped, env) for ids, wrapped, env in seen] == [(["S1", "S2"], True, "0")] * 3


def test_with_the_switch_at_0_sglang_is_stock(tmp_path: Path) -> None:
    assert _run(tmp_path, "0") == [[[], False, None]]


_REGISTRY = """
import dataclasses, sys
from dsv4convert.runtime import contract

def changed(patch):
    return dataclasses.replace(patch, attribute=sys.argv[1]) if patch.id == "G1" else patch

contract.PATCHES = tuple(map(changed, contract.PATCHES))
from sglang.srt.models.registry import ModelRegistry
print("resolved", ModelRegistry.resolve_model_cls(["DeepseekV4ForCausalLM"])[1])
"""


def _resolve(attribute: str) -> subprocess.CompletedProcess[str]:
    paths = [contract.SITE, _ROOT, _ROOT / "tests/sglang/stubs"]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("ENABLE_DSV4", "SGLANG_", "DSV4_"))}
    env |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "ENABLE_DSV4_SM80": "1"}
    command = [sys.executable, "-c", _REGISTRY, attribute]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, cwd="/")


def test_a_model_that_cannot_be_patched_has_no_substitute() -> None:
    """The registry ignores the error of our model's module, and knows a model that takes any name."""
    done = _resolve("Gone.__init__")
    assert (done.returncode, done.stdout) == (1, "")
    assert "Ignore import error when loading sglang.srt.models.deepseek_v4: error: " in done.stderr
    last = [line for line in done.stderr.splitlines() if line.startswith("error: ")][-1]
    assert "`sglang.srt.models.deepseek_v4.Gone.__init__`: patch G1 has nothing to replace" in last


def test_a_model_that_is_patched_is_resolved() -> None:
    done = _resolve("DeepseekV4ForCausalLM.__init__")
    assert done.stdout.splitlines()[-1:] == ["resolved DeepseekV4ForCausalLM"], done.stderr[-2000:]
