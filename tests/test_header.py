"""The shard parser against an attack corpus, random bytes, and safetensors as an outside judge.

Every rejection stands beside its nearest legal neighbour, which must pass.
"""

from __future__ import annotations

import hashlib
import json
import os
import string
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv4convert.errors import EnvironmentFault, Refused
from dsv4convert.files import printable, read_whole
from dsv4convert.header import MAX_HEADER_BYTES, Shard, read_header
from tests.shardfile import BITS, header_of, row, write_raw, write_shard

NAME = "model-00001-of-00001.safetensors"


def entry(dtype: Any = "U8", shape: Any = (8,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def blob(header: Any, data: bytes = bytes(8), length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def parse(folder: Path, content: bytes) -> tuple[Shard | None, list[str]]:
    path = folder / NAME
    path.write_bytes(content)
    shard, findings = read_header(path, NAME)
    return shard, [f.code for f in findings]


GOOD = {"a": entry()}
TEXT = json.dumps(GOOD)
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 3500000000\n"
DEEP = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
TWO = {"a": entry(), "b": entry(offsets=(8, 16))}

# fault -> (hostile bytes, the one finding, nearest legal neighbour)
ATTACKS: dict[str, tuple[bytes, str, bytes]] = {
    "empty": (b"", "shard.truncated", blob({}, b"")),
    "seven-bytes": (bytes(7), "shard.truncated", blob({}, b"")),
    "length-only": ((64).to_bytes(8, "little"), "shard.truncated", blob({}, b"")),
    "all-zero": (bytes(4096), "shard.header", blob({}, b"")),
    "length-zero": (bytes(8) + b"{}", "shard.header", blob({}, b"")),
    "length-too-large": (blob(GOOD, length=MAX_HEADER_BYTES + 1), "shard.header", blob(GOOD)),
    "length-all-ones": (b"\xff" * 8 + b"{}", "shard.header", blob({}, b"")),
    "length-past-end": (blob(GOOD, length=1000), "shard.truncated", blob(GOOD)),
    "lfs-pointer": (LFS, "file.lfs-pointer", blob(GOOD)),
    "html": (b"<!DOCTYPE html><html><title>403</title></html>", "file.html-page", blob(GOOD)),
    "html-spaced": (b"\xef\xbb\xbf\n  <HTML><body>login", "file.html-page", blob(GOOD)),
    "xml": (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "file.html-page", blob(GOOD)),
    "plain-text": (b"Entry not found", "shard.header", blob(GOOD)),
    "not-utf8": (blob(b'{"\xff":1}'), "shard.header", blob({"ÿ": entry()})),
    "bom": (blob(b"\xef\xbb\xbf" + TEXT.encode()), "shard.header", blob(TEXT.encode())),
    "leading-space": (blob(b" " + TEXT.encode()), "shard.header", blob(TEXT.encode() + b" ")),
    "array": (blob([]), "shard.header", blob({}, b"")),
    "cut-json": (blob(TEXT.encode()[:-1]), "shard.header", blob(TEXT.encode())),
    "trailing-json": (blob(TEXT.encode() + b"{}"), "shard.header", blob(TEXT.encode() + b"  ")),
    "deep": (blob(DEEP), "shard.header", blob(GOOD)),
    "nan": (blob(TEXT.replace("[8]", "[NaN]").encode()), "shard.header", blob(GOOD)),
    "infinity": (blob(TEXT.replace("[8]", "[Infinity]").encode()), "shard.header", blob(GOOD)),
    "raw-control": (blob(b'{"a\n":' + json.dumps(entry()).encode() + b"}"), "shard.header", blob(GOOD)),
    "float-shape": (blob({"a": entry(shape=[8.0])}), "shard.header", blob({"a": entry(shape=[8])})),
    "bool-shape": (blob({"a": entry(shape=[True, 8])}), "shard.header", blob({"a": entry(shape=[1, 8])})),
    "negative-shape": (blob({"a": entry(shape=[-1, -8])}), "shard.header", blob({"a": entry(shape=[1, 8])})),
    "string-shape": (blob({"a": entry(shape="8")}), "shard.header", blob(GOOD)),
    "scalar-shape": (blob({"a": entry(shape=8)}), "shard.header", blob({"a": entry(shape=[8])})),
    "huge-digits": (blob(TEXT.replace("[8]", "[" + "9" * 5000 + "]").encode()), "shard.header", blob(GOOD)),
    "overflow": (
        blob({"a": entry(shape=[2**32, 2**32 + 1])}),
        "shard.offsets",
        blob({"a": entry(shape=[2, 4])}),
    ),
    "overflow-zero": (
        blob({"a": entry(shape=[2**40, 2**40, 0], offsets=[0, 0])}, b""),
        "shard.offsets",
        blob({"a": entry(shape=[2**20, 2**20, 0], offsets=[0, 0])}, b""),
    ),
    "one-offset": (blob({"a": entry(offsets=[8])}), "shard.header", blob(GOOD)),
    "float-offset": (blob({"a": entry(offsets=[0, 8.0])}), "shard.header", blob(GOOD)),
    "negative-offset": (blob({"a": entry(offsets=[-8, 0])}), "shard.header", blob(GOOD)),
    "missing-key": (blob({"a": {"dtype": "U8", "shape": [8]}}), "shard.header", blob(GOOD)),
    "extra-key": (blob({"a": {**entry(), "x": 1}}), "shard.header", blob(GOOD)),
    "entry-list": (blob({"a": ["U8", [8], [0, 8]]}), "shard.header", blob(GOOD)),
    "entry-null": (blob({"a": None}), "shard.header", blob({"__metadata__": None}, b"")),
    "dtype-number": (blob({"a": entry(dtype=8)}), "shard.header", blob(GOOD)),
    "dtype-list": (blob({"a": entry(dtype=["U8"])}), "shard.header", blob(GOOD)),
    "dtype-unknown": (blob({"a": entry("F8_E3M4")}), "shard.dtype", blob({"a": entry("F8_E4M3")})),
    "empty-name": (blob({"": entry()}), "shard.header", blob({" ": entry()})),
    "nul-name": (blob({"a\0": entry()}), "shard.header", blob({"a\\0": entry()})),
    "surrogate-name": (
        blob(b'{"\\ud800":' + TEXT[6:].encode()),
        "shard.header",
        blob({"\U0001f600": entry()}),
    ),
    "metadata-number": (
        blob({"__metadata__": {"x": 1}, **GOOD}),
        "shard.header",
        blob({"__metadata__": {"x": "1"}, **GOOD}),
    ),
    "metadata-list": (blob({"__metadata__": [], **GOOD}), "shard.header", blob({"__metadata__": {}, **GOOD})),
    "twice-tensor": (
        blob(f'{{"a":{json.dumps(entry())},"a":{json.dumps(entry())}}}'.encode()),
        "shard.duplicate-key",
        blob({"a": entry(), "A": entry(offsets=[8, 16])}, bytes(16)),
    ),
    "twice-tensor-escaped": (
        blob(f'{{"a":{json.dumps(entry())},"\\u0061":{json.dumps(entry())}}}'.encode()),
        "shard.duplicate-key",
        blob(
            f'{{"a":{json.dumps(entry())},"\\u0062":{json.dumps(entry(offsets=[8, 16]))}}}'.encode(),
            bytes(16),
        ),
    ),
    "twice-dtype": (
        blob(TEXT.replace('"dtype"', '"dtype": "I8", "dtype"').encode()),
        "shard.duplicate-key",
        blob(GOOD),
    ),
    "twice-metadata": (
        blob(b'{"__metadata__":{},"__metadata__":{},' + TEXT[1:].encode()),
        "shard.duplicate-key",
        blob(b'{"__metadata__":{},' + TEXT[1:].encode()),
    ),
    "twice-in-metadata": (
        blob(b'{"__metadata__":{"x":"1","x":"1"},' + TEXT[1:].encode()),
        "shard.duplicate-key",
        blob(b'{"__metadata__":{"x":"\\"","y":"1"},' + TEXT[1:].encode()),
    ),
    "gap": (
        blob({"a": entry(), "b": entry(offsets=(9, 17))}, bytes(17)),
        "shard.offsets",
        blob(TWO, bytes(16)),
    ),
    "gap-first": (blob({"a": entry(offsets=(1, 9))}, bytes(9)), "shard.offsets", blob(GOOD)),
    "overlap": (
        blob({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)),
        "shard.offsets",
        blob(TWO, bytes(16)),
    ),
    "same-range": (blob({"a": entry(), "b": entry()}), "shard.offsets", blob(TWO, bytes(16))),
    "backwards": (blob({"a": entry(offsets=(8, 0))}), "shard.offsets", blob(GOOD)),
    "backwards-zero": (
        blob({"a": entry(), "b": entry(shape=[0], offsets=(8, 7))}),
        "shard.offsets",
        blob({"a": entry(), "b": entry(shape=[0], offsets=(8, 8))}),
    ),
    "wrong-size": (blob({"a": entry("F32")}), "shard.offsets", blob({"a": entry("F32", shape=(2,))})),
    "half-byte": (
        blob({"a": entry("F4", (3,), (0, 2))}, bytes(2)),
        "shard.offsets",
        blob({"a": entry("F4", (4,), (0, 2))}, bytes(2)),
    ),
    "offset-past-2^63": (
        blob({"a": entry(shape=[2**70], offsets=[0, 2**70])}),
        "shard.offsets",
        blob({"b": entry(offsets=[8, 16]), "a": entry()}, bytes(16)),
    ),
    "data-short": (blob(GOOD, bytes(7)), "shard.truncated", blob(GOOD)),
    "data-absent": (blob(GOOD, b""), "shard.truncated", blob(GOOD)),
    "data-long": (blob(GOOD, bytes(9)), "shard.trailing-bytes", blob(GOOD)),
}


@pytest.mark.parametrize("fault", ATTACKS)
def test_header_attack_gives_exactly_one_finding_and_its_legal_neighbour_none(
    fault: str, tmp_path: Path
) -> None:
    hostile, code, legal = ATTACKS[fault]
    assert parse(tmp_path, hostile)[1] == [code]
    shard, codes = parse(tmp_path, legal)
    assert codes == [] and shard is not None


def test_unknown_dtype_out_of_bounds_reports_dtype_and_offsets(tmp_path: Path) -> None:
    hostile = blob({"a": entry("F9", offsets=[1 << 40, (1 << 40) + 8])})
    assert parse(tmp_path, hostile) == (None, ["shard.dtype", "shard.offsets"])


def test_unknown_dtype_of_many_tensors_gives_one_finding_that_names_them(tmp_path: Path) -> None:
    write_raw(
        tmp_path / NAME, {f"t{i}": entry("F9", offsets=(8 * i, 8 * i + 8)) for i in range(5)}, bytes(40)
    )
    shard, (found,) = read_header(tmp_path / NAME, NAME)
    assert shard is not None and len(shard.tensors) == 5
    assert found.problem == "unknown dtype `F9` of `t0`, `t1`, `t2`, …"


def test_truncated_shard_states_both_sizes_with_separators(tmp_path: Path) -> None:
    write_shard(tmp_path / NAME, [row("a", "U8", (5000,))])
    size = (tmp_path / NAME).stat().st_size
    os.truncate(tmp_path / NAME, size - 1)
    shard, (found,) = read_header(tmp_path / NAME, NAME)
    assert shard is not None and [t.name for t in shard.tensors] == ["a"]
    assert (found.where, found.expected, found.found) == (NAME, f"{size:,} bytes", f"{size - 1:,} bytes")


def test_overlap_names_both_tensors_and_the_offsets(tmp_path: Path) -> None:
    write_raw(tmp_path / NAME, {"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12))
    _, (found,) = read_header(tmp_path / NAME, NAME)
    assert (
        "`b` overlaps `a`" in found.problem and found.found == "[4, 12]" and found.expected == "a start of 8"
    )


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_regular_file_is_refused_without_blocking(make: Any, tmp_path: Path) -> None:
    make(tmp_path / NAME)
    shard, (found,) = read_header(tmp_path / NAME, NAME)
    assert shard is None and found.code == "file.not-regular"


def test_absent_and_forbidden_files_are_unreadable_not_corrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [f.code for f in read_header(tmp_path / NAME, NAME)[1]] == ["file.unreadable"]
    write_shard(tmp_path / NAME, [row("a")])

    def forbid(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", forbid)  # root ignores modes
    _, (found,) = read_header(tmp_path / NAME, NAME)
    assert (found.code, found.problem) == ("file.unreadable", "permission denied")


def test_a_file_is_read_whole_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for data in (b"", b"1234"):
        path.write_bytes(data)
        assert read_whole(path, "f", 4, "probe.picture") == data
    path.write_bytes(b"12345")
    with pytest.raises(Refused) as refused:
        read_whole(path, "f", 4, "probe.picture")
    (found,) = refused.value.findings
    assert (found.code, found.where, found.expected, found.found) == (
        "probe.picture",
        "f",
        "at most 4 bytes",
        "5 bytes",
    )
    for missing, code in ((tmp_path, "file.not-regular"), (tmp_path / "none", "file.unreadable")):
        with pytest.raises(EnvironmentFault, match=code):
            read_whole(missing, "f", 4, "probe.picture")


def test_sound_shard_returns_absolute_ranges_in_data_order(tmp_path: Path) -> None:
    rows = [row("b", "F32", (3,), 1), row("z", "U8", (0, 7)), row("a", "I8", (2, 2), 2), row("s", "I64", ())]
    write_shard(tmp_path / NAME, rows, {"format": "pt"})
    shard, findings = read_header(tmp_path / NAME, NAME)
    raw = (tmp_path / NAME).read_bytes()
    assert findings == () and shard is not None
    assert [(t.name, t.dtype, t.shape, raw[t.start : t.end]) for t in shard.tensors] == rows
    assert [t.nbytes for t in shard.tensors] == [12, 0, 4, 8] and {t.shard for t in shard.tensors} == {NAME}
    assert shard.metadata == {"format": "pt"} and shard.size == len(raw)
    assert shard.header_sha256 == hashlib.sha256(raw[8 : shard.data_start]).hexdigest()


def test_hostile_names_stay_printable(tmp_path: Path) -> None:
    write_raw(tmp_path / NAME, {"\x1b[31m\n" + "x" * 5000: entry("F9")}, bytes(8))
    _, (found,) = read_header(tmp_path / NAME, NAME)
    assert str(found).isprintable() and len(str(found)) < 500
    assert printable("a\udcff\tb") == "a\\udcff\\tb"


FUZZ = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(
    content=st.binary(max_size=200)
    | st.binary(max_size=200).map(lambda raw: blob(raw))
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    ).map(blob)
)
def test_any_bytes_give_findings_never_an_exception(content: bytes, tmp_path: Path) -> None:
    shard, codes = parse(tmp_path, content)
    assert codes or shard is not None


ROWS = st.lists(
    st.tuples(
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8),
        st.sampled_from(sorted(set(BITS) - {"F4"})),
        st.lists(st.integers(0, 4), max_size=3).map(tuple),
        st.integers(0, 255),
    ).map(lambda r: row(*r)),
    max_size=6,
    unique_by=lambda r: r[0],
).filter(lambda rows: all(r[0] != "__metadata__" for r in rows))


@FUZZ
@given(rows=ROWS, metadata=st.none() | st.dictionaries(st.text(string.printable), st.text(string.printable)))
def test_valid_header_round_trips_and_equals_what_safetensors_reads(
    rows: list[Any], metadata: dict[str, str] | None, tmp_path: Path
) -> None:
    write_shard(tmp_path / NAME, rows, metadata)
    shard, findings = read_header(tmp_path / NAME, NAME)
    raw = (tmp_path / NAME).read_bytes()
    assert findings == () and shard is not None and shard.metadata == (metadata or {})
    ours = {t.name: (t.dtype, list(t.shape), raw[t.start : t.end]) for t in shard.tensors}
    theirs = safetensors.deserialize(raw)
    assert ours == {n: (v["dtype"], list(v["shape"]), bytes(v["data"])) for n, v in theirs}
    assert ours == {n: (d, list(s), b) for n, d, s, b in rows}


def accepted(content: bytes) -> bool:
    try:
        safetensors.deserialize(content)
    except Exception:
        return False
    return True


BASE = {"__metadata__": {"format": "pt"}} | header_of(
    [row("a", "F32", (2, 3)), row("b", "I8", (4,)), row("c")]
)
BASE_BYTES = blob(BASE, bytes(24 + 4 + 16))


@FUZZ
@given(
    edits=st.lists(
        st.tuples(
            st.integers(0, len(BASE_BYTES) - 1),
            st.integers(0, 3),
            st.sampled_from(
                [b"", b"0", b"9", b"-", b".", b'"', b",", b"{", b"}", b"[", b"]", b" ", b"x", b"\xff"]
            ),
        ),
        min_size=1,
        max_size=2,
    )
)
def test_random_mutations_are_judged_as_safetensors_judges_them(
    edits: list[tuple[int, int, bytes]], tmp_path: Path
) -> None:
    content = BASE_BYTES
    for at, cut, put in edits:
        content = content[:at] + put + content[at + cut :]
    shard, codes = parse(tmp_path, content)
    if not accepted(content):
        assert codes
    elif codes:  # where we are stricter, on purpose: see the next test
        assert set(codes) <= {"shard.duplicate-key", "shard.header"} and shard is None


STRICTER = ["twice-tensor", "twice-tensor-escaped", "extra-key", "entry-list", "empty-name", "nul-name"]
STRICTER += ["leading-space", "twice-in-metadata"]


def test_documented_differences_from_safetensors_are_all_stricter() -> None:
    assert [f for f, (hostile, _, _) in ATTACKS.items() if accepted(hostile)] == sorted(
        STRICTER, key=list(ATTACKS).index
    )
    assert [f for f, (_, _, legal) in ATTACKS.items() if not accepted(legal)] == []
