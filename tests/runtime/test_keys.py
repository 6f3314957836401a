"""API keys in files: how they are made, which are accepted, and that nothing shows one."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4convert.errors import Refused
from dsv4convert.runtime.keys import look_at_key, make_key, read_key
from tests.conftest import Ran

KEY = "0123456789abcdef"


def private(path: Path, content: bytes | str, mode: int = 0o600) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(mode)
    return path


def codes(path: Path) -> list[str]:
    return [f.code for f in look_at_key(path)[1]]


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
def test_new_key_is_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        make_key(tmp_path / "key")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    # 256 bits in base 64 without padding.
    assert len(read_key(tmp_path / "key")) == 43


def test_two_keys_differ(tmp_path: Path) -> None:
    for name in "ab":
        make_key(tmp_path / name)
    assert read_key(tmp_path / "a") != read_key(tmp_path / "b")


@pytest.mark.parametrize("kind", ["file", "link", "dangling"])
def test_a_key_is_never_written_over_something(tmp_path: Path, kind: str) -> None:
    target, path = tmp_path / "other", tmp_path / "key"
    if kind != "dangling":
        private(target, "kept")
    if kind == "file":
        path = target
    else:
        path.symlink_to(target)
    with pytest.raises(Refused) as refused:
        make_key(path)
    assert [f.code for f in refused.value.findings] == ["key.exists"]
    assert target.read_text() == "kept" if kind != "dangling" else not target.exists()


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_private_key_is_read(tmp_path: Path, mode: int) -> None:
    assert read_key(private(tmp_path / "key", KEY + "\n", mode)) == KEY


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o601, 0o620])
def test_a_key_that_others_can_touch_is_refused(tmp_path: Path, mode: int) -> None:
    path = private(tmp_path / "key", KEY, mode)
    key, findings = look_at_key(path)
    assert key == "" and [f.code for f in findings] == ["key.mode"]
    assert findings[0].found == f"{mode:04o}" and KEY not in str(findings[0])


def test_a_key_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = private(tmp_path / "key", KEY)
    assert codes(path) == []
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert codes(path) == ["key.owner"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"0123456789abcde",
        b"x" * 1025,
        b"0123456789abcdef\nsecond line 01234",
        b"blanks inside-the-key are-wrong",
        "schlüssel-schlüssel".encode(),
        b"\xff" * 20,
        b"0123456789abcdef\x00",
    ],
)
def test_content_that_is_no_key_is_refused_without_showing_it(tmp_path: Path, content: bytes) -> None:
    key, findings = look_at_key(private(tmp_path / "key", content))
    assert key == "" and [f.code for f in findings] == ["key.content"]
    shown = "".join(str(f) for f in findings)
    assert not any(len(w) > 6 and w in shown for w in content.decode(errors="replace").split())


@pytest.mark.parametrize("content", [b"0123456789abcdef", b"0123456789abcdef\r\n", b"~" * 1024])
def test_neighbours_of_refused_contents_are_keys(tmp_path: Path, content: bytes) -> None:
    assert read_key(private(tmp_path / "key", content)) == content.decode().strip()


@pytest.mark.parametrize("kind", ["absent", "directory", "pipe"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "key"
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    assert codes(path) == ["key.missing"]


def test_a_key_in_place_of_its_file_is_not_shown(tmp_path: Path) -> None:
    for name in (KEY, "k" * 1000):
        (fault,) = look_at_key(tmp_path / name)[1]
        assert fault.where == "--api-key-file" and name not in str(fault)
    # The name of something that is there is no key.
    (tmp_path / "link").symlink_to("nowhere")
    assert look_at_key(tmp_path / "link")[1][0].where == "link"


def test_name_of_a_key_file_stays_on_its_line(tmp_path: Path) -> None:
    (fault,) = look_at_key(private(tmp_path / "a\nb \x1b[1mé", KEY, 0o644))[1]
    assert fault.where == "a\\nb \\x1b[1mé"


def test_all_faults_of_a_file_are_told_together(tmp_path: Path) -> None:
    assert codes(private(tmp_path / "key", "", 0o644)) == ["key.mode", "key.content"]


def test_command_shows_no_key(cli: Callable[..., Ran], tmp_path: Path) -> None:
    made = cli("keygen", tmp_path / "key")
    assert made.exit_code == 0 and read_key(tmp_path / "key") not in made.out + made.err
    again = cli("keygen", tmp_path / "key", "--json")
    assert again.exit_code == 3 and again.json()["findings"][0]["code"] == "key.exists"
