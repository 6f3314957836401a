"""Which modules SGLang 0.5.16 leaves unquantized: rules typed from its source by hand, and lists we judge."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsv4convert.handoff import is_skipped
from dsv4convert.validate import verify
from tests.toy import Toybox

QKV = "model.layers.0.self_attn.wqkv_a"
GATE_UP = "model.layers.0.mlp.shared_experts.gate_up_proj"
EXPERTS = "model.layers.1.mlp.experts"


@pytest.mark.parametrize(
    ("module", "entries", "skipped"),
    [
        # Components anywhere in the path, whole ones only.
        (QKV, ["self_attn"], True),
        (QKV, ["layers.0"], True),
        (QKV, ["model.layers.0.self_attn"], True),
        (QKV, ["model.self_attn"], True),
        (QKV, ["self_attn."], True),
        (QKV, ["self_at"], False),
        (QKV, ["layers.1"], False),
        ("model.layers.10.self_attn.wq_b", ["layers.1"], False),
        (QKV, [], False),
        # Fused by the model code under one name of its own: the names of its parts mean nothing.
        (QKV, ["wqkv_a"], True),
        (QKV, ["wq_a", "wkv"], False),
        # Known to SGLang as fused: only the names of the parts mean something, and only together.
        (GATE_UP, ["gate_proj", "up_proj"], True),
        (GATE_UP, ["gate_proj"], False),
        (GATE_UP, ["gate_up_proj"], False),
        (GATE_UP, ["shared_experts"], True),
        (GATE_UP, ["model.layers.0.mlp.shared_experts.gate_up_proj"], False),
        # Draft stages have a path of their own.
        ("stages.0.main_proj", ["main_proj"], True),
        ("stages.0.main_proj", ["stages.0.main_proj"], True),
        ("stages.0.main_proj", ["mtp.0.main_proj"], False),
        # One expert written in full takes all experts of its layer along.
        (EXPERTS, ["model.layers.1.mlp.experts.7.gate_proj"], True),
        (EXPERTS, ["layers.1.mlp.experts.7.gate_proj"], True),
        (EXPERTS, ["model.layers.2.mlp.experts.7.gate_proj"], False),
        (EXPERTS, ["mlp"], True),
        (EXPERTS, ["shared_experts", "self_attn"], False),
        # An entry without a name stands for the whole model.
        (QKV, [""], True),
        ("stages.0.main_proj", [""], False),
    ],
)
def test_rules(module: str, entries: list[str], skipped: bool) -> None:
    assert is_skipped(module, entries) is skipped


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Toybox:
    return Toybox(tmp_path_factory.mktemp("toys"))


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        (["self_attn", "shared_experts", "main_proj"], None),
        (["self_attn", "gate_proj", "up_proj", "down_proj", "main_proj"], None),
        (["self_attn", "gate_up_proj", "down_proj", "main_proj"], "BF16 modules are not skipped"),
        (["self_attn", "mlp", "main_proj"], "routed experts of 6 layers are skipped"),
        (["self_attn", "shared_experts"], "a draft projection is not skipped"),
        (["self_attn", "shared_experts", "mtp.0.main_proj"], "a draft projection is not skipped"),
    ],
)
def test_lists(entries: list[str], problem: str | None, toys: Toybox, tmp_path: Path) -> None:
    toy = toys.copy("int8", tmp_path)
    both = {"ignored_layers": entries, "modules_to_not_convert": entries}
    toy.cfg(lambda c: c["quantization_config"].update(both))
    problems = [f.problem for f in verify(toy.root).findings if f.code == "config.skip-list"]
    # Both keys hold the list, and each is judged.
    assert len(problems) == (2 if problem else 0) and all(str(problem) in p for p in problems)
