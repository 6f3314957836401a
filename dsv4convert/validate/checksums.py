"""A download against the hashes that are known of it: which files are right, wrong, or of unknown worth.

Every list counts: a file is verified when all lists that name it agree with it, and a file about which lists
disagree is a finding of its own. What has to be fetched again ends in one command.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from dsv4convert.checkpoint import CONFIG, INDEX, Checkpoint
from dsv4convert.errors import Finding, finding
from dsv4convert.files import listed, printable
from dsv4convert.survey import Survey
from dsv4convert.validate.hashing import Hashed, Memory, Progress, Target, hash_files
from dsv4convert.validate.hashlists import Digest, HashList, release_list
from dsv4convert.validate.report import Report

#: So many shards of the right size and the wrong hash, and none right, are another upload, not damage.
_ANOTHER_UPLOAD: Final = 3
_DAMAGE: Final = frozenset(
    f"value.{fault}" for fault in ("hole", "e4m3-nan", "scale-nan", "non-finite", "expert-id")
)
_AGAIN = "fetch this file again; the last lines give the command"

Entries = Mapping[str, Sequence[tuple[HashList, Digest]]]


def checkpoint_files(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the relative paths of all files that belong to a checkpoint, there or not."""
    shards = {*checkpoint.weight_map.values(), *checkpoint.shards}
    return (CONFIG, INDEX, *sorted(shards), *checkpoint.side_files)


@dataclass(frozen=True, slots=True)
class _Judged:
    """What became of one comparison."""

    findings: tuple[Finding, ...]
    verified: frozenset[str]
    wrong: frozenset[str]


def _entries(lists: Iterable[HashList]) -> dict[str, list[tuple[HashList, Digest]]]:
    found: dict[str, list[tuple[HashList, Digest]]] = {}
    for entry in lists:
        for name, digest in entry.files.items():
            found.setdefault(name, []).append((entry, digest))
    return found


def _size(root: Path, name: str) -> int | None:
    """Return the size of a file that may be read: a regular one inside `root`, or a cache blob."""
    path = root / name
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(root) and real.parent.name != "blobs":
        return None
    return path.stat().st_size if path.is_file() else None


def check_sizes(report: Report, seen: Survey, lists: Sequence[HashList]) -> Report:
    """Compare names and sizes of lists with what is there, without reading a file."""
    root = seen.checkpoint.root
    reported = {f.where for f in report.findings}
    findings: list[Finding] = [f for entry in lists for f in entry.findings]
    absent: list[str] = []
    for name, entries in _entries(lists).items():
        size = _size(root, name)
        if name in reported:
            continue
        if size is None:
            absent.append(name)
            continue
        for source, digest in entries:
            if digest.size is not None and digest.size != size:
                findings.append(_wrong_size(name, source, digest.size, size))
                break
    if absent:
        problem = f"{len(absent):,} files that the lists name are not there: {listed(absent, len(absent))}"
        findings.append(finding("content.absent", printable(absent[0]), problem))
    return _with(report, findings)


def _wrong_size(name: str, source: HashList, expected: int, found: int) -> Finding:
    problem = f"has another size than {source.source} says"
    shown = f"{expected:,} bytes", f"{found:,} bytes"
    return finding("content.hash", printable(name), problem, expected=shown[0], found=shown[1], hint=_AGAIN)


def _with(report: Report, findings: Iterable[Finding]) -> Report:
    merged = sorted((*findings, *report.findings), key=lambda f: f.severity)
    return replace(report, findings=tuple(merged))


def check_contents(
    report: Report,
    seen: Survey,
    lists: Sequence[HashList],
    *,
    jobs: int,
    memory: Memory | None,
    progress: Progress,
) -> Report:
    """Hash every file that a list names and compare.

    Args:
        report: The report so far; files it has an error about are not hashed.
        seen: What the checkpoint is.
        lists: The hashes to compare with; `check_sizes` has looked at them.
        jobs: Threads.
        memory: Hashes of earlier runs.
        progress: Called with numbers of bytes.

    Raises:
        EnvironmentFault: reading failed.
    """
    root = seen.checkpoint.root
    entries = _entries(lists)
    reported = {f.where for f in report.findings if f.severity == "error"}
    targets = [
        Target(name, root / name, size, frozenset(d.algorithm for _, d in wanted))
        for name, wanted in entries.items()
        if name not in reported and (size := _size(root, name)) is not None
    ]
    hashed: dict[str, Hashed] = {}
    hash_files(targets, jobs, memory, lambda h: hashed.__setitem__(h.name, h), progress)
    foreign = _foreign_lists(lists, hashed)
    judged = _judge(_entries(entry for entry in lists if entry not in foreign), hashed)
    extra = [_other_release(entry, seen) for entry in foreign]
    return _result(_with(report, (*judged.findings, *extra)), seen, lists, foreign, hashed, judged)


