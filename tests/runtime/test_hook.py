"""The import hook on a stand-in for SGLang: what it loads, when it acts, what it refuses.

The stand-in has every pinned file; two of them hold something to patch. Its hashes are allowed by the
variable that exists for changed files, which is tested by the way. The real SGLang is that of `tests/sglang`.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4convert.runtime import contract

_ROOT = Path(__file__).resolve().parents[2]
_EMPTY = "VALUE = 1\n"
_FILES = {
    "srt/server_args.py": """
from dataclasses import dataclass

@dataclass
class ServerArgs:
    port: int = 30000
    api_key: str | None = None
    admin_api_key: str | None = None
    ssl_keyfile_password: str | None = None
""",
    "srt/utils/msgspec_utils.py": """
def msgspec_to_builtins(obj):
    if isinstance(obj, dict):
        return {key: msgspec_to_builtins(value) for key, value in obj.items()}
    return obj
""",
}
_HASHES = ",".join(hashlib.sha256(text.encode()).hexdigest() for text in (_EMPTY, *_FILES.values()))

#: Prints what a process looks like after it imported SGLang's arguments.
_LOOK = """
import json, os, sys
import sglang.srt.server_args as m
from dsv4convert import runtime
print(json.dumps({
    "applied": list(runtime.applied()),
    "text": repr(m.ServerArgs(api_key="k3y")),
    "loader": type(m.__loader__).__name__,
    "same": m.__spec__.loader is m.__loader__,
    "topk": os.environ.get("SGLANG_OPT_USE_TOPK_V2"),
    "moe": os.environ.get("DSV4_SM80_MOE"),
}))
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """Return a directory with a package ``sglang``."""
    package = tmp_path / "site" / "sglang"
    for name in contract.HASHES:
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_FILES.get(name, _EMPTY))
        for parent in path.relative_to(package).parents:
            (package / parent / "__init__.py").touch()
    (package / "_version.py").write_text("__version__ = version = '0.5.23'\n")
    return package.parent


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(stand_in: Path) -> Run:
    """Return ``run(code, **environment)``: a fresh process with the shim's directory on its path."""

    def start(
        code: str, *paths: Path, without: Path | None = None, **env: str
    ) -> subprocess.CompletedProcess[str]:
        places = [p for p in (contract.SITE, *paths, stand_in, _ROOT) if p != without]
        base = {k: os.environ[k] for k in ("PATH", "HOME", "LANG") if k in os.environ}
        base |= {"PYTHONPATH": os.pathsep.join(map(str, places)), "DSV4_SM80_ALLOW_HASH": _HASHES}
        # Outside the repository: the current directory is on the path of `-c`.
        return subprocess.run(
            [sys.executable, "-c", code],
            env=base | env,
            cwd=stand_in,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return start


def _told(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_enabled_patches_on_import_and_leaves_the_module_as_it_was(run: Run) -> None:
    assert _told(run(_LOOK, ENABLE_DSV4_SM80="1")) == {
        "applied": ["S1"],
        "text": "ServerArgs(port=30000, api_key='<hidden>', admin_api_key=None, ssl_keyfile_password=None)",
        "loader": "SourceFileLoader",
        "same": True,
        "topk": "0",
        "moe": "ours",
    }


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"ENABLE_DSV4_SM80": "0"},
        {"ENABLE_DSV4_SM80": ""},
        # `serve` refuses any value but 1, so that no other may arm.
        {"ENABLE_DSV4_SM80": "true"},
        {"ENABLE_DSV4_SM80": "on"},
        {"ENABLE_SGLANG_DSV4_A100_PATCH": "yes"},
        # Our own name wins over the older one.
        {"ENABLE_DSV4_SM80": "0", "ENABLE_SGLANG_DSV4_A100_PATCH": "1"},
    ],
)
def test_disabled_leaves_stock_sglang(run: Run, environment: dict[str, str]) -> None:
    seen = _told(run(_LOOK, **environment))
    assert (seen["applied"], seen["topk"], seen["moe"]) == ([], None, None)
    assert "api_key='k3y'" in str(seen["text"])


