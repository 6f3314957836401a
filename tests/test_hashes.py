"""Hash lists, hashing, and what comes of comparing the two."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4convert import releases
from dsv4convert.checkpoint import open_checkpoint
from dsv4convert.errors import EnvironmentFault, Refused
from dsv4convert.geometry import read_geometry
from dsv4convert.names import official_shard_count
from dsv4convert.validate import Contents, hashing, hashlists, verify_original
from dsv4convert.validate.hashing import Hashed, Memory, Target, hash_files
from dsv4convert.validate.hashlists import GIT_BLOB, SHA256, Digest, parse_metadata, parse_sums, read_list
from dsv4convert.validate.structure import read_manifest
from tests.faults import COMMIT, S, files_of, hashed_farm, record, records, reverse, sums
from tests.toy import MANIFEST, Toy, Toybox

Run = Callable[..., Any]
BOTH = frozenset({SHA256, GIT_BLOB})


@pytest.fixture(scope="session")
def toybox(tmp_path_factory: pytest.TempPathFactory) -> Toybox:
    """Return the toys of this session."""
    return Toybox(tmp_path_factory.mktemp("toys"))


@pytest.fixture
def k(toybox: Toybox, tmp_path: Path) -> Toy:
    """Return a copy of the 0731 toy."""
    return toybox.copy("0731", tmp_path / "work")


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files be remembered at once, however new they are."""
    monkeypatch.setattr(hashing, "_SETTLED_NS", 0)


def errors(seen: Any) -> list[tuple[str, str]]:
    return [(f["code"], f["where"]) for f in seen.json()["findings"] if f["severity"] == "error"]


# The list that ships ------------------------------------------------------------------------------------


def test_published_list_covers_every_shard_of_the_release() -> None:
    geometry, _ = read_geometry(releases.config("deepseek-v4-flash-0731"))
    assert geometry
    shipped = hashlists.release_list("deepseek-v4-flash-0731")
    assert shipped and not shipped.findings and shipped.repo == "deepseek-ai/DeepSeek-V4-Flash-0731"
    count = official_shard_count(geometry)
    names = {f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)}
    assert set(shipped.files) == names | {"model.safetensors.index.json"}
    # The total of all shard files, as published.
    assert sum(shipped.files[n].size or 0 for n in names) == 166_886_535_336
    assert len({d.value for d in shipped.files.values()}) == 49


@pytest.mark.parametrize("key", [k for k in releases.RELEASES if k != "deepseek-v4-flash-0731"])
def test_other_releases_have_no_published_list_yet(key: str) -> None:
    assert hashlists.release_list(key) is None


@pytest.fixture
def published(k: Toy, monkeypatch: pytest.MonkeyPatch) -> Toy:
    """Return a toy that counts as the 0731 release, with published hashes of its shards."""
    rows = {
        p.name: {"bytes": p.stat().st_size, "sha256": hashlib.sha256(p.read_bytes()).hexdigest()}
        for p in k.root.glob("model*")
    }
    page = {"repo": "deepseek-ai/DeepSeek-V4-Flash-0731", "revision": COMMIT, "files": rows}
    monkeypatch.setattr(hashlists, "published_hashes", lambda key: page)
    release = releases.RELEASES["deepseek-v4-flash-0731"]
    monkeypatch.setattr("dsv4convert.survey.identify", lambda geometry: release)
    monkeypatch.setattr("dsv4convert.survey.dspark_findings", lambda geometry, release: ())
    return k


def test_published_hashes_verify_a_download(published: Toy, cli: Run) -> None:
    seen = cli("original", published.root, "--checksums", "auto")
    assert seen.exit_code == 0 and seen.out.splitlines()[-1] == "contents verified"
    # The published list is of weights and index; what it does not name is not claimed.
    assert "NOT checked  contents: no hash is known of" in seen.out and "`config.json`" in seen.out


def test_published_hashes_name_the_file_and_the_command(published: Toy, cli: Run) -> None:
    published.flip("layers.1.attn.wq_a.weight", 9)
    seen = cli("original", published.root, "--checksums", "auto")
    assert seen.exit_code == 1
    command = (
        f"hf download deepseek-ai/DeepSeek-V4-Flash-0731 --revision {COMMIT} "
        f"--local-dir {published.root} --force-download {S(3)}"
    )
    assert seen.out.splitlines()[-4:-1] == ["fetch again:", f"  {S(3)}", f"  $ {command}"]
    page = cli("original", published.root, "--checksums", "auto", "--json").json()
    assert (page["fetch_again"], page["fetch_command"]) == ([S(3)], command)
    assert 0 < page["contents_percent"] < 100


