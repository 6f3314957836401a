"""What is said about the libraries around SGLang, and about a process that ended without an answer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from dsv4convert.runtime import installation, sight
from tests.fakeserving import VERSIONS


def _modules(**versions: str | None) -> dict[str, Any]:
    compilers = dict.fromkeys(("nvcc", "ninja", "c++", "cc"), "/bin/true")
    return {"versions": {**VERSIONS, **versions}, "requires": [], "compilers": compilers}


@pytest.mark.parametrize(
    ("version", "old"),
    [("0.46.2", True), ("1.0.0", True), ("1.0.1", False), ("1.10.0", False), (None, False)],
)
def test_a_starlette_that_believes_the_host_header_is_warned_of(
    tmp_path: Path, version: str | None, old: bool
) -> None:
    place = installation.Installation(tmp_path, "0.5.16", None)
    found = [f for f in installation.findings(place, _modules(starlette=version)) if f.code == "sglang.pin"]
    assert [(f.where, f.severity, f.expected, f.found) for f in found] == (
        [("starlette", "warning", "1.0.1 or newer", version)] if old else []
    )


@pytest.mark.parametrize(
    ("stderr", "told"),
    [
        ("error: `x`: is wrong   [shim.setting]\nhint: set it\n\n", "error: `x`: is wrong   [shim.setting]"),
        ("Traceback\n  hint: indented\nValueError: hint: no\n", "ValueError: hint: no"),
        ("hint: alone\n", "exit status 1"),
    ],
)
def test_a_process_that_failed_is_quoted_with_its_error_not_with_the_hint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stderr: str, told: str
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\nimport sys\nsys.exit({stderr!r}[:-1])\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert sight.look("modules", {}, 60) == {"failed": told}