def test_older_names_are_understood(run: Run) -> None:
    older = {"ENABLE_SGLANG_DSV4_A100_PATCH": "1", "SGLANG_DSV4_A100_INT8_INDEXER": "1"}
    seen = _told(run(_LOOK, **older, SGLANG_DSV4_MXFP4_MOE_BACKEND="mxfp4_int8"))
    assert (seen["applied"], seen["moe"]) == (["S1"], "ours")
    assert _told(run(_LOOK, **older, SGLANG_DSV4_MXFP4_MOE_BACKEND="marlin"))["moe"] == "marlin"


def test_variables_of_the_user_are_kept(run: Run) -> None:
    assert _told(run(_LOOK, ENABLE_DSV4_SM80="1", SGLANG_OPT_USE_TOPK_V2="1"))["topk"] == "1"


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        (
            "DSV4_SM80_MOE",
            "cutlass",
            "names no backend for the routed experts: expected ours or marlin or humming, found cutlass",
        ),
        (
            "SGLANG_DSV4_MXFP4_MOE_BACKEND",
            "fp8",
            "names no backend for the routed experts: expected ours or marlin or humming, found fp8",
        ),
        (
            "SGLANG_DSV4_A100_INT8_INDEXER",
            "0",
            "it has no FP8, so index keys are INT8: expected 1 or unset, found 0",
        ),
    ],
)
def test_an_impossible_setting_refuses_sglang(run: Run, name: str, value: str, sentence: str) -> None:
    done = run("import sglang", ENABLE_DSV4_SM80="1", **{name: value})
    assert done.returncode == 1
    assert f"error: `{name}`: " in done.stderr and sentence in done.stderr
    assert "hint: set it to one of the values named, or unset it" in done.stderr
    # Without SGLang the setting is nobody's business.
    assert run("pass", ENABLE_DSV4_SM80="1", **{name: value}).stderr == ""


def test_an_unknown_file_refuses_the_first_patched_module(run: Run) -> None:
    """All files at once, before any code of a patched module runs; `import sglang` alone is not refused."""
    code = "import sglang\nprint('here', flush=True)\nimport sglang.srt.server_args"
    done = run(code, ENABLE_DSV4_SM80="1", DSV4_SM80_ALLOW_HASH="")
    assert (done.returncode, done.stdout) == (1, "here\n")
    errors = [line for line in done.stderr.splitlines() if "error: `sglang/" in line]
    assert len(errors) == len(contract.HASHES)
    assert (
        "`sglang/srt/server_args.py`: is not the file of SGLang 0.5.16, the installed one is 0.5.23"
        in done.stderr
    )
    assert done.stderr.count("hint: install SGLang 0.5.16, or unset `ENABLE_DSV4_SM80`") == 1


def test_a_target_that_is_gone_refuses_its_module(run: Run) -> None:
    """In the stand-in everything else is: a file allowed by its hash is still looked at."""
    done = run("import sglang.srt.mem_cache.deepseek_v4_memory_pool", ENABLE_DSV4_SM80="1")
    assert done.returncode == 1
    assert "DeepSeekV4SingleKVPool.create_buffer`: patch K1 has nothing to replace" in done.stderr


@pytest.mark.parametrize(
    ("first", "status", "words"),
    [
        # Its patch K1 finds nothing in the stand-in.
        ("sglang.srt.mem_cache.deepseek_v4_memory_pool", 1, "K1 has nothing to replace"),
        # Not there at all, which is an everyday matter: SGLang tries imports of optional libraries.
        ("sglang.srt.models.absent", 0, ""),
    ],
)
def test_a_refusal_that_is_ignored_ends_the_process(run: Run, first: str, status: int, words: str) -> None:
    """SGLang's registry of models ignores every error of an import and goes on to the next module."""
    attempt = f"try:\n    import {first}\nexcept Exception:\n    print('ignored', flush=True)\n"
    code = attempt + attempt.replace(first, "sglang.srt.models").replace("ignored", "again") + "print('on')"
    done = run(code, ENABLE_DSV4_SM80="1")
    assert (done.returncode, done.stdout) == (status, "ignored\n" if status else "ignored\non\n")
    assert words in done.stderr and done.stderr.count("[shim.target]") == status