def test_published_hashes_that_no_shard_has_are_another_upload(published: Toy, cli: Run) -> None:
    for number in range(1, 9):
        reverse(published, number)
    seen = cli("original", published.root, "--checksums", "auto", "--json")
    page = seen.json()
    assert seen.exit_code == 0 and [f["code"] for f in page["findings"]] == ["content.other-release"]
    assert "DSpark" in page["findings"][0]["problem"] and page["contents_percent"] is None
    assert cli("original", published.root, "--checksums", "auto", "--strict").exit_code == 1
    # What the client recorded still tells right from wrong.
    records(published)
    assert cli("original", published.root, "--checksums", "auto", "--json").json()["contents_percent"] == 100
    published.flip("norm.weight")
    assert errors(cli("original", published.root, "--checksums", "auto", "--json")) == [
        ("content.hash", S(5))
    ]


def test_sibling_shard_with_its_own_record_is_not_the_published_one(published: Toy, cli: Run) -> None:
    records(published)
    reverse(published, 4)
    record(published, S(4), "9" * 40)
    seen = cli("original", published.root, "--checksums", "auto", "--json")
    assert errors(seen) == [("content.sources", S(4))] and seen.json()["fetch_again"] == [S(4)]
    assert f"--revision {COMMIT}" in seen.json()["fetch_command"]


