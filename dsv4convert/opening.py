"""One pass over a checkpoint directory: config, index, shard headers, and whether they agree.

`Opening` is the state of one `open_checkpoint` call. It never stops at the first problem, and what follows
from a missing or broken shard is not reported again.

Source: Hugging Face ``model.safetensors.index.json``.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dsv4convert.errors import Dsv4Error, EnvironmentFault, errors_of, finding
from dsv4convert.files import check_disguise, listed, open_regular, parse_json, printable, read_start
from dsv4convert.header import Shard, ShardReader, TensorInfo, read_header
from dsv4convert.listing import CONFIG, INDEX, SUFFIX, Listing

_MAX_JSON = {CONFIG: 16 << 20, INDEX: 256 << 20}
_NUMBERED = re.compile(r"(.*?)(\d{5,})-of-(\d{5,})\.safetensors")
_FEW = 3  # up to here findings of one kind in one shard stay apart
_CHUNK = 1 << 20
_COMPARE_LIMIT = 1 << 30  # bytes of duplicate tensors that are compared before the reader loses patience


@dataclass
class Opening(Listing):
    """State of one `open_checkpoint` call; methods run in the order in which it calls them."""

    gone: Mapping[str, Shard] = field(default_factory=dict)  # shards that were deleted on purpose
    indexed: bool = False  # the index gave a usable weight_map
    excused: set[str] = field(default_factory=set)  # tensors whose index entry was refused
    total_size: int | None = None
    shards: dict[str, Shard] = field(default_factory=dict)
    tensors: dict[str, TensorInfo] = field(default_factory=dict)

    # config.json and the index.

    def _load_json(self, name: str, code: str) -> tuple[Any, bytes]:
        """Return a parsed top-level JSON object and its bytes, or (None, b"") after reporting why not."""
        if self.link_fault(name):
            return None, b""
        try:
            fd, status = open_regular(self.root / name, name)
            try:
                raw = read_start(fd, _MAX_JSON[name] + 1, name)
            finally:
                os.close(fd)
            check_disguise(raw[:256], name)
            if not raw.strip(b"\0") or status.st_size > _MAX_JSON[name]:
                what = "is too large" if status.st_size > _MAX_JSON[name] else "is empty or only zero bytes"
                raise Dsv4Error(finding(code, name, what, found=f"{status.st_size:,} bytes"))
            value, repeated = parse_json(raw, name, code)
        except Dsv4Error as fault:
            self.findings += fault.findings
            return None, b""
        if not isinstance(value, dict):
            self.add(code, name, "is not a JSON object", found=type(value).__name__)
            return None, b""
        if repeated:
            self.add("index.duplicate-key", name, f"repeats the key {listed(repeated, len(repeated))}")
        return value, raw

    def load_config(self) -> tuple[dict[str, Any], bytes]:
        """Return ``config.json`` parsed and raw."""
        if not self.files[CONFIG]:
            self.add("config.missing", CONFIG, "there is no `config.json`")
            return {}, b""
        value, raw = self._load_json(CONFIG, "config.not-json")
        return value or {}, raw

    def load_index(self) -> None:
        """Fill `weight_map` and `total_size`."""
        if self.files[INDEX]:
            value, _ = self._load_json(INDEX, "index.not-json")
            if value is not None:
                self._take_index(value)
        elif self.files["shard"] == ["model.safetensors"]:
            self.add("dir.single-file", "model.safetensors", "is one unindexed file, not an official release")
        elif self.files["shard"]:
            self.add("index.missing", INDEX, f"there is no index for {len(self.files['shard'])} shards")
        if not self.files["shard"] and not self.weight_map:
            pickles = self.files["pickle"]
            only = f", only pickle files: {listed(pickles, len(pickles))}" if pickles else ""
            self.add("dir.no-weights", self.root.name, f"holds no safetensors shard{only}")

    def _take_index(self, index: dict[str, Any]) -> None:
        """Check the entries of the index one by one; keep the good ones."""
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            problem = "`weight_map` is empty" if weight_map == {} else "has no `weight_map` object"
            self.add("index.not-json", INDEX, problem)
            return
        self.indexed = True
        bad: dict[str, list[str]] = {}
        good: set[str] = set()
        for tensor, shard in weight_map.items():
            if type(shard) is str and (shard in good or _is_plain_name(shard)):
                good.add(shard)
                self.weight_map[tensor] = shard
            else:
                bad.setdefault(repr(shard), []).append(tensor)
        for shown, tensors in bad.items():
            self.excused.update(tensors)
            problem = f"bad shard name for {listed(tensors, len(tensors))}"
            self.add("index.bad-shard-name", INDEX, problem, expected=_GOOD_NAME, found=printable(shown))
        metadata = index.get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        if type(total) is int:
            self.total_size = total
        elif total is not None:
            self.add(
                "index.total-size", INDEX, "`total_size` is not an integer", found=printable(repr(total))
            )

    # Shards.

    def read_shards(self) -> None:
        """Read the headers of the shards that count; report missing ones and wrong numbering."""
        present = set(self.files["shard"])
        carried = Counter(self.weight_map.values())
        wanted = sorted(carried if self.indexed else present)
        if not self.excused:  # refused entries leave gaps of their own
            self._check_numbering(wanted)
        for name in wanted:
            if name not in present and name in self.gone:
                self.shards[name] = self.gone[name]
            elif name not in present:
                problem = f"missing shard; the index puts {carried[name]:,} tensors into it"
                self.add("shard.missing", name, problem)
            elif not self.link_fault(name):
                read, findings = read_header(self.root / name, name)
                self.findings += findings
                if read is not None:
                    self.shards[name] = read
        if self.indexed and not self.excused:
            self.files["stray"] = sorted([*self.files["stray"], *(set(self.files["shard"]) - carried.keys())])

    def _check_numbering(self, names: list[str]) -> None:
        """Check that numbered names count from 1 to N; without an index a gap is a missing shard."""
        series: dict[str, dict[int, set[int]]] = {}
        for match in filter(None, map(_NUMBERED.fullmatch, names)):
            prefix, number, total = match[1], int(match[2]), int(match[3])
            series.setdefault(prefix, {}).setdefault(total, set()).add(number)
        for prefix, totals in series.items():
            total, numbers = next(iter(totals.items()))
            where = f"{prefix}*-of-*{SUFFIX}"
            expected = f"numbers 1 to {total:,}, each once"
            outside = [n for n in sorted(numbers) if not 1 <= n <= total]
            if len(totals) > 1:
                found = ", ".join(f"{len(n):,} of {t:,}" for t, n in sorted(totals.items()))
                self.add(
                    "shard.numbering", where, "shard names disagree on the number of shards", found=found
                )
            elif outside:
                found = ", ".join(map(str, outside[:3]))
                self.add(
                    "shard.numbering", where, "shard number out of range", expected=expected, found=found
                )
            elif len(numbers) < total:
                self._report_gap(prefix, numbers, total)

    def _report_gap(self, prefix: str, numbers: set[int], total: int) -> None:
        """Report the names that a numbering from 1 to `total` lacks."""
        absent = (f"{prefix}{n:05d}-of-{total:05d}{SUFFIX}" for n in range(1, total + 1) if n not in numbers)
        count = total - len(numbers)
        first = [name for name, _ in zip(absent, range(_FEW), strict=False)]
        if not self.indexed:
            problem = (
                f"missing shard; the names count to {total:,} and lack {count:,}: {listed(first, count)}"
            )
            self.add("shard.missing", first[0], problem)
            return
        problem = f"the index names no tensor of {count:,} of {total:,} shards: {listed(first, count)}"
        self.add("shard.numbering", INDEX, problem)
        # Such a shard, if it lies here, is explained; it is not a stray as well.
        explained = re.compile(re.escape(prefix) + rf"\d+-of-{total:05d}\.safetensors")
        named = set(self.weight_map.values())
        self.files["shard"] = [n for n in self.files["shard"] if n in named or not explained.fullmatch(n)]

    # Index against headers.

    def check_tensors(self) -> None:
        """Compare every (tensor, shard) pair of the index with the headers."""
        twice: dict[str, list[TensorInfo]] = {}
        for shard in self.shards.values():
            for tensor in shard.tensors:
                first = self.tensors.setdefault(tensor.name, tensor)
                if first is not tensor:
                    twice.setdefault(tensor.name, [first]).append(tensor)
        self._report_twice(twice)
        if self.indexed:
            self._report_misplaced(twice)
            self._report_unindexed(twice)

    def _report_misplaced(self, twice: Mapping[str, list[TensorInfo]]) -> None:
        """Report index entries that the headers contradict."""
        ghosts: dict[str, list[str]] = {}
        wrong: dict[tuple[str, str], list[str]] = {}
        for name, shard in self.weight_map.items():
            tensor = self.tensors.get(name)
            if tensor is None:
                if shard in self.shards:
                    ghosts.setdefault(shard, []).append(name)
            elif tensor.shard != shard:
                mapped = [t for t in twice.get(name, ()) if t.shard == shard]
                if mapped:
                    self.tensors[name] = mapped[0]
                elif name not in twice:
                    wrong.setdefault((shard, tensor.shard), []).append(name)
        for (shard, actual), names in wrong.items():
            what = f"held by `{printable(actual)}`, not by `{printable(shard)}` as the index says"
            self._add_grouped("index.wrong-shard", names, shard, what)
        for shard, names in ghosts.items():
            what = f"the index says `{printable(shard)}`, but no shard holds a tensor of this name"
            self._add_grouped("index.ghost-tensor", names, shard, what)

    def _report_unindexed(self, twice: Mapping[str, list[TensorInfo]]) -> None:
        """Report tensors that the index does not name."""
        if self.tensors.keys() <= self.weight_map.keys():
            return
        unindexed: dict[str, list[str]] = {}
        extra = self.tensors.keys() - self.weight_map.keys() - self.excused - twice.keys()
        for name in filter(extra.__contains__, self.tensors):
            unindexed.setdefault(self.tensors[name].shard, []).append(name)
        for shard, names in unindexed.items():
            what = f"held by `{printable(shard)}`, but not named by the index"
            self._add_grouped("index.unindexed-tensor", names, shard, what)

    def _report_twice(self, twice: Mapping[str, list[TensorInfo]]) -> None:
        """Report tensors of more than one shard, and whether their bytes agree."""
        groups: dict[tuple[str, ...], list[str]] = {}
        budget = _COMPARE_LIMIT
        with ShardReader(self.shards) as reader:
            for name, places in twice.items():
                verdict = "their dtype or shape differs"
                if len({(t.dtype, t.shape, t.nbytes) for t in places}) == 1:
                    cost = sum(t.nbytes for t in places)
                    verdict = _compare(reader, places) if cost <= budget else "their bytes were not compared"
                    budget -= cost if cost <= budget else 0
                groups.setdefault((verdict, *(t.shard for t in places)), []).append(name)
        for (verdict, *shards), names in groups.items():
            what = f"held by {' and '.join(f'`{printable(s)}`' for s in shards)}; {verdict}"
            self._add_grouped("tensor.twice", names, shards[-1], what)

    def _add_grouped(self, code: str, names: list[str], shard: str, what: str) -> None:
        """Report a few tensors one by one, many as one finding of their shard."""
        if len(names) > _FEW:
            self.add(code, shard, f"{len(names):,} tensors: {what}: {listed(names, len(names))}")
            return
        for name in names:
            self.add(code, name, what)

    def check_total_size(self) -> None:
        """Compare `total_size` with the tensors, unless another finding already explains a difference."""
        named = set(self.weight_map.values())
        explained = any(
            f.code.startswith(("index.", "tensor.", "shard.numbering")) for f in errors_of(self.findings)
        )
        if self.total_size is None or explained or named - self.shards.keys():
            return
        actual = sum(tensor.nbytes for tensor in self.tensors.values())
        if actual != self.total_size:
            expected, found = f"{actual:,} bytes", f"{self.total_size:,} bytes"
            self.add(
                "index.total-size",
                INDEX,
                "`total_size` is not the sum of the tensors",
                expected=expected,
                found=found,
            )


def _compare(reader: ShardReader, places: list[TensorInfo]) -> str:
    """Say whether tensors of equal size have equal bytes."""
    first, size = places[0], places[0].nbytes
    try:
        for other in places[1:]:
            for start in range(0, size, _CHUNK):
                parts = [bytearray(min(_CHUNK, size - start)) for _ in range(2)]
                for tensor, part in zip((first, other), parts, strict=True):
                    reader.pread_into(tensor, start, memoryview(part))
                if parts[0] != parts[1]:
                    return "their bytes differ"
    except EnvironmentFault:
        return "their bytes cannot be compared"
    return "their bytes agree"


_GOOD_NAME = f"the plain name of a `{SUFFIX}` file"


def _is_plain_name(shard: str) -> bool:
    """Return whether a shard name of the index can only mean a safetensors file of the directory."""
    if not shard.endswith(SUFFIX) or shard.startswith(".") or not shard.isprintable():
        return False
    return not re.search(r"[/\\]|^[A-Za-z]:", shard) and len(shard.encode()) <= 255