def _foreign_lists(lists: Iterable[HashList], hashed: Mapping[str, Hashed]) -> list[HashList]:
    """Return published lists that describe another upload of the same tensors."""
    foreign = []
    for entry in lists:
        shards = [n for n in entry.files if n.endswith(".safetensors") and n in hashed]
        agree = sum(_fits(hashed[n], entry.files[n]) for n in shards)
        if entry.published and not agree and len(shards) >= _ANOTHER_UPLOAD:
            foreign.append(entry)
    return foreign


def _fits(hashed: Hashed, digest: Digest) -> bool:
    return hashed.digests[digest.algorithm] == digest.value


def _other_release(entry: HashList, seen: Survey) -> Finding:
    twins = seen.release.twins if seen.release else ()
    known = f" (`{twins[0]}` is one such repository)" if twins else ""
    problem = (
        f"all shards have the sizes of {entry.source} and none has its hash: "
        f"another upload of the same tensors, or other weights in the same layout{known}"
    )
    expected = f"commit {(entry.revision or 'unknown')[:12]}"
    return finding("content.other-release", seen.checkpoint.root.name, problem, expected=expected)


def _judge(entries: Entries, hashed: Mapping[str, Hashed]) -> _Judged:
    findings: list[Finding] = []
    verified: set[str] = set()
    for name, file in hashed.items():
        wanted = entries.get(name, ())
        right = [(s, d) for s, d in wanted if _fits(file, d)]
        wrong = [(s, d) for s, d in wanted if not _fits(file, d)]
        if wrong and right:
            findings.append(_disagreement(name, right[0], wrong[0]))
        elif wrong:
            findings.append(_wrong_hash(name, file, *wrong[0]))
        elif right:
            verified.add(name)
    findings.sort(key=lambda f: f.where)
    wrong_names = {name for name in hashed if name in entries} - verified
    return _Judged(tuple(findings), frozenset(verified), frozenset(wrong_names))


def _wrong_hash(name: str, file: Hashed, source: HashList, digest: Digest) -> Finding:
    problem = f"its bytes do not have the hash of {source.source}"
    found = f"{file.digests[digest.algorithm][:12]}…"
    expected = f"{digest.algorithm} {digest.value[:12]}…"
    return finding("content.hash", printable(name), problem, expected=expected, found=found, hint=_AGAIN)


def _disagreement(name: str, right: tuple[HashList, Digest], wrong: tuple[HashList, Digest]) -> Finding:
    problem = f"is the file of {right[0].source}, not that of {wrong[0].source}"
    expected = f"{wrong[1].algorithm} {wrong[1].value[:12]}…{_commit(wrong[0])}"
    found = f"{right[1].algorithm} {right[1].value[:12]}…{_commit(right[0])}"
    return finding("content.sources", printable(name), problem, expected=expected, found=found)


def _commit(entry: HashList) -> str:
    return f" of commit {entry.revision[:12]}" if entry.revision else ""


def _result(
    report: Report,
    seen: Survey,
    lists: Sequence[HashList],
    foreign: Sequence[HashList],
    hashed: Mapping[str, Hashed],
    judged: _Judged,
) -> Report:
    shards = seen.checkpoint.shards
    compared = {n for n in hashed if n in judged.verified or n in judged.wrong}
    share = _share({n: s.size for n, s in shards.items()}, judged.verified)
    left = [
        n
        for n in checkpoint_files(seen.checkpoint)
        if n not in compared and (seen.checkpoint.root / n).exists()
    ]
    checked, not_checked = [*report.checked], []
    if compared:
        sources = [e.source for e in lists if e not in foreign and compared & e.files.keys()]
        checked.append(_checked_line(compared, shards, hashed, sources))
    if left:
        not_checked.append(f"contents: no hash is known of {len(left):,} files: {listed(left, len(left))}")
    findings = []
    if shards and not foreign and not compared & shards.keys():
        problem = "no hash list names a shard of this checkpoint"
        if (seen.checkpoint.root / ".msc").exists():
            problem += "; ModelScope's `.msc` is a pickle and is never opened"
        findings.append(finding("content.unverified", seen.checkpoint.root.name, problem))
    report = replace(report, checked=tuple(checked), not_checked=tuple(not_checked), contents=share)
    return _with(report, findings)