# Any byte -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sums", "records"])
def test_one_flipped_byte_anywhere_is_found(k: Toy, cli: Run, rng: np.random.Generator, kind: str) -> None:
    {"sums": sums, "records": records}[kind](k)
    for name, path in files_of(k).items():
        content = path.read_bytes()
        at = int(rng.integers(len(content)))
        changed = bytearray(content)
        changed[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(changed)
        seen = cli("original", k.root, "--checksums", "auto", "--json")
        assert seen.exit_code == 1, (name, at)
        # A broken header or config has findings of its own; the file is to be fetched again all the same.
        assert seen.json()["fetch_again"] == [name], (name, at)
        path.write_bytes(content)
    assert cli("original", k.root, "--checksums", "auto").exit_code == 0


def test_structural_faults_are_fetched_again_too(k: Toy, cli: Run) -> None:
    k.S(2).unlink()
    os.truncate(k.root / S(4), 1000)
    page = cli("original", k.root, "--json").json()
    assert page["fetch_again"] == [S(2), S(4)]
    assert "--revision COMMIT" in page["fetch_command"], "nothing told which"


def test_values_that_no_release_holds_name_their_shard(k: Toy, cli: Run) -> None:
    k.poke("norm.weight", 0, b"\xc0\x7f")
    assert cli("original", k.root, "--read-data", "--json").json()["fetch_again"] == [S(5)]


def test_fetch_command_survives_a_shell(k: Toy, tmp_path: Path) -> None:
    records(k)
    place = tmp_path / "it's a 模型"
    k.root.rename(place)
    moved = Toy(place)
    moved.flip("norm.weight")
    report = verify_original(open_checkpoint(place), Contents("auto", repo="owner/name"))
    words = shlex.split(report.fetch_command)
    assert words[:5] == ["hf", "download", "owner/name", "--revision", COMMIT]
    assert words[5:] == ["--local-dir", str(place), "--force-download", S(5)]


def test_fetch_command_of_a_cache_snapshot_names_the_cache(k: Toy, tmp_path: Path) -> None:
    hashed_farm(k)
    snapshot = tmp_path / "hub" / "models--owner--a--b" / "snapshots" / COMMIT
    snapshot.parent.mkdir(parents=True)
    (tmp_path / "hub" / "models--owner--a--b" / "blobs").symlink_to(k.root.parent / "blobs")
    k.root.rename(snapshot)
    for path in snapshot.rglob("*"):
        if path.is_symlink():
            name = os.path.basename(os.readlink(path))
            path.unlink()
            path.symlink_to(k.root.parent / "blobs" / name)
    Toy(snapshot).flip("norm.weight")
    report = verify_original(open_checkpoint(snapshot), Contents("auto"))
    words = shlex.split(report.fetch_command)
    assert words[2:6] == ["owner/a--b", "--revision", COMMIT, "--cache-dir"]
    assert words[6:] == [str(tmp_path / "hub"), "--force-download", S(5)]


def test_checks_leave_nothing_in_the_download(k: Toy, cli: Run) -> None:
    records(k)
    before = {p: p.stat().st_mtime_ns for p in k.root.rglob("*")}
    assert cli("original", k.root, "--checksums", "auto", "--read-data").exit_code == 0
    assert {p: p.stat().st_mtime_ns for p in k.root.rglob("*")} == before


def test_lists_cannot_name_files_elsewhere(k: Toy, cli: Run) -> None:
    secret = k.root.parent / "secret"
    secret.write_text("x")
    (k.root / "link").symlink_to(secret)
    (k.root.parent / "list").write_text(f"{'0' * 64}  ../secret\n")
    seen = cli("original", k.root, "--checksums", k.root.parent / "list", "--json")
    assert seen.exit_code == 3 and errors(seen) == [("content.list-file", "list")]
    k.put("SHA256SUMS", f"{'0' * 64}  link\n{'0' * 64}  {secret}\n")
    seen = cli("original", k.root, "--checksums", "auto", "--json")
    # Nothing about a file outside, not even its hash, may be told.
    assert hashlib.sha256(b"x").hexdigest()[:12] not in seen.out


def test_pickles_of_modelscope_are_never_opened(k: Toy, cli: Run) -> None:
    k.put(".msc", b"\x80\x04cos\nsystem\n(S'touch pwned'\ntR.")
    seen = cli("original", k.root, "--checksums", "auto", "--json")
    assert seen.exit_code == 0 and "never opened" in seen.json()["findings"][0]["problem"]


# Lists --------------------------------------------------------------------------------------------------


def test_git_blob_hash_is_that_of_git(tmp_path: Path) -> None:
    # Typed from `echo hello | git hash-object --stdin`.
    (tmp_path / "a").write_bytes(b"hello\n")
    found: list[Hashed] = []
    hash_files([Target("a", tmp_path / "a", 6, BOTH)], 1, None, found.append, lambda n: None)
    assert found[0].digests[GIT_BLOB] == "ce013625030ba8dba906f756967f9e9ca394464a"
    assert found[0].digests[SHA256] == hashlib.sha256(b"hello\n").hexdigest()


@pytest.mark.parametrize("tag", [[], ["--tag"]])
def test_sums_are_read_as_sha256sum_writes_them(tmp_path: Path, tag: list[str]) -> None:
    names = ["plain", "with space", "back\\slash", "new\nline", "模型", " lead", "sub/deep"]
    (tmp_path / "sub").mkdir()
    for name in names:
        (tmp_path / name).write_text(name)
    made = subprocess.run(["sha256sum", *tag, *names], cwd=tmp_path, capture_output=True, check=True)
    parsed = parse_sums(made.stdout, "SHA256SUMS")
    assert not parsed.findings
    expected = {n: Digest(SHA256, hashlib.sha256(n.encode()).hexdigest()) for n in names}
    assert parsed.files == expected


def test_sums_of_one_bare_hash_belong_to_the_file_they_are_named_after() -> None:
    assert parse_sums(b"0" * 64 + b"\n", "a.safetensors.sha256").files == {
        "a.safetensors": Digest(SHA256, "0" * 64)
    }


def test_sums_that_contradict_themselves_are_reported() -> None:
    text = f"{'0' * 64}  a\n{'1' * 64}  a\n{'0' * 64}  b\n{'0' * 64}  b\n"
    parsed = parse_sums(text.encode(), "SHA256SUMS")
    assert set(parsed.files) == {"a", "b"} and [f.code for f in parsed.findings] == ["content.list"]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (f"{'a' * 40}\n{'b' * 64}\n1.5\n", ("a" * 40, Digest(SHA256, "b" * 64))),
        (f'{"a" * 40}\n"{"b" * 40}"\n1.5\n', ("a" * 40, Digest(GIT_BLOB, "b" * 40))),
        (f"{'a' * 40}\nW/xyz\n1.5\n", ("a" * 40, None)),
        (f"main\n{'b' * 64}\n1.5\n", ("", None)),
        ("", ("", None)),
    ],
    ids=["sha256", "quoted-git", "other-etag", "no-commit", "empty"],
)
def test_metadata_gives_commit_and_digest(raw: str, expected: tuple[str, Digest | None]) -> None:
    assert parse_metadata(raw.encode()) == expected


