"""The contract against the published wheel: hashes, targets, parameters; secrets; resolved arguments."""

from __future__ import annotations

import asyncio
import base64
import importlib
import importlib.metadata
import inspect
import json
import shutil
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import sglang
from sglang.srt import server_args as arguments

from dsv4convert import runtime
from dsv4convert.errors import Refused
from dsv4convert.runtime import contract, gate, hook
from tests.sglang import world

_ROOT = Path(sglang.__path__[0])
_IDS = [
    "K1",
    "K1b",
    "K2",
    "K3",
    "C1",
    "I1",
    "I2",
    "I3",
    "A1",
    "A2",
    "A3",
    "D1",
    "M1",
    "G1",
    "G1n",
    "G1d",
    "G2",
    "G2d",
    "S1",
    "S2",
    "S3",
]
#: Those that a variable switches on; this process has none of them.
_SWITCHED = {"I3": "DSV4_SM80_PARALLEL_INDEXER", "D1": "DSV4_SM80_POISON"}
#: Made up for these tests.
_KEY = "sk-5Qk0pZ-not-a-key-of-anybody"


def _target(patch: contract.Patch) -> Any:
    found: Any = importlib.import_module(patch.module)
    for part in patch.attribute.split("."):
        found = getattr(found, part)
    return found


def test_exactly_the_listed_patches_are_in_force() -> None:
    assert [p.id for p in contract.PATCHES] == _IDS
    assert {p.id: p.switch for p in contract.PATCHES if p.switch} == _SWITCHED
    gate.require_patches()
    assert sorted(runtime.applied()) == sorted(set(_IDS) - _SWITCHED.keys())


def test_a_patch_that_came_too_late_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "APPLIED", [i for i in hook.APPLIED if i != "K2"])
    with pytest.raises(Refused) as caught:
        gate.require_patches()
    assert str(caught.value).splitlines()[0] == (
        "error: `sglang.srt.mem_cache.deepseek_v4_memory_pool`: was imported before the shim could patch it: "
        "expected patch K2   [shim.late]"
    )