def test_another_python_process_loads_next_to_nothing(run: Run) -> None:
    """What compilers and tools pay: three small modules when enabled, no torch, no typing, no dataclasses."""
    code = "import sys, json; print(json.dumps(sorted(sys.modules)))"
    stock, unset, enabled = (
        set(json.loads(done.stdout))
        for done in (run(code, without=contract.SITE), run(code), run(code, ENABLE_DSV4_SM80="1"))
    )
    # To find the next `sitecustomize`; most interpreters load all of it anyway.
    finding = {"importlib", "importlib._bootstrap", "importlib._bootstrap_external", "importlib.machinery"}
    assert unset - stock <= finding | {"sitecustomize", "warnings", "__future__"}
    assert enabled - unset == {"dsv4convert", "dsv4convert.runtime", "dsv4convert.runtime.hook"}


@pytest.mark.parametrize("switch", ["0", "1"])
def test_the_next_sitecustomize_runs_too(run: Run, tmp_path: Path, switch: str) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text("import os\nos.environ['THEIRS'] = 'ran'\nNAME = 'theirs'\n")
    code = "import os, sitecustomize; print(os.environ['THEIRS'], sitecustomize.NAME)"
    done = run(code, theirs, ENABLE_DSV4_SM80=switch)
    assert done.stdout == "ran theirs\n", done.stderr
    assert _told(run(_LOOK, theirs, ENABLE_DSV4_SM80="1"))["applied"] == ["S1"]


@pytest.mark.parametrize("older", [False, True])
def test_several_copies_on_the_path_take_turns(run: Run, tmp_path: Path, older: bool) -> None:
    """A checkout beside an installed wheel, and links to one of them: each runs, then what the user has."""
    theirs, copy, link, files = (tmp_path / name for name in ("theirs", "copy", "link", "files"))
    for directory in (theirs, copy, files):
        directory.mkdir()
    (theirs / "sitecustomize.py").write_text("print('theirs')\nNAME = 'theirs'\n")
    text = (contract.SITE / "sitecustomize.py").read_text()
    # As it was when a copy knew of no other.
    shared = 'sys.__dict__.setdefault("dsv4convert_sitecustomize", set())'
    assert shared in text
    if older:
        text = text.replace(shared, "set()")
    (copy / "sitecustomize.py").write_text(text)
    link.symlink_to(contract.SITE)
    # As an installer lays it down that links every file to its cache.
    (files / "sitecustomize.py").symlink_to(contract.SITE / "sitecustomize.py")
    code = "import sitecustomize; print(sitecustomize.NAME)"
    done = run(code, files, copy, link, theirs, copy, ENABLE_DSV4_SM80="1")
    assert (done.stdout, done.stderr) == ("theirs\ntheirs\n", "")
    assert _told(run(_LOOK, files, copy, link, ENABLE_DSV4_SM80="1"))["applied"] == ["S1"]


def test_a_python_without_the_package_goes_on(tmp_path: Path) -> None:
    """Another interpreter that inherits the environment: one line, and its own work."""
    lonely = tmp_path / "activate"
    lonely.mkdir()
    (lonely / "sitecustomize.py").write_bytes((contract.SITE / "sitecustomize.py").read_bytes())
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(lonely), "ENABLE_DSV4_SM80": "1"}
    code = "import sys; sys.path[:] = [p for p in sys.path if 'site-packages' in p]; print('worked')"
    done = subprocess.run(
        [
            sys.executable,
            "-S",
            "-c",
            f"import sys; sys.path.insert(0, {str(lonely)!r}); import sitecustomize; {code}",
        ],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "worked\n"
    assert (
        done.stderr.count("\n") == 1
        and "cannot import the SM80 shim: No module named 'dsv4convert'" in done.stderr
    )