# Pieces of lists in an order of chance reach every branch of the parsers; regular expressions take minutes.
_PIECES = [
    "0" * 64,
    "A" * 64,
    "b" * 40,
    "0" * 63,
    "  ",
    " *",
    "\t",
    "\\",
    "\n",
    "\r\n",
    "#",
    "a",
    "../a",
    "/a",
]
_PIECES += ["root/a", "root/", "SHA256 (", ") = ", "\0", "./", "\\n", "é", "\ufeff", "main", '"', "1.5"]
_TEXT = st.binary(max_size=80) | st.lists(st.sampled_from(_PIECES), max_size=10).map(
    lambda p: "".join(p).encode()
)


@settings(max_examples=200)
@given(raw=_TEXT, name=st.sampled_from(["SHA256SUMS", "a.sha256", "sub/x.sha256sum"]))
def test_fuzz_sums_never_crash_and_never_leave_the_directory(raw: bytes, name: str) -> None:
    for found, digest in parse_sums(raw, name, "root").files.items():
        assert found and not found.startswith("/") and ".." not in found.split("/") and "\0" not in found
        assert len(digest.value) == 64 and digest.algorithm == SHA256


@settings(max_examples=200)
@given(raw=_TEXT)
def test_fuzz_metadata_never_crashes(raw: bytes) -> None:
    commit, digest = parse_metadata(raw)
    assert len(commit) in (0, 40) and (digest is None or len(digest.value) in (40, 64))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("0" * 64),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_LISTS = st.dictionaries(
    st.sampled_from(["repo", "revision", "files"]),
    _JSON
    | st.dictionaries(st.text(max_size=5), st.dictionaries(st.sampled_from(["bytes", "sha256"]), _JSON)),
)


@settings(max_examples=200)
@given(value=_LISTS)
def test_fuzz_json_lists_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    path = tmp_path_factory.getbasetemp() / f"fuzz-{os.getpid()}.json"
    path.write_text(json.dumps(value))
    try:
        found = read_list(path, "root")
    except Refused as error:
        assert [f.code for f in error.findings] == ["content.list-file"]
    else:
        assert found.files and all(d.size is None or d.size >= 0 for d in found.files.values())


@settings(max_examples=200)
@given(
    value=_JSON | st.dictionaries(st.sampled_from(["schema", "source", "plan", "output", "tensors"]), _JSON)
)
def test_fuzz_manifests_are_read_or_reported(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / MANIFEST).write_text(json.dumps(value))
    manifest, findings = read_manifest(folder)
    assert manifest is None and [f.code for f in findings] == ["manifest.not-json"]


# Hashing ------------------------------------------------------------------------------------------------


def _targets(folder: Path, count: int, size: int = 5 << 20) -> list[Target]:
    folder.mkdir(exist_ok=True)
    for i in range(count):
        (folder / f"f{i}").write_bytes(bytes([i]) * (size + i))
    return [Target(f"f{i}", folder / f"f{i}", size + i, frozenset({SHA256})) for i in range(count)]


def _hashed(targets: list[Target], memory: Memory | None, jobs: int = 2) -> tuple[dict[str, Hashed], int]:
    found: dict[str, Hashed] = {}
    read = [0]

    def add(count: int) -> None:
        read[0] += count

    hash_files(targets, jobs, memory, lambda h: found.__setitem__(h.name, h), add)
    return found, read[0]


@pytest.mark.parametrize("jobs", [1, 3, 16])
def test_hashing_gives_the_same_whatever_the_threads(tmp_path: Path, jobs: int) -> None:
    targets = _targets(tmp_path, 5)
    found, read = _hashed(targets, None, jobs)
    assert read == sum(t.size for t in targets)
    expected = {t.name: hashlib.sha256(t.path.read_bytes()).hexdigest() for t in targets}
    assert {n: h.digests[SHA256] for n, h in found.items()} == expected


