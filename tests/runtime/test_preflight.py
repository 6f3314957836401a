"""`preflight`: every break of the contract has its sentence, and its legal neighbour passes.

Nothing of the machine is real: SGLang, torch and the cards are stand-ins on PYTHONPATH. The processes that
look at them are real.
"""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsv4convert.errors import Finding
from dsv4convert.memory import Demand
from dsv4convert.runtime import contract, machine, settings
from dsv4convert.runtime.keys import make_key
from dsv4convert.runtime.launch import Launch
from dsv4convert.runtime.preflight import Preflight, check_launch, preflight
from kernels_ref.sm80 import table_file, tiles
from tests.conftest import Ran
from tests.fakeserving import A100, FakeServing
from tests.test_schemas import require, validator
from tests.toy import Toy, Toybox

# SHA-256 of "stock\n", by `printf 'stock\n' | sha256sum`.
STOCK = "394924622dfba63003e3b0eb4bdf696c73c71e55c83c12d5a74e87a31c944779"
COMMIT = "fdebc938f7f4d16fe6b9f55dcd9a767cf0899ea1"


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Toybox:
    return Toybox(tmp_path_factory.mktemp("toys"))


@pytest.fixture(autouse=True)
def machine_with_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may have little shared memory; the directory of the test has room."""
    monkeypatch.setattr(machine, "SHM", os.fspath(tmp_path))


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeServing:
    made = FakeServing(tmp_path / "fake")
    made.put("sglang/srt/pinned.py", "stock\n")
    monkeypatch.setattr(contract, "HASHES", {"srt/pinned.py": STOCK})
    return made


@pytest.fixture
def port() -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = probe.getsockname()[1]
    yield number


@pytest.fixture
def launch(toys: Toybox, port: int) -> Launch:
    return Launch(toys.original("int8"), 1, True, "127.0.0.1", port, None, Demand())


def codes(found: Preflight) -> list[str]:
    return sorted(f.code for f in found.findings if f.code != "side.missing")


def one(found: Preflight, code: str) -> Finding:
    (fault,) = [f for f in found.findings if f.code == code]
    return fault


# ---- everything right


def test_a_machine_that_can_serve(launch: Launch, fake: FakeServing) -> None:
    found = preflight(launch, fake.environ())
    assert codes(found) == []
    assert found.facts["sglang"]["version"] == "0.5.16" and found.facts["shim"]["installed"]
    assert found.facts["checkpoint"]["packing"] == "g128-split64"
    assert found.facts["gpus"] == [A100]
    assert found.budget and found.facts["memory"]["card_bytes"] == A100["total_bytes"]
    assert any("no tensor byte was read" in line for line in found.not_checked)
    require("preflight", found.as_dict())


def test_command_prints_the_verdict(
    cli: Callable[..., Ran], toys: Toybox, fake: FakeServing, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in fake.environ().items():
        monkeypatch.setenv(name, value)
    arguments = ("preflight", toys.original("int8"), "--tp", 1, "--port", port)
    good = cli(*arguments)
    assert good.exit_code == 0 and good.out.splitlines()[-1] == "ready to serve"
    assert "NVIDIA A100-SXM4-80GB, capability 8.0, 78.50 GiB of 79.25 GiB free" in good.out
    fake.cards([])
    bad = cli(*arguments, "--json")
    page = bad.json()
    require("preflight", page)
    assert bad.exit_code == 1 and page["ok"] is False and page["errors"] == 1
    assert [f["code"] for f in page["findings"] if f["severity"] == "error"] == ["gpu.count"]


def test_schema_refuses_an_unknown_key(launch: Launch) -> None:
    page = check_launch(launch, {}).as_dict()
    require("preflight", page)
    assert not validator("preflight").is_valid({**page, "new": 1})
    assert not validator("preflight").is_valid({**page, "facts": {**page["facts"], "new": 1}})


def test_everything_wrong_is_told_at_once(
    toys: Toybox, fake: FakeServing, launch: Launch, tmp_path: Path
) -> None:
    toy = toys.copy("int8", tmp_path)
    toy.cfg(lambda c: c["quantization_config"].update(ignored_layers=["self_attn"]))
    fake.put("sglang/srt/pinned.py", "changed\n")
    fake.version("tilelang", None)
    fake.cards([{**A100, "capability": [7, 5]}])
    (tmp_path / "key").write_text("0123456789abcdef")
    (tmp_path / "key").chmod(0o644)
    found = preflight(replace(launch, root=toy.root, key_file=tmp_path / "key"), fake.environ())
    assert set(codes(found)) >= {"config.skip-list", "shim.file", "sglang.library", "gpu.arch", "key.mode"}
    assert all(f.hint for f in found.findings)


# ---- the checkpoint


def _section(change: dict[str, Any]) -> Callable[[Toy], None]:
    return lambda toy: toy.cfg(lambda c: c["dsv4convert"].update(change))


def _skip(*entries: str) -> Callable[[Toy], None]:
    both = {"ignored_layers": list(entries), "modules_to_not_convert": list(entries)}
    return lambda toy: toy.cfg(lambda c: c["quantization_config"].update(both))


_EXPERT = "layers.0.ffn.experts.0.w1.weight_codes"
CHECKPOINT: dict[str, tuple[Callable[[Toy], object], list[str]]] = {
    "as it was written": (lambda toy: None, []),
    "skip list by component": (_skip("self_attn", "shared_experts", "main_proj"), []),
    "skip list with the fused name": (
        _skip("wqkv_a", "wq_a", "wkv", "wq_b", "wo_a", "wo_b", "indexer", "shared_experts", "main_proj"),
        [],
    ),
    "skip list with the names of the checkpoint": (
        _skip("wq_a", "wkv", "wq_b", "wo_a", "wo_b", "indexer", "shared_experts", "main_proj"),
        ["config.skip-list"] * 2,
    ),
    "draft projection by its checkpoint name": (
        _skip("self_attn", "shared_experts", "mtp.0.main_proj"),
        ["config.skip-entry"] * 2 + ["config.skip-list"] * 2,
    ),
    "draft projection by its runtime name": (_skip("self_attn", "shared_experts", "stages.0.main_proj"), []),
    "another packing": (_section({"packing": "g128-linear"}), ["config.section"]),
    "another layout": (_section({"experts": "mxfp4"}), ["config.section"]),
    "missing tensor": (lambda toy: toy.drop(_EXPERT), ["unit.missing-tensor"]),
    "another class": (
        lambda toy: toy.cfg(lambda c: c.update(architectures=["DeepseekV3ForCausalLM"])),
        ["config.field"],
    ),
    "no DSpark field": (
        lambda toy: toy.cfg(lambda c: c.pop("dspark_block_size")),
        ["config.dspark", "manifest.mismatch", "manifest.mismatch"],
    ),
}


@pytest.mark.parametrize("case", CHECKPOINT)
def test_checkpoint(case: str, toys: Toybox, tmp_path: Path, launch: Launch) -> None:
    change, expected = CHECKPOINT[case]
    toy = toys.copy("int8", tmp_path)
    change(toy)
    found = check_launch(replace(launch, root=toy.root), {})
    # The manifest holds the hash of `config.json`, so that it notices every change; that is not the point.
    assert [c for c in codes(found) if c != "content.hash"] == expected


@pytest.mark.parametrize(
    ("toy", "options", "expected"),
    [
        ("mxfp4", {}, []),
        ("mxfp4", {"backend": "marlin"}, []),
        ("int8", {"backend": "marlin"}, ["serve.backend"]),
        ("int8", {"tp": 2}, ["tp.split"]),
        ("mxfp4", {"tp": 2}, ["tp.split"]),
        ("mxfp4", {"tp": 2, "backend": "marlin"}, []),
        ("int8", {"host": "0.0.0.0"}, ["serve.exposed"]),
        ("int8", {"host": "::"}, ["serve.exposed"]),
        ("int8", {"host": "::1"}, []),
        ("0731", {}, ["dst.not-converted", "manifest.missing"]),
    ],
)
def test_options_against_the_checkpoint(
    toy: str, options: dict[str, Any], expected: list[str], toys: Toybox, launch: Launch
) -> None:
    assert codes(check_launch(replace(launch, root=toys.original(toy), **options), {})) == expected


@pytest.mark.parametrize(
    ("toy", "dspark", "code", "word"),
    [
        ("preview", True, "serve.draft", "no DSpark draft"),
        ("preview", False, None, ""),
        ("vision", False, None, ""),
        ("vision", True, None, ""),
        ("v4.1", False, "serve.release", "no runtime"),
    ],
)
def test_releases(
    toy: str, dspark: bool, code: str | None, word: str, toys: Toybox, launch: Launch, tmp_path: Path
) -> None:
    from dsv4convert.convert import convert

    convert(toys.original(toy), tmp_path / "out", experts="mxfp4")
    found = check_launch(replace(launch, root=tmp_path / "out", dspark=dspark), {})
    assert codes(found) == ([code] if code else [])
    assert not code or word in one(found, code).problem


def test_a_directory_that_is_not_there(launch: Launch, fake: FakeServing, tmp_path: Path) -> None:
    fake.cards([])
    found = preflight(replace(launch, root=tmp_path / "nothing"), fake.environ())
    require("preflight", found.as_dict())
    assert codes(found) == ["dir.not-found", "gpu.count"]


def test_context_and_memory_follow_the_budget(launch: Launch) -> None:
    demand = Demand(context=1 << 20, concurrency=64)
    assert codes(check_launch(replace(launch, demand=demand), {})) == []
    assert codes(check_launch(replace(launch, demand=Demand(context=(1 << 20) + 1)), {})) == ["serve.context"]
    small = replace(demand, card_bytes=4 << 30)
    assert codes(check_launch(replace(launch, demand=small), {})) == ["serve.memory"]


# ---- environment


def test_variables_that_contradict(launch: Launch) -> None:
    agreeing = {"SGLANG_OPT_USE_TOPK_V2": "0", "SGLANG_DSV4_FP4_EXPERTS": "1", "SGLANG_GRPC_PORT": ""}
    assert codes(check_launch(launch, agreeing)) == []
    found = check_launch(
        launch,
        {"SGLANG_OPT_USE_TOPK_V2": "1", "SGLANG_GRPC_PORT": "50051", "SGLANG_LOGGING_CONFIG_PATH": "f"},
    )
    assert [f.where for f in found.findings if f.code == "serve.environment"] == [
        "SGLANG_OPT_USE_TOPK_V2",
        "SGLANG_GRPC_PORT",
        "SGLANG_LOGGING_CONFIG_PATH",
    ]


@pytest.mark.parametrize("value", ["", "1", " 1 "])
def test_older_indexer_variable(launch: Launch, value: str) -> None:
    name = "SGLANG_DSV4_A100_INT8_INDEXER"
    assert codes(check_launch(launch, {name: value})) == []
    fault = one(check_launch(launch, {name: "0"}), "shim.setting")
    assert (fault.where, fault.found) == (name, "0")


@pytest.mark.parametrize("value", ["", "ours", "mxfp4_int8"])
def test_older_backend_variable(launch: Launch, value: str) -> None:
    name = "SGLANG_DSV4_MXFP4_MOE_BACKEND"
    assert codes(check_launch(launch, {name: value})) == []
    fault = one(check_launch(launch, {name: "marlin"}), "serve.environment")
    assert (fault.where, fault.expected) == (name, "ours or mxfp4_int8")


@pytest.mark.parametrize("name", ["DSV4_SM80_PARALLEL_INDEXER", "DSV4_SM80_POISON"])
def test_a_switch_is_on_or_off(launch: Launch, name: str) -> None:
    assert codes(check_launch(launch, {name: ""})) == codes(check_launch(launch, {name: "0"})) == []
    fault = one(check_launch(launch, {name: "yes"}), "shim.setting")
    assert (fault.where, fault.expected, fault.found) == (name, "1, 0 or unset", "yes")


def test_the_limit_of_a_split_is_a_number(launch: Launch) -> None:
    name = "DSV4_SM80_PARALLEL_INDEXER_FROM"
    assert codes(check_launch(launch, {name: ""})) == codes(check_launch(launch, {name: "4096"})) == []
    for value in ("0", "-1", "16M"):
        fault = one(check_launch(launch, {name: value}), "shim.setting")
        assert (fault.where, fault.found) == (name, value)


def test_a_switch_for_tests_is_a_warning(launch: Launch) -> None:
    found = check_launch(launch, {"DSV4_SM80_POISON": "1"})
    assert codes(found) == ["serve.poison"]
    assert found.ok() and not found.ok(strict=True)
    assert codes(check_launch(launch, {"DSV4_SM80_PARALLEL_INDEXER": "1"})) == []


def test_parallel_indexer_against_its_variable(launch: Launch) -> None:
    name, asked = "DSV4_SM80_PARALLEL_INDEXER", replace(launch, parallel_indexer=True)
    for environ in ({}, {name: "1"}):
        # The one thing to say is that one GPU shares with nobody.
        assert one(check_launch(asked, environ), "serve.no-effect").where == "--parallel-indexer"
    fault = one(check_launch(asked, {name: "0"}), "serve.environment")
    assert (fault.where, fault.expected, fault.found) == (name, "1", "0")


def test_sharing_index_queries_needs_a_second_gpu(launch: Launch) -> None:
    alone, shared = (replace(launch, parallel_indexer=True, tp=tp) for tp in (1, 2))
    assert codes(check_launch(alone, {})) == ["serve.no-effect"]
    assert check_launch(alone, {}).ok()
    assert "serve.no-effect" not in codes(check_launch(shared, {}))


def test_a_misspelt_variable_is_told(launch: Launch) -> None:
    fault = one(check_launch(launch, {"DSV4_SM80_POISION": "1"}), "serve.no-effect")
    assert fault.found == "DSV4_SM80_POISION" and "DSV4_SM80_POISON" in str(fault.expected)
    known = {"DSV4_SM80_TILES": "", "DSV4_SM80_ALLOW_HASH": ""}
    assert codes(check_launch(launch, known)) == []


def _nested(path: Path) -> None:
    path.write_text("[" * 100_000)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path: path.write_text(path.read_text().replace('"slices": 2', '"slices": 3', 1)),
         "3 where attention[0].split.slices must be one of 1, 2, 4"),
        (lambda path: path.write_text(path.read_text()[:-9]), "Expecting "),
        (lambda path: path.write_bytes(b"\xff"), "'utf-8' codec can't decode byte 0xff"),
        (_nested, "JSON that is nested too deeply"),
        (lambda path: path.unlink(), "No such file or directory"),
        (lambda path: (path.unlink(), path.mkdir()), "no regular file"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "no regular file"),
        (lambda path: (path.unlink(), path.symlink_to(path)), "Too many levels of symbolic links"),
    ],
    ids=["number", "cut off", "bytes", "nested", "missing", "folder", "pipe", "loop"],
)  # fmt: skip
def test_tiles_are_judged_before_anything_starts(
    launch: Launch, fake: FakeServing, tmp_path: Path, spoil: Callable[[Path], object], reason: str
) -> None:
    # Both sides spell it: settings load no kernels, and kernels nothing of the runtime.
    assert settings.TILES == tiles.VARIABLE
    path = tmp_path / "tiles.json"
    table_file.write(path, "some card", tiles.DEFAULT, tiles.ATTENTION, tiles.SCORES)
    named = {"DSV4_SM80_TILES": os.fspath(path)}
    for found in (preflight(launch, fake.environ() | named), check_launch(launch, named)):
        assert codes(found) == []
        assert [line for line in found.checked if str(path) in line]
    spoil(path)
    for found in (preflight(launch, fake.environ() | named), check_launch(launch, named)):
        fault = one(found, "serve.tiles")
        assert codes(found) == ["serve.tiles"] and fault.found.startswith(reason)
        assert fault.where == "DSV4_SM80_TILES" and str(path) in fault.problem and not found.ok()
        assert "`python -m kernels_ref.sm80.tune FILE`" in fault.expected
        assert not [line for line in found.checked if str(path) in line]


def test_serve_refuses_bad_tiles(
    cli: Callable[..., Ran], toys: Toybox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiles.json"
    monkeypatch.setenv("DSV4_SM80_TILES", os.fspath(path))
    path.write_text("{}")
    ran = cli("serve", toys.original("int8"), "--tp", 1, "--dry-run")
    assert ran.exit_code == 3 and "[serve.tiles]" in ran.err and not ran.out
    table_file.write(path, "some card", tiles.DEFAULT)
    assert cli("serve", toys.original("int8"), "--tp", 1, "--dry-run").exit_code == 0


def test_switch_that_is_off_is_told_not_overridden(launch: Launch) -> None:
    assert (
        one(check_launch(launch, {"ENABLE_DSV4_SM80": "0"}), "serve.environment").where == "ENABLE_DSV4_SM80"
    )


# ---- SGLang


def _git(fake: FakeServing, head: str, **files: str) -> None:
    """Make the stand-in a checkout: ``python/sglang`` below a directory with ``.git``."""
    os.rename(fake.root / "sglang", fake.root.parent / "sglang")
    (fake.root / "python").mkdir()
    os.rename(fake.root.parent / "sglang", fake.root / "python" / "sglang")
    fake.put(".git/HEAD", head)
    for name, text in files.items():
        fake.put(f".git/{name.replace('__', '/').replace('_', '-')}", text)


SGLANG: dict[str, tuple[Callable[[FakeServing], object], list[str]]] = {
    "not installed": (lambda f: os.rename(f.root / "sglang", f.root / "elsewhere"), ["sglang.missing"]),
    "changed file": (lambda f: f.put("sglang/srt/pinned.py", "Stock\n"), ["shim.file"]),
    "absent file": (lambda f: (f.root / "sglang/srt/pinned.py").unlink(), ["shim.file"]),
    "other file changed": (lambda f: f.put("sglang/srt/other.py", "x\n"), []),
    "newer version": (lambda f: f.version("sglang", "0.5.23"), ["sglang.version"]),
    "no kernels": (lambda f: f.version("sglang-kernel", None), ["sglang.library"]),
    "other transformers": (lambda f: f.version("transformers", "5.17.0"), ["sglang.pin"]),
    "other local build of torch": (lambda f: f.version("torch", "2.11.0+cu128"), []),
    "other torch": (lambda f: f.version("torch", "2.12.0+cu130"), ["sglang.pin"]),
    "other triton": (lambda f: f.version("triton", "3.7.0"), ["sglang.pin"]),
    "unpinned library": (lambda f: f.version("apache-tvm-ffi", "0.1.12"), []),
    "local build of the version": (lambda f: f.version("sglang", "0.5.16+g1234567"), []),
    "a checkout behind the tag": (lambda f: f.version("sglang", "0.5.16.post1"), ["sglang.version"]),
    "right commit": (lambda f: _git(f, COMMIT + "\n"), []),
    "right commit on a branch": (
        lambda f: _git(f, "ref: refs/heads/main\n", refs__heads__main=COMMIT + "\n"),
        [],
    ),
    "right commit in packed refs": (
        lambda f: _git(f, "ref: refs/heads/main\n", packed_refs=f"# pack-refs\n{COMMIT} refs/heads/main\n"),
        [],
    ),
    "other commit": (lambda f: _git(f, "0" * 40), ["sglang.commit"]),
}


@pytest.mark.parametrize("case", SGLANG)
def test_sglang(case: str, launch: Launch, fake: FakeServing) -> None:
    change, expected = SGLANG[case]
    change(fake)
    checkout = fake.root / "python"
    environ = fake.environ()
    if checkout.exists():
        environ["PYTHONPATH"] = os.pathsep.join((os.fspath(checkout), environ["PYTHONPATH"]))
    assert codes(preflight(launch, environ)) == expected


def test_compilers(launch: Launch, fake: FakeServing) -> None:
    bare = {**fake.environ(), "PATH": os.fspath(fake.root / "bin")}
    assert codes(preflight(launch, bare)) == []
    (fake.root / "bin" / "ninja").unlink()
    fault = one(preflight(launch, bare), "sglang.compiler")
    assert fault.where == "ninja" and fault.severity == "warning"
    # CUDA_HOME decides when it is set, as in TVM-FFI.
    found = preflight(launch, {**bare, "CUDA_HOME": os.fspath(fake.root)})
    assert one(found, "sglang.compiler").where == "ninja"
    found = preflight(launch, {**bare, "CUDA_HOME": os.fspath(fake.root / "nowhere")})
    assert one(found, "sglang.compiler").where == "nvcc, ninja"


def test_shim_hidden_by_another_sitecustomize(
    launch: Launch, fake: FakeServing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.put("site/sitecustomize.py", "")
    monkeypatch.setattr(contract, "SITE", fake.root / "site")
    found = preflight(launch, fake.environ())
    assert codes(found) == ["shim.inactive"]
    assert "not installed" in one(found, "shim.inactive").found


def test_a_sitecustomize_that_loads_torch_everywhere(launch: Launch, fake: FakeServing) -> None:
    # Ours hands over to the next one on the path.
    fake.put("sitecustomize.py", "import torch\n")
    found = preflight(launch, fake.environ())
    assert codes(found) == ["shim.inactive"] and one(found, "shim.inactive").found == "torch"


def test_python_that_does_not_start(launch: Launch, fake: FakeServing) -> None:
    fake.put("json.py", "raise ImportError('shadowed')\n")
    found = preflight(launch, fake.environ())
    assert codes(found) == ["gpu.unseen", "shim.inactive"]
    assert "shadowed" in one(found, "shim.inactive").found


# ---- cards


def seen(*devices: dict[str, Any], cuda: str | None = "13.0", stderr: str = "") -> dict[str, Any]:
    return {"devices": list(devices), "cuda": cuda, "stderr": stderr}


CARD_8 = {"name": "NVIDIA A800", "capability": [8, 0], "total_bytes": 1, "free_bytes": 1}
CARD_9 = {**CARD_8, "name": "NVIDIA H200", "capability": [9, 0]}
CARD_86 = {**CARD_8, "name": "NVIDIA A10", "capability": [8, 6]}


@pytest.mark.parametrize(
    ("cards", "tp", "arch", "expected"),
    [
        ([CARD_8] * 4, 4, (80,), []),
        ([CARD_8] * 5, 4, (80,), []),
        ([CARD_8] * 3, 4, (80,), ["gpu.count"]),
        ([], 1, (80,), ["gpu.count"]),
        ([CARD_8, CARD_9], 2, (80,), ["gpu.arch"]),
        ([CARD_8, CARD_9], 2, (80, 90), []),
        # SGLang takes the first cards; the last one is not used.
        ([CARD_8, CARD_9], 1, (80,), []),
        ([CARD_86], 1, (80,), ["gpu.arch"]),
    ],
)
def test_count_and_architecture(
    cards: list[dict[str, Any]], tp: int, arch: tuple[int, ...], expected: list[str]
) -> None:
    assert [f.code for f in machine.gpu_findings(seen(*cards), tp, arch)] == expected


def test_torch_that_sees_fewer_cards_than_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\nfor i in 1 2; do echo 'NVIDIA A100-SXM4-80GB, 535.54'; done\n")
    smi.chmod(smi.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", os.fspath(smi.parent))
    complaint = "UserWarning: CUDA initialization: the driver is too old"
    (fault,) = machine.gpu_findings(seen(stderr=complaint), 2, (80,))
    assert "the driver shows 2 GPUs" in fault.problem and complaint in fault.found
    (fault,) = machine.gpu_findings(seen(cuda=None), 2, (80,))
    assert "without CUDA" in fault.problem


def test_torch_that_cannot_be_loaded(launch: Launch, fake: FakeServing) -> None:
    fake.cards([], fails="libcudart.so.13: cannot open shared object file")
    found = preflight(launch, fake.environ())
    assert codes(found) == ["gpu.unseen"] and "libcudart.so.13" in one(found, "gpu.unseen").found


@pytest.mark.parametrize(
    ("total", "free", "expected"),
    [
        (80 << 30, 79 << 30, []),
        (80 << 30, (79 << 30) - 1, ["gpu.busy"]),
        (80 << 30, 20 << 20, ["gpu.memory"]),
        (2 << 30, 2 << 30, ["serve.memory"]),
    ],
)
def test_memory_of_the_card(
    total: int, free: int, expected: list[str], launch: Launch, fake: FakeServing
) -> None:
    fake.cards([{**A100, "total_bytes": total, "free_bytes": free}])
    assert codes(preflight(launch, fake.environ())) == expected


# ---- shared memory, ports, key


@pytest.mark.parametrize(("tp", "free", "expected"), [(2, 64 << 20, 1), (2, 1 << 30, 0), (1, 64 << 20, 0)])
def test_shared_memory(tp: int, free: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Status:
        f_bavail, f_frsize = free // 4096, 4096

    monkeypatch.setattr(os, "statvfs", lambda path: Status)
    assert [f.code for f in machine.shm_findings(tp)] == ["host.shm"] * expected


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_port_that_is_taken(family: socket.AddressFamily) -> None:
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    with socket.socket(family) as holder:
        holder.bind((host, 0))
        holder.listen(1)
        port = holder.getsockname()[1]
        (fault,) = machine.port_findings(host, [("--port", port)])
        assert fault.code == "host.port" and "taken" in fault.problem
    assert list(machine.port_findings(host, [("--port", port)])) == []


def test_address_of_another_machine() -> None:
    # TEST-NET-1 of RFC 5737: no machine has it.
    (fault,) = machine.port_findings("192.0.2.1", [("--port", 1234)])
    assert fault.code == "host.port" and "cannot be opened" in fault.problem


@pytest.mark.parametrize("host", ["a" * 64, "no-such-host.invalid"])
def test_host_that_is_no_address_is_named(host: str) -> None:
    (fault,) = machine.port_findings(host, [("--port", 1234), ("--nccl-port", 1235)])
    assert (fault.code, fault.where, fault.found) == ("host.port", "--host", host)
    assert list(machine.port_findings("localhost", [("--port", 0)])) == []


def test_port_of_nccl_is_looked_at(launch: Launch, fake: FakeServing) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen(1)
        extra = ("--nccl-port", str(holder.getsockname()[1]))
        found = preflight(replace(launch, extra=extra), fake.environ())
    assert one(found, "host.port").where == "--nccl-port"


def test_key_file(launch: Launch, tmp_path: Path) -> None:
    path = tmp_path / "key"
    make_key(path)
    exposed = replace(launch, host="0.0.0.0", key_file=path)
    assert codes(check_launch(exposed, {})) == []
    path.chmod(0o644)
    found = check_launch(exposed, {})
    assert codes(found) == ["key.mode"]
    assert path.read_text().strip() not in json.dumps(found.as_dict())
