"""Where hashes of a download can be found, and how each kind of list is read.

Sources, in this order: the list of a release that ships with this package, what `hf download --local-dir`
and the Hugging Face cache leave beside the files, and checksum files in the directory. Files are not hashed
here. ModelScope's ``.msc`` and ``.mdl`` are pickles: they are never opened.

Source: huggingface_hub 2.4 (``_local_folder.py``, cache layout); GNU coreutils ``sha256sum``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final

from dsv4convert.errors import Dsv4Error, Finding, Refused, finding
from dsv4convert.files import open_regular, parse_json, printable, read_start
from dsv4convert.listing import CHECKSUM_LIST, walk_names
from dsv4convert.releases import published_hashes

SHA256: Final = "sha256"
#: What git calls an object: SHA-1 of ``blob SIZE NUL`` and the content. The Hub's etag of small files.
GIT_BLOB: Final = "git blob"

_MAX_LIST = 64 << 20
_DIGITS = {64: SHA256, 40: GIT_BLOB}
_HEX = re.compile(r"[0-9a-f]+")
_GNU = re.compile(r"(\\?)([0-9a-fA-F]{64})(?: [ *]|\t)(.+)")
_BSD = re.compile(r"(\\?)SHA256 \((.+)\) = ([0-9a-fA-F]{64})")
_BARE = re.compile(r"[0-9a-fA-F]{64}")
_UNESCAPED = {"\\\\": "\\", "\\n": "\n", "\\r": "\r"}


@dataclass(frozen=True, slots=True)
class Digest:
    """What one file must be: a hash, and its size if the list says so."""

    algorithm: str
    value: str
    size: int | None = None


@dataclass(frozen=True, slots=True)
class HashList:
    """The hashes of one source.

    Attributes:
        source: What messages call it.
        files: Relative posix path -> what the file must be.
        repo: Hugging Face repository the hashes belong to, if the list says so.
        revision: Its commit, if the list says so.
        published: True for a list that states what a release is, not what a client has fetched.
        findings: What is wrong with the list itself.
    """

    source: str
    files: Mapping[str, Digest]
    repo: str | None = None
    revision: str | None = None
    published: bool = False
    findings: tuple[Finding, ...] = ()


def digest_of(text: str, size: int | None = None) -> Digest | None:
    """Return the digest that a string of 64 or 40 hexadecimal digits stands for, else None."""
    low = text.lower()
    algorithm = _DIGITS.get(len(low)) if _HEX.fullmatch(low) else None
    return Digest(algorithm, low, size) if algorithm else None


def safe_name(name: str, root: str = "") -> str | None:
    """Return a list's file name relative to the checkpoint, or None if it cannot mean a file inside it.

    Args:
        name: As the list spells it.
        root: Name of the directory; a list made one level up begins every name with it.
    """
    if not name or "\0" in name or name.startswith("/"):
        return None
    parts = PurePosixPath(name).parts
    if len(parts) > 1 and parts[0] == root:
        parts = parts[1:]
    return None if not parts or ".." in parts else "/".join(parts)


# The lists ------------------------------------------------------------------------------------------------


def release_list(key: str) -> HashList | None:
    """Return the published hashes of a release, if this package has them."""
    published = published_hashes(key)
    if published is None:
        return None
    return _from_json(published, f"the published list of {published['repo']}", published=True)


def find_lists(root: Path, names: Iterable[str], release: str | None) -> tuple[HashList, ...]:
    """Return every list that can be found for a checkpoint without asking anybody.

    Args:
        root: Real path of the directory.
        names: Relative paths of the checkpoint's files.
        release: Key of the release that its config describes, None for another model.
    """
    shipped = release_list(release) if release else None
    found = [shipped, _client_list(root), _blob_list(root, names), *_sum_lists(root)]
    return tuple(entry for entry in found if entry and (entry.files or entry.findings))


def read_list(path: str | os.PathLike[str], root: str) -> HashList:
    """Read the list that the user names: `sha256sum` text, or JSON with repo, revision and files.

    Args:
        path: The file.
        root: Name of the checkpoint directory.

    Raises:
        Refused: ``content.list-file``; the file cannot be read as a list.
    """
    name = printable(os.path.basename(os.fspath(path)) or os.fspath(path))
    try:
        raw = _bytes(path, name)
        if raw.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
            value, repeated = parse_json(raw, name, "content.list-file")
            result = _from_json(value, f"`{name}`")
            if repeated:
                problem = f"names `{printable(repeated[0])}` more than once"
                raise Refused(finding("content.list-file", name, problem))
        else:
            result = parse_sums(raw, name, root)
    except Dsv4Error as error:
        faults = (f for f in error.findings)
        raise Refused(
            [
                finding("content.list-file", name, f.problem, expected=f.expected, found=f.found)
                for f in faults
            ]
        ) from None
    if result.findings or not result.files:
        fault = result.findings[0] if result.findings else None
        problem = fault.problem if fault else "holds no hash"
        expected = "lines `HASH  NAME` as `sha256sum` writes them, or JSON with `files`"
        raise Refused(
            finding("content.list-file", name, problem, expected=expected, found=fault.found if fault else "")
        )
    return result


def _bytes(path: str | os.PathLike[str], name: str, limit: int = _MAX_LIST) -> bytes:
    fd, status = open_regular(path, name)
    try:
        if status.st_size > limit:
            problem = f"is too large for a list: {status.st_size:,} bytes"
            raise Dsv4Error(finding("content.list", name, problem))
        return read_start(fd, limit, name)
    finally:
        os.close(fd)


def _from_json(value: Any, source: str, *, published: bool = False) -> HashList:
    """Return the list that a parsed object ``{repo, revision, files: {name: {bytes, sha256}}}`` states."""
    files: dict[str, Digest] = {}
    bad: list[str] = []
    rows = value.get("files") if isinstance(value, dict) else None
    for name, row in rows.items() if isinstance(rows, dict) else ():
        size, text = (row.get("bytes"), row.get("sha256")) if isinstance(row, dict) else (None, None)
        digest = digest_of(text, size) if isinstance(text, str) else None
        relative = safe_name(name)
        sized = size is None or (type(size) is int and size >= 0)
        if digest and relative and sized and digest.algorithm == SHA256:
            files[relative] = digest
        else:
            bad.append(name)
    labels = {key: value.get(key) for key in ("repo", "revision")} if isinstance(value, dict) else {}
    repo, revision = (
        text if isinstance(text, str) and text else None for text in labels.values() or (None, None)
    )
    return HashList(source, files, repo, revision, published, _bad_lines(source, bad, len(bad) + len(files)))


def _bad_lines(source: str, bad: list[str], total: int) -> tuple[Finding, ...]:
    if not bad:
        return ()
    problem = f"{len(bad):,} of {total:,} entries are no hash of a file of this directory"
    return (finding("content.list", source.strip("`"), problem, found=f"`{printable(bad[0], 80)}`"),)


def parse_sums(raw: bytes, name: str, root: str = "") -> HashList:
    """Parse the text of `sha256sum`, GNU or BSD style; never fails.

    Args:
        raw: The text.
        name: Relative path of the list; a list that is one bare hash belongs to the file it is named after.
        root: Name of the checkpoint directory.
    """
    files: dict[str, Digest] = {}
    bad: list[str] = []
    total = 0
    folder, slash, base = name.rpartition("/")
    for line in _lines(raw):
        total += 1
        digest, shown = _sum_line(line, base)
        relative = safe_name(folder + slash + shown, root) if shown else None
        if digest is None or relative is None or files.get(relative, digest) != digest:
            bad.append(line)
        else:
            files[relative] = digest
    return HashList(f"`{name}`", files, findings=_bad_lines(name, bad, total))


def _lines(raw: bytes) -> Iterator[str]:
    text = raw.decode("utf-8-sig", "surrogateescape") if raw else ""
    for line in text.split("\n"):
        line = line.rstrip("\r")
        if line.strip() and not line.startswith("#"):
            yield line


def _sum_line(line: str, base: str) -> tuple[Digest | None, str]:
    """Return the digest and the file name of a line, or (None, "")."""
    if match := _GNU.fullmatch(line):
        escaped, value, name = match.groups()
    elif match := _BSD.fullmatch(line):
        escaped, name, value = match.groups()
    elif _BARE.fullmatch(line.strip()):
        escaped, value, name = "", line.strip(), re.sub(r"\.sha256(?:sums?)?$", "", base, flags=re.IGNORECASE)
    else:
        return None, ""
    if escaped:
        name = re.sub(r"\\[\\nr]", lambda m: _UNESCAPED[m[0]], name)
    return digest_of(value), name


def _sum_lists(root: Path) -> Iterator[HashList]:
    with os.scandir(root) as scan:
        names = sorted(entry.name for entry in scan if CHECKSUM_LIST.fullmatch(entry.name))
    for name in names:
        try:
            yield parse_sums(_bytes(root / name, name), name, root.name)
        except Dsv4Error as error:
            problem = f"cannot be read as a list: {error.findings[0].problem}"
            yield HashList(f"`{name}`", {}, findings=(finding("content.list", name, problem),))


# What the Hugging Face client leaves ----------------------------------------------------------------------


@dataclass
class _Left:
    """Entries of the client's own records while they are read."""

    files: dict[str, Digest] = field(default_factory=dict)
    commits: dict[str, str] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)