def _share(sizes: Mapping[str, int], verified: frozenset[str]) -> float | None:
    """Return the percentage of shard bytes that are verified, rounded down; None for none."""
    done = sum(size for name, size in sizes.items() if name in verified)
    total = sum(sizes.values())
    return done * 10_000 // total / 100 if done else None


def _checked_line(
    compared: set[str], shards: Mapping[str, object], hashed: Mapping[str, Hashed], sources: Sequence[str]
) -> str:
    weights = len(compared & shards.keys())
    reused = sum(hashed[n].reused for n in compared)
    again = f" ({reused:,} of them hashed by an earlier run and unchanged since)" if reused else ""
    files = f"{weights:,} shards and {len(compared) - weights:,} other files{again}"
    return f"contents: {files} against {' and '.join(sources)}"


# What to fetch again --------------------------------------------------------------------------------------


def with_fetch_list(
    report: Report, seen: Survey, lists: Sequence[HashList], repo: str | None = None
) -> Report:
    """Add the files that must be fetched again, and the command that does it.

    Args:
        report: The finished report.
        seen: What the checkpoint is.
        lists: Hash lists in use; they may name the repository and the commit.
        repo: ``REPO`` or ``REPO@COMMIT`` that the user gave.
    """
    named = _entries(lists).keys()
    ours = {*checkpoint_files(seen.checkpoint), *named}
    errors = [f for f in report.findings if f.severity == "error"]
    faulty = (ours & {f.where for f in errors}) | _damaged_shards(errors, seen.checkpoint)
    if INDEX in faulty:  # What only a wrong index names may not exist.
        faulty = {n for n in faulty if n in named or (seen.checkpoint.root / n).exists()} | {INDEX}
    again = tuple(sorted(faulty))
    if not again:
        return report
    foreign = any(f.code == "content.other-release" for f in report.findings)
    in_force = [e for e in lists if not (foreign and e.published)]
    command = _fetch_command(seen, origin(seen, in_force, repo), again)
    return replace(report, fetch_again=again, fetch_command=command)


def _damaged_shards(errors: Iterable[Finding], checkpoint: Checkpoint) -> set[str]:
    """Return the shards of tensors whose values no release can hold."""
    damaged = (f.where for f in errors if f.code in _DAMAGE)
    return {checkpoint.tensors[name].shard for name in damaged if name in checkpoint.tensors}


def origin(seen: Survey, lists: Sequence[HashList], asked: str | None) -> tuple[str, str]:
    """Return the repository and the commit of a download; a word in capitals stands for what is not known.

    Args:
        seen: What the checkpoint is.
        lists: Hash lists in use; they may name both.
        asked: ``REPO`` or ``REPO@COMMIT`` that the user gave.
    """
    repo, _, commit = (asked or "").partition("@")
    known = next((e for e in lists if e.repo and e.revision), None)
    shipped = release_list(seen.release.key) if seen.release else None
    if not repo and known:
        repo, commit = known.repo or "", known.revision or ""
    commit = commit or seen.checkpoint.revision or next((e.revision for e in lists if e.revision), None) or ""
    if not repo and seen.release and not (seen.release.twins and commit):
        # With a twin, only the commit could tell the two apart, and it is no commit that is known here.
        repo = seen.release.repo
        commit = commit or (shipped.revision if shipped and shipped.revision else "")
    return repo or "REPO", commit or "COMMIT"


def _fetch_command(seen: Survey, origin: tuple[str, str], names: Iterable[str]) -> str:
    root = seen.checkpoint.root
    place = ["--local-dir", os.fspath(root)]
    if root.parent.name == "snapshots":
        place = ["--cache-dir", os.fspath(root.parent.parent.parent)]
    # Without --force-download the client keeps a file whose record says that it is the right one.
    words = ["hf", "download", origin[0], "--revision", origin[1], *place, "--force-download", *names]
    return printable(" ".join(shlex.quote(w) for w in words), 1 << 20)


def expected_bytes(seen: Survey, lists: Sequence[HashList]) -> Iterator[int]:
    """Yield the sizes of the files that `check_contents` will hash."""
    for name in _entries(lists):
        yield _size(seen.checkpoint.root, name) or 0
