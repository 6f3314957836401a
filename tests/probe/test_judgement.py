"""What a comparison finds beside sublayers: choices, mixing, head, further tokens, the draft."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsv4convert import api
from dsv4convert.cli.probe import _agreement_lines
from tests.probe.conftest import LONG, SHORT, Copy, change, flip
from tests.reference import fit_draft, tiny

Edit = Callable[[bytearray], object]
MIDDLE = LONG[:40]


def codes(probed: api.Probed) -> list[tuple[str, str]]:
    return [(f.code, f.where) for f in probed.findings]


def tokens(probed: api.Probed) -> list[int]:
    return [step["token"] for step in probed.golden["steps"]]


def clear(data: bytearray) -> None:
    data[:] = bytes(len(data))


def turn(data: bytearray) -> None:
    """Shift rows of eight bytes by one, so that every value stays one that occurs."""
    data[:] = data[8:] + data[:8]


def reverse_floats(data: bytearray) -> None:
    data[:] = b"".join(data[i : i + 4] for i in range(len(data) - 4, -1, -4))


# ---- what no repack touches


@pytest.mark.parametrize(
    ("tensor", "edit", "where"),
    [
        ("layers.2.attn.indexer.wq_b.weight", clear, "layers.2.attn.indexer"),
        ("layers.4.attn.indexer.compressor.wkv.weight", clear, "layers.4.attn.indexer"),
        ("layers.4.ffn.gate.bias", flip(3, 0x41), "layers.4.ffn.gate"),
        ("layers.4.ffn.gate.weight", flip(1, 0x02), "layers.4.ffn.gate"),
        ("layers.0.ffn.gate.tid2eid", turn, "layers.0.ffn.gate"),
        ("layers.4.hc_ffn_base", flip(2 + 4 * 6, 0x10), "layers.4.hc_ffn"),
        ("layers.0.hc_ffn_base", flip(1, 0x10), "layers.0.hc_ffn"),
        ("layers.1.hc_ffn_fn", flip(1, 0x10), "layers.1.hc_ffn"),
        ("layers.4.hc_ffn_scale", flip(4 * 2 + 1, 0x10), "layers.4.hc_ffn"),
        ("layers.3.hc_attn_base", flip(2 + 4 * 6, 0x10), "layers.3.hc_attn"),
        ("hc_head_base", reverse_floats, "head"),
        ("hc_head_fn", reverse_floats, "head"),
        ("hc_head_scale", flip(1, 0x10), "head"),
        ("head.weight", flip(0, 0x01), "head"),
    ],
)
def test_what_no_repack_touches_is_bit_equal_beside_repacked_experts(
    trio: dict[str, Path], copy: Copy, tensor: str, edit: Edit, where: str
) -> None:
    """Too little to pass a limit, or hidden by replayed choices."""
    root = copy("int8")
    change(root, tensor, edit)
    ids = LONG if "indexer" in tensor else MIDDLE
    probed = api.probe(root, ids=ids, tokens=1, reference=trio["official"])
    assert codes(probed) == [("probe.differs", where)]


def test_experts_of_tokens_that_do_not_occur_are_not_seen(trio: dict[str, Path], copy: Copy) -> None:
    root = copy("int8")
    assert 3 not in MIDDLE
    row = api.open(root).tensors["layers.0.ffn.gate.tid2eid"].shape[1] * 8
    change(root, "layers.0.ffn.gate.tid2eid", flip(row * 3, 0x01))
    assert api.probe(root, ids=MIDDLE, tokens=1, reference=trio["official"]).findings == ()


# ---- further tokens


@pytest.mark.parametrize(
    ("layout", "numerics", "tensor", "code", "part"),
    [
        ("mxfp4", "exact", "embed.weight", "probe.differs", "embed"),
        ("int8", "exact", "embed.weight", "probe.differs", "embed"),
        ("int8", "exact", "layers.0.ffn.gate.tid2eid", "probe.differs", "layers.0.ffn.gate"),
        ("mxfp4", "bf16", "embed.weight", "probe.error-limit", "head"),
    ],
)
def test_a_row_that_only_a_further_token_uses_is_found_at_that_token(
    trio: dict[str, Path], copy: Copy, layout: str, numerics: str, tensor: str, code: str, part: str
) -> None:
    options: dict[str, Any] = {"ids": SHORT, "numerics": numerics, "reference": trio["official"]}
    healthy = api.probe(trio[layout], tokens=3, **options)
    said = tokens(healthy)
    assert healthy.findings == () and said[0] not in SHORT
    root = copy(layout)
    info = api.open(root).tensors[tensor]
    row = info.nbytes // info.shape[0]

    def damage(data: bytearray) -> None:
        end = row * (said[0] + 1)
        data[end - row : end] = data[end : end + row]

    change(root, tensor, damage)
    probed = api.probe(root, tokens=3, **options)
    (found,) = probed.findings
    assert (found.code, found.where) == (code, "token 2")
    assert found.problem.startswith(f"`{part}` ")
    assert api.probe(root, tokens=1, **options).findings == ()


@pytest.mark.parametrize(("equal", "tail"), [(3, ""), (2, "; the reference went another way after token 2")])
def test_the_page_says_where_the_reference_went_another_way(equal: int, tail: str) -> None:
    agreement: dict[str, Any] = {
        "reference": {"name": "x", "layout": "official"},
        "limit": 0.05,
        "logits": 0.0,
        "tokens": [1, 2, 3],
        "equal_tokens": equal,
        "layers": [],
    }
    assert f"  tokens     {equal} of 3 equal to the reference's{tail}" in list(_agreement_lines(agreement))


# ---- config and manifest


@pytest.mark.parametrize("ends", [{}, [[1]], "1", True, [1, None], 1.0])
def test_an_end_token_that_is_no_id_is_a_fault_of_the_config(copy: Copy, ends: Any) -> None:
    root = copy("mxfp4")
    config = json.loads((root / "config.json").read_bytes())
    (root / "config.json").write_text(json.dumps(config | {"eos_token_id": ends}))
    with pytest.raises(api.Dsv4Error) as caught:
        api.probe(root, ids=SHORT, tokens=1)
    assert [(f.code, f.where) for f in caught.value.findings] == [("config.field", "eos_token_id")]


@pytest.mark.parametrize("text", ["{}", "nonsense", None])
def test_a_manifest_that_cannot_be_read_is_a_warning(
    trio: dict[str, Path], copy: Copy, text: str | None
) -> None:
    root = copy("int8")
    path = root / "dsv4convert.json"
    path.unlink() if text is None else path.write_text(text)
    for one, other in ((root, trio["official"]), (trio["official"], root)):
        probed = api.probe(one, ids=SHORT, tokens=1, reference=other)
        assert probed.ok() and codes(probed) == [("probe.no-losses", "dsv4convert.json")]
    assert api.probe(root, ids=SHORT, tokens=1, reference=root).findings == ()


# ---- the draft


def test_a_draft_that_the_end_of_the_answer_hides_is_a_warning(copy: Copy) -> None:
    root = copy("mxfp4")
    config = json.loads((root / "config.json").read_bytes())
    first = tokens(api.probe(root, ids=SHORT, tokens=1))
    (root / "config.json").write_text(json.dumps(config | {"eos_token_id": first}))
    probed = api.probe(root, ids=SHORT, tokens=6, draft=True)
    assert probed.ok() and codes(probed) == [("probe.draft-ended", "mtp")]
    assert probed.golden["draft"] is None


def draft_beside(root: Path, reference: Path, numerics: str = "exact") -> tuple[float, list[tuple[str, str]]]:
    ids = tiny.prompt(fit_draft.PROMPT).tolist()
    probed = api.probe(root, ids=ids, tokens=8, draft=True, reference=reference, numerics=numerics)
    return probed.golden["draft"]["reference_error"], codes(probed)


@pytest.mark.parametrize(
    ("layout", "numerics", "limit"),
    [("int8", "exact", 1e-9), ("mxfp4", "bf16", 0.02), ("int8", "sm80", 0.03)],
)
def test_a_healthy_draft_is_well_within_its_limit(
    fitted: dict[str, Path], layout: str, numerics: str, limit: float
) -> None:
    error, found = draft_beside(fitted[layout], fitted["official"], numerics)
    assert error < limit and found == []
    # The repack of these drafts loses nothing.
    assert (error > 0) == (numerics != "exact")


@pytest.mark.parametrize(
    ("layout", "numerics", "pattern", "edit", "code"),
    [
        ("int8", "exact", "mtp.0.main_proj.weight", clear, "probe.differs"),
        ("int8", "exact", "mtp.2.attn.wo_b.weight", flip(0, 0x01), "probe.differs"),
        ("int8", "exact", "mtp.1.ffn.gate.bias", flip(3, 0x41), "probe.differs"),
        ("mxfp4", "exact", "mtp.1.ffn.gate.bias", flip(3, 0x41), "probe.differs"),
        ("mxfp4", "bf16", "mtp.0.main_proj.weight", clear, "probe.error-limit"),
        ("int8", "exact", "mtp.2.ffn.experts.*.w2.channel_scale", None, "probe.error-limit"),
    ],
)
def test_a_damaged_draft_is_an_error_beside_any_reference(
    fitted: dict[str, Path],
    tmp_path: Path,
    layout: str,
    numerics: str,
    pattern: str,
    edit: Edit | None,
    code: str,
) -> None:
    root = Path(shutil.copytree(fitted[layout], tmp_path / "own"))

    def enlarge(data: bytearray) -> None:
        """Multiply every power of two by 16."""
        for place in range(3, len(data), 4):
            data[place] += 2

    before, _, after = pattern.partition("*")
    for name in [n for n in api.open(root).tensors if n.startswith(before) and n.endswith(after)]:
        change(root, name, edit or enlarge)
    _, found = draft_beside(root, fitted["official"], numerics)
    assert found == [(code, "mtp")]