def _client_list(root: Path) -> HashList:
    """Read the ``.metadata`` files of `hf download --local-dir`: commit, etag, time stamp."""
    base = root / ".cache" / "huggingface" / "download"
    left = _Left()
    for folder, name in walk_names(base):
        if name.endswith(".metadata"):
            path = os.path.join(folder, name)
            _take_metadata(path, os.path.relpath(path, base).removesuffix(".metadata"), left)
    commits = set(left.commits.values())
    faults = _bad_lines("the download client's records", left.bad, len(left.bad) + len(left.files))
    return HashList(
        "the download client's records",
        left.files,
        revision=next(iter(commits)) if len(commits) == 1 else None,
        findings=(*faults, *_mixed(left.commits)),
    )


def _take_metadata(path: str, name: str, left: _Left) -> None:
    commit, digest = "", None
    with suppress(Dsv4Error):  # It counts as one that cannot be used.
        commit, digest = parse_metadata(_bytes(path, name, 4096))
    if digest is None or safe_name(name) is None:
        left.bad.append(f"{name}.metadata")
        return
    left.files[name], left.commits[name] = digest, commit


def parse_metadata(raw: bytes) -> tuple[str, Digest | None]:
    """Return the commit and the digest that one ``.metadata`` file records; (``""``, None) if none."""
    lines = raw.decode("ascii", "replace").split("\n")
    if len(lines) < 2 or not re.fullmatch(r"[0-9a-f]{40}", lines[0].strip()):
        return "", None
    return lines[0].strip(), digest_of(lines[1].strip().strip('"'))