@pytest.mark.usefixtures("settled")
def test_interrupted_run_continues_where_it_was(tmp_path: Path) -> None:
    targets = _targets(tmp_path / "d", 6)

    def interrupt(count: int, left: list[int] = [3 * (5 << 20)]) -> None:  # noqa: B006
        left[0] -= count
        if left[0] < 0:
            raise KeyboardInterrupt

    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        hash_files(targets, 1, Memory(tmp_path, tmp_path / "m"), lambda h: None, interrupt)
    assert set(threading.enumerate()) <= before, "no thread goes on reading"
    found, _ = _hashed(targets, Memory(tmp_path, tmp_path / "m"))
    assert 2 <= sum(h.reused for h in found.values()) < 6
    found, _ = _hashed(targets, Memory(tmp_path, tmp_path / "m"))
    assert all(h.reused for h in found.values())


@pytest.mark.usefixtures("settled")
def test_memory_does_not_trust_a_time_that_was_set_back(tmp_path: Path) -> None:
    targets = _targets(tmp_path / "d", 2)
    _hashed(targets, Memory(tmp_path, tmp_path / "m"))
    before = targets[0].path.stat()
    with open(targets[0].path, "r+b") as file:
        file.write(b"\xff")
    os.utime(targets[0].path, ns=(before.st_atime_ns, before.st_mtime_ns))
    found, _ = _hashed(targets, Memory(tmp_path, tmp_path / "m"))
    assert (found["f0"].reused, found["f1"].reused) == (False, True)
    assert found["f0"].digests[SHA256] == hashlib.sha256(targets[0].path.read_bytes()).hexdigest()


def test_memory_leaves_out_files_that_could_still_change(tmp_path: Path) -> None:
    targets = _targets(tmp_path / "d", 1)
    _hashed(targets, Memory(tmp_path, tmp_path / "m"))
    assert not (tmp_path / "m").exists()


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[1]\n", b'{"name": "f0", "stat": 1, "digests": []}\n', b"\xff\x00"]
)
def test_memory_that_is_damaged_is_as_good_as_none(tmp_path: Path, damage: bytes) -> None:
    targets = _targets(tmp_path / "d", 1)
    memory = Memory(tmp_path, tmp_path / "m")
    memory.path.parent.mkdir()
    memory.path.write_bytes(damage)
    found, _ = _hashed(targets, Memory(tmp_path, tmp_path / "m"))
    assert not found["f0"].reused and found["f0"].digests[SHA256]


@pytest.mark.usefixtures("settled")
def test_command_says_what_it_reused_and_can_be_told_not_to(k: Toy, cli: Run) -> None:
    sums(k)
    assert "earlier run" not in cli("original", k.root, "--checksums", "auto").out
    assert "17 of them hashed by an earlier run" in cli("original", k.root, "--checksums", "auto").out
    assert "earlier run" not in cli("original", k.root, "--checksums", "auto", "--no-cache").out


@pytest.mark.usefixtures("settled")
def test_read_error_is_named_and_keeps_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = _targets(tmp_path / "d", 3)
    real, bad = os.preadv, targets[1].path.stat().st_ino

    def fail(fd: int, buffers: Any, offset: int) -> int:
        if os.fstat(fd).st_ino == bad and offset:
            raise OSError(5, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(EnvironmentFault) as error:
        _hashed(targets, Memory(tmp_path, tmp_path / "m"))
    (fault,) = error.value.findings
    assert (fault.code, fault.where) == ("io.read", "f1") and "byte 4,194,304" in fault.problem
    monkeypatch.undo()
    monkeypatch.setattr(hashing, "_SETTLED_NS", 0)
    found, _ = _hashed(targets, Memory(tmp_path, tmp_path / "m"))
    assert [found[f"f{i}"].reused for i in range(3)] == [True, False, True]


def test_file_that_grows_while_it_is_read_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = _targets(tmp_path / "d", 1)
    real = os.preadv

    def grow(fd: int, buffers: Any, offset: int) -> int:
        if offset == 0:
            with open(targets[0].path, "ab") as file:
                file.write(b"x")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", grow)
    with pytest.raises(EnvironmentFault) as error:
        _hashed(targets, None)
    assert [f.code for f in error.value.findings] == ["content.changed"]


@pytest.fixture(autouse=True)
def _no_stray_threads() -> Iterator[None]:
    yield
    assert [t.name for t in threading.enumerate() if "work" in t.name] == []