@pytest.mark.parametrize("patch", [p for p in contract.PATCHES if p.switch], ids=lambda p: p.id)
def test_a_switched_patch_waits_for_its_variable(
    patch: contract.Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert patch not in contract.wanted()
    monkeypatch.setenv(str(patch.switch), "1")
    assert patch in contract.wanted()
    with pytest.raises(Refused, match=f"expected patch {patch.id}"):
        gate.require_patches()
    module, stock = importlib.import_module(patch.module), _target(patch)
    owner, _, name = patch.attribute.rpartition(".")
    monkeypatch.setattr(getattr(module, owner), name, stock)
    gate.apply(patch, module)
    found = _target(patch)
    assert found.__wrapped__ is stock and found.__globals__["__name__"].startswith("dsv4convert.")
    assert inspect.unwrap(stock).__globals__["__name__"] == patch.module
    assert tuple(inspect.signature(found).parameters) == patch.parameters


@pytest.mark.parametrize("patch", [p for p in contract.PATCHES if not p.switch], ids=lambda p: p.id)
def test_each_target_is_replaced_by_ours(patch: contract.Patch) -> None:
    found = _target(patch)
    if patch.kind == "flag":
        assert found is True
    elif patch.kind == "class":
        assert found.__mro__[1].__module__ == patch.module
    else:
        assert found.__globals__["__name__"].startswith("dsv4convert.runtime.patches.")
        stock = found.__wrapped__
        assert stock.__globals__["__name__"] in (
            patch.module,
            "sglang.jit_kernel.dsv4.elementwise",
            *_DEFINED_IN,
        )
        assert tuple(inspect.signature(stock).parameters) == patch.parameters


#: Modules in which an attribute that another module imports is defined.
_DEFINED_IN = ("sglang.jit_kernel.dsv4.compress", "builtins", "dataclasses", "reprlib")


def test_hashes_are_those_that_the_wheel_records() -> None:
    distribution = importlib.metadata.distribution("sglang")
    assert distribution.version == contract.VERSION == "0.5.16"
    recorded = {str(f): f.hash for f in distribution.files or () if f.hash}
    for name, pinned in contract.HASHES.items():
        kind, value = recorded[f"sglang/{name}"].mode, recorded[f"sglang/{name}"].value
        assert kind == "sha256"
        assert base64.urlsafe_b64decode(value + "=").hex() == pinned, name


def test_every_patched_module_is_pinned() -> None:
    for patch in contract.PATCHES:
        assert patch.module.removeprefix("sglang.").replace(".", "/") + ".py" in contract.HASHES


# ---- a changed SGLang


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a copy of the pinned files."""
    for name in ("_version.py", *contract.HASHES):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(_ROOT / name, tmp_path / name)
    return tmp_path


def test_an_untouched_tree_passes(tree: Path) -> None:
    gate.require_known_files(str(tree))


def test_a_changed_file_is_named_with_both_hashes_and_can_be_allowed(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "srt/models/deepseek_v4.py"
    with open(tree / name, "a", encoding="utf-8") as file:
        file.write("# one comment more\n")
    with pytest.raises(Refused) as caught:
        gate.require_known_files(str(tree))
    (fault,) = caught.value.findings
    assert (fault.code, fault.where) == ("shim.file", f"sglang/{name}")
    assert fault.problem == "is not the file of SGLang 0.5.16"
    assert fault.expected == f"SHA-256 {contract.HASHES[name]}"
    assert "DSV4_SM80_ALLOW_HASH=<SHA-256 found>" in str(caught.value)
    monkeypatch.setenv("DSV4_SM80_ALLOW_HASH", f"{'0' * 64}, {fault.found.upper()}")
    gate.require_known_files(str(tree))


def test_another_version_is_called_by_its_name(tree: Path) -> None:
    """SGLang 0.5.23 as the gate meets it: other files, one of them gone."""
    text = (tree / "_version.py").read_text()
    (tree / "_version.py").write_text(text.replace("'0.5.16'", "'0.5.23'"))
    for name in contract.HASHES:
        with open(tree / name, "a", encoding="utf-8") as file:
            file.write("\n")
    gone = "srt/layers/quantization/mxfp4_marlin_moe.py"
    (tree / gone).unlink()
    with pytest.raises(Refused) as caught:
        gate.require_known_files(str(tree))
    assert len(caught.value.findings) == len(contract.HASHES)
    assert {f.problem for f in caught.value.findings} == {
        "is not the file of SGLang 0.5.16, the installed one is 0.5.23"
    }
    (missing,) = [f for f in caught.value.findings if f.where == f"sglang/{gone}"]
    assert missing.found == "nothing (No such file or directory)"


def _module(**names: Any) -> ModuleType:
    module = ModuleType("sglang.renamed")
    vars(module).update(names)
    return module


def test_a_renamed_attribute_is_refused() -> None:
    patch = next(p for p in contract.PATCHES if p.id == "K1")
    renamed = type("DeepSeekV4SingleKVPool", (), {"make_buffer": lambda self, *, num_pages: None})
    for module in (_module(), _module(DeepSeekV4SingleKVPool=renamed)):
        with pytest.raises(Refused) as caught:
            gate.apply(patch, module)
        assert str(caught.value).splitlines()[0] == (
            "error: `sglang.srt.mem_cache.deepseek_v4_memory_pool.DeepSeekV4SingleKVPool.create_buffer`: "
            "patch K1 has nothing to replace: found no such attribute   [shim.target]"
        )
    # What every object has is not there if its class is not.
    built = next(p for p in contract.PATCHES if p.id == "G1")
    with pytest.raises(Refused, match="patch G1 has nothing to replace: found no such attribute"):
        gate.apply(built, _module())
    same = type("DeepSeekV4SingleKVPool", (), {"create_buffer": lambda self, *, num_pages: None})
    gate.apply(patch, _module(DeepSeekV4SingleKVPool=same))
    assert same.create_buffer.__wrapped__ is not None


def test_another_signature_is_refused() -> None:
    patch = next(p for p in contract.PATCHES if p.id == "S2")
    with pytest.raises(
        Refused, match=r"patch S2 replaces a function of other parameters: expected obj, found obj, depth"
    ):
        gate.apply(patch, _module(msgspec_to_builtins=lambda obj, depth: obj))


# ---- secrets


def _args_with_keys(root: Path) -> arguments.ServerArgs:
    args = world.server_args(root)
    args.api_key, args.admin_api_key, args.ssl_keyfile_password = _KEY, _KEY + "-admin", _KEY + "-tls"
    return args


def test_the_text_of_the_arguments_hides_keys_and_keeps_them(shelf: Path) -> None:
    args = _args_with_keys(shelf / "0731-int8")
    for text in (repr(args), str(args), f"{args=}", f"{[args]}"):
        assert _KEY not in text
        assert "api_key='<hidden>'" in text and "ssl_keyfile_password='<hidden>'" in text
    assert args.api_key == _KEY
    # An absent key is not hidden: the log still tells that there is none.
    assert "api_key=None" in repr(world.server_args(shelf / "0731-int8"))


def test_the_endpoints_hide_keys(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/server_info and /get_server_info, whose answers hold the arguments twice; the engine's method too."""
    from sglang.srt.entrypoints import engine, http_server
    from sglang.srt.managers import scheduler

    args = _args_with_keys(shelf / "0731-int8")

    async def internal_state() -> list[dict[str, Any]]:
        return [{"vars": dict(vars(args)), "nested": [vars(args)]}]

    manager = SimpleNamespace(server_args=args, get_internal_state=internal_state)
    state = SimpleNamespace(tokenizer_manager=manager, scheduler_info={"max_total_num_tokens": 7})
    monkeypatch.setattr(http_server, "_global_state", state)
    for endpoint in (http_server.server_info, http_server.get_server_info):
        text = json.dumps(asyncio.run(endpoint()), default=str)
        assert _KEY not in text
        assert text.count("<hidden>") == 9 and '"max_total_num_tokens": 7' in text
    for module in (http_server, engine, scheduler):
        assert _KEY not in str(module.msgspec_to_builtins({"a": [vars(args)]}))
    assert args.api_key == _KEY


def test_the_runtime_flags_resolve_to_the_paths_that_are_patched(shelf: Path) -> None:
    args = world.server_args(shelf / "0731-int8")
    found = args.attention_backend, args.page_size, args.kv_cache_dtype, args.moe_runner_backend
    assert found == ("dsv4", 256, "bfloat16", "marlin")