def _mixed(commits: Mapping[str, str]) -> Iterator[Finding]:
    """Report weights, index and config that were fetched from more than one commit."""
    core = {
        n: c
        for n, c in commits.items()
        if n.endswith((".safetensors", ".safetensors.index.json", "config.json"))
    }
    groups: dict[str, list[str]] = {}
    for name, commit in core.items():
        groups.setdefault(commit, []).append(name)
    if len(groups) < 2:
        return
    (most, _), *others = sorted(groups.items(), key=lambda g: -len(g[1]))
    for commit, names in others:
        problem = f"{len(names):,} files were fetched from another commit than the rest"
        yield finding(
            "content.mixed-revisions", printable(names[0]), problem, expected=most[:12], found=commit[:12]
        )


def _blob_list(root: Path, names: Iterable[str]) -> HashList:
    """Take the names of cache blobs, which are hashes, from the links of a snapshot."""
    files: dict[str, Digest] = {}
    for name in names:
        if os.path.islink(root / name):
            target = Path(os.path.realpath(root / name))
            digest = digest_of(target.name) if target.parent.name == "blobs" else None
            if digest:
                files[name] = digest
    return HashList("the names of the cache blobs", files, _cache_repo(root), _snapshot(root))


def _cache_repo(root: Path) -> str | None:
    """Return the repository of a cache snapshot, from ``models--OWNER--NAME/snapshots/COMMIT``."""
    folder = root.parent.parent.name
    if root.parent.name != "snapshots" or not folder.startswith("models--"):
        return None
    return folder.removeprefix("models--").replace("--", "/", 1)


def _snapshot(root: Path) -> str | None:
    return root.name if root.parent.name == "snapshots" and re.fullmatch(r"[0-9a-f]{40}", root.name) else None
