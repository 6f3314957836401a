"""Checks of checkpoints: structure from headers alone, contents on request.

`verify` is the entry for programs; it chooses the checks by what it is given. Modules that read tensor data
are loaded only when data is to be read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from decimal import Decimal
from typing import TYPE_CHECKING

from dsv4convert.checkpoint import Checkpoint, open_checkpoint
from dsv4convert.errors import Finding, errors_of, finding
from dsv4convert.journal import DIRECTORY, MANIFEST
from dsv4convert.names import Layout
from dsv4convert.plan import plan
from dsv4convert.survey import Survey, detect_layout, survey
from dsv4convert.validate.provenance import MANIFEST_NEVER_CHECKED, MANIFEST_NOT_CHECKED, read_manifest
from dsv4convert.validate.report import Report, shown_percent
from dsv4convert.validate.structure import check_converted, check_original

if TYPE_CHECKING:
    from dsv4convert.validate.hashlists import HashList

Path = str | os.PathLike[str]
Progress = Callable[[int], None]


def verify(
    path: Path,
    *,
    reference: Path | None = None,
    read_data: float | None = None,
    tp: int | None = None,
    checksums: Path | None = None,
    jobs: int = 1,
    progress: Progress | None = None,
) -> Report:
    """Check a checkpoint of any layout.

    Args:
        path: An official or a converted checkpoint.
        reference: The source of a converted checkpoint.
        read_data: Percent of the weights whose bytes are read; None reads headers only.
        tp: Tensor-parallel size that a converted checkpoint must allow.
        checksums: Hashes to compare an official checkpoint with: ``auto`` or a file.
        jobs: Worker processes for reading data, threads for hashing.
        progress: Called with numbers of bytes as they are compared.

    Raises:
        Refused: there is no such directory, or no such list of hashes.
        EnvironmentFault: reading failed.
    """
    checkpoint = open_checkpoint(path)
    # The first shards of an unfinished conversion may hold no dense weight that would tell its layout.
    begun = (checkpoint.root / DIRECTORY).is_dir()
    if not begun and reference is None and detect_layout(checkpoint.tensors) is Layout.OFFICIAL:
        options = Contents(checksums=checksums, read_data=read_data, jobs=jobs)
        return verify_original(checkpoint, options, progress=progress)
    return verify_converted(
        checkpoint, reference=reference, read_data=read_data, tp=tp, jobs=jobs, progress=progress
    )


@dataclass(frozen=True, slots=True)
class Contents:
    """How far the contents of an official checkpoint are to be checked.

    Attributes:
        checksums: ``auto`` for the hashes that can be found, a file with hashes, None for neither.
        online: Ask the Hub for names, sizes and hashes.
        repo: Repository to ask and to fetch from, ``REPO`` or ``REPO@COMMIT``; None to work it out.
        read_data: Percent of the weights whose values are looked at.
        jobs: Threads for hashing, worker processes for values.
        remember: Use and keep hashes of earlier runs.
    """

    checksums: Path | None = None
    online: bool = False
    repo: str | None = None
    read_data: float | None = None
    jobs: int = 1
    remember: bool = True


def verify_original(
    checkpoint: Checkpoint,
    options: Contents,
    *,
    on_total: Progress | None = None,
    progress: Progress | None = None,
) -> Report:
    """Check an official checkpoint: structure always, contents as far as `options` say.

    Args:
        checkpoint: The download.
        options: What to do beside the structure.
        on_total: Called once with the number of bytes that will be read, if any.
        progress: Called with numbers of bytes read.

    Raises:
        Refused: a list of hashes, or a commit on the Hub, is not what was asked for.
        EnvironmentFault: reading failed, or the Hub cannot be asked.
    """
    from dsv4convert.validate.checksums import check_contents, check_sizes, expected_bytes, with_fetch_list

    seen = survey(checkpoint)
    report = check_original(checkpoint, seen)
    lists = _hash_lists(seen, options)
    if lists:
        report = check_sizes(report, seen, lists)
    reading = options.read_data is not None and not errors_of(report.findings)
    if on_total:
        hashing = sum(expected_bytes(seen, lists)) if options.checksums else 0
        values = report.facts["data_bytes"] * (options.read_data or 0) / 100 if reading else 0
        on_total(hashing + int(values))
    if options.checksums:
        from dsv4convert.validate.hashing import Memory

        memory = Memory(checkpoint.root) if options.remember else None
        act = progress or _ignore
        report = check_contents(report, seen, lists, jobs=options.jobs, memory=memory, progress=act)
    if options.read_data is not None:
        report = _with_values(report, seen, options, reading, progress or _ignore)
    return with_fetch_list(report, seen, lists, options.repo)


def _hash_lists(seen: Survey, options: Contents) -> tuple[HashList, ...]:
    from dsv4convert.validate.checksums import checkpoint_files, origin
    from dsv4convert.validate.hashlists import find_lists, read_list

    checkpoint = seen.checkpoint
    lists: tuple[HashList, ...] = ()
    if options.checksums == "auto":
        key = seen.release.key if seen.release else None
        lists = find_lists(checkpoint.root, checkpoint_files(checkpoint), key)
    elif options.checksums is not None:
        lists = (read_list(options.checksums, checkpoint.root.name),)
    if options.online:
        from dsv4convert.validate.online import hub_list

        lists = (*lists, hub_list(*origin(seen, lists, options.repo)))
    return lists


def _with_values(
    report: Report, seen: Survey, options: Contents, possible: bool, progress: Progress
) -> Report:
    """Add what the values of the weights show."""
    percent = options.read_data or 0
    if not possible:
        return replace(report, not_checked=(*report.not_checked, "values: there are errors to mend first"))
    from dsv4convert.validate.values import check_values

    found = check_values(seen, percent, options.jobs, progress)
    done = f"values: codes, scales, holes and numbers of {_share(percent).rstrip(',')}, {found.read:,} bytes"
    rest = () if percent >= 100 else (f"values: the other {_other(percent)} of the weights",)
    return replace(
        report,
        findings=_merged(tuple(found.findings), report),
        facts={**report.facts, "scales": found.facts()},
        checked=(*report.checked, done),
        not_checked=(*report.not_checked, *rest),
    )


def verify_converted(
    checkpoint: Checkpoint,
    *,
    reference: Path | None = None,
    read_data: float | None = None,
    tp: int | None = None,
    jobs: int = 1,
    progress: Progress | None = None,
) -> Report:
    """Check a converted checkpoint; see `verify` for the arguments."""
    report = check_converted(checkpoint, tp)
    if errors_of(report.findings) or (reference is None and read_data is None):
        skipped = ("data: there are structural errors",) if read_data is not None and report.findings else ()
        return replace(report, not_checked=(*report.not_checked, *skipped))
    began = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    if reference is not None:
        report = _with_reference(report, checkpoint, reference, read_data, jobs, progress or _ignore)
    else:
        report = _with_hashes(report, checkpoint, read_data or 0, jobs, progress or _ignore)
    return (
        report if report.contents is None else replace(report, facts={**report.facts, "contents_at": began})
    )


def _ignore(count: int) -> None:
    return


def _with_reference(
    report: Report,
    checkpoint: Checkpoint,
    reference: Path,
    percent: float | None,
    jobs: int,
    progress: Progress,
) -> Report:
    from dsv4convert.validate.content import check_reference, check_source

    source = open_checkpoint(reference)
    seen = survey(source)
    faults = errors_of(seen.findings)
    if faults:
        return replace(report, findings=(*faults, *report.findings))
    planned = plan(seen, detect_layout(checkpoint.tensors))
    findings = check_source(planned, source, checkpoint, read_manifest(checkpoint.root)[0])
    done = [*report.checked, "reference: its shard headers are those this checkpoint was made from"]
    left = [MANIFEST_NEVER_CHECKED if line == MANIFEST_NOT_CHECKED else line for line in report.not_checked]
    compared = None
    if percent is not None and not findings:
        compared = percent
        findings = check_reference(planned, source, checkpoint, percent, jobs, progress)
        done.append(f"contents: {_share(percent)} recomputed from the reference")
        rest = [] if percent >= 100 else [f"contents: the other {_other(percent)} of the weights"]
        left = [*rest, *(line for line in left if line == MANIFEST_NEVER_CHECKED)]
    merged = _merged(findings, report)
    return replace(report, findings=merged, checked=tuple(done), not_checked=tuple(left), contents=compared)


def _with_hashes(
    report: Report, checkpoint: Checkpoint, percent: float, jobs: int, progress: Progress
) -> Report:
    from dsv4convert.validate.content import check_hashes

    manifest, _ = read_manifest(checkpoint.root)
    if manifest is None:
        problem = "tensor data was to be compared, but without a manifest there is nothing to compare it with"
        fault = finding("content.unverified", MANIFEST, problem, hint="pass `--reference SRC`")
        report = replace(report, findings=_merged((replace(fault, severity="error"),), report))
        nothing = "contents: without a manifest there is nothing to compare with; pass `--reference`"
        return replace(report, not_checked=(nothing,))
    findings = check_hashes(checkpoint, manifest, percent, jobs, progress)
    done = (*report.checked, f"contents: {_share(percent)} against the hashes of the manifest")
    rest = () if percent >= 100 else (f"contents: the other {_other(percent)} of the tensors",)
    left = (*rest, "whether the conversion was right: pass `--reference`", MANIFEST_NOT_CHECKED)
    merged = _merged(findings, report)
    return replace(report, findings=merged, checked=done, not_checked=left, contents=percent)


def _share(percent: float) -> str:
    return (
        "all tensors"
        if percent >= 100
        else f"{shown_percent(percent)} of the weights, at least one of every kind,"
    )


def _other(percent: float) -> str:
    # In decimal: `100 - 99.9` as floats is less than 0.1, and would be rounded down.
    return shown_percent(float(100 - Decimal(repr(percent))))


def _merged(findings: tuple[Finding, ...], report: Report) -> tuple[Finding, ...]:
    return tuple(sorted((*findings, *report.findings), key=lambda f: f.severity))
