"""`probe`: what three layouts of one model answer, and which layer a broken one names."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4convert import api
from dsv4convert.probe.agreement import Expectation, Kept, Owed, Pass, Row, expectation, relative_error
from dsv4convert.probe.forward import Step
from dsv4convert.probe.source import CheckpointSource
from dsv4convert.survey import survey
from kernels_ref.config import ModelConfig
from kernels_ref.decisions import Decisions
from kernels_ref.model import Model
from tests.probe.conftest import LONG, SHORT, Copy, change, flip, swap_nibbles


def tokens(probed: api.Probed) -> list[int]:
    return [step["token"] for step in probed.golden["steps"]]


def codes(probed: api.Probed) -> list[tuple[str, str]]:
    return [(f.code, f.where) for f in probed.findings]


@pytest.fixture(scope="module")
def compared(trio: dict[str, Path]) -> dict[str, api.Probed]:
    """Return layout -> a probe on the long prompt beside the official checkpoint."""
    official = trio["official"]
    return {k: api.probe(root, ids=LONG, tokens=3, reference=official) for k, root in trio.items()}


def test_mxfp4_is_bit_equal_to_its_source_and_says_the_same(compared: dict[str, api.Probed]) -> None:
    for layout in ("official", "mxfp4"):
        agreement = compared[layout].golden["agreement"]
        assert agreement["expectation"] == "equal" and agreement["logits"] == 0
        for row in agreement["layers"]:
            assert [*row.values()][1:6] == [0, 0, 0, 0, 1]
        assert agreement["equal_tokens"] == 3 and agreement["tokens"] == tokens(compared["mxfp4"])
        assert compared[layout].ok() and compared[layout].findings == ()
    assert compared["official"].golden["steps"] == compared["mxfp4"].golden["steps"]


def test_int8_is_within_its_limits_and_its_attention_is_bit_equal(compared: dict[str, api.Probed]) -> None:
    probed = compared["int8"]
    agreement = probed.golden["agreement"]
    assert probed.findings == () and agreement["expectation"] == "repacked" and agreement["limit"] == 0.05
    rows = agreement["layers"]
    assert [(row["attention"], row["shared"]) for row in rows] == [(0, 0)] * 5
    assert all(0 < row["routed"] < 5e-3 for row in rows)
    assert 0 < agreement["logits"] < 1e-3 and all(0 < row["streams"] < 1e-3 for row in rows)
    assert [row["picked"] is None for row in rows] == [True, True, False, True, False]
    assert tokens(probed) == tokens(compared["official"])


@pytest.mark.parametrize(("layout", "numerics", "limit"), [("int8", "sm80", 0.05), ("mxfp4", "bf16", 0.03)])
def test_rounding_arithmetic_stays_within_its_limit(
    trio: dict[str, Path], layout: str, numerics: str, limit: float
) -> None:
    probed = api.probe(trio[layout], ids=LONG, tokens=1, numerics=numerics, reference=trio["official"])
    agreement = probed.golden["agreement"]
    assert probed.ok() and (agreement["expectation"], agreement["limit"]) == ("rounded", limit)
    assert 1e-3 < agreement["logits"] < limit
    assert all(row["attention"] > 1e-3 for row in agreement["layers"])


def test_official_arithmetic_is_shown_and_not_judged(trio: dict[str, Path]) -> None:
    probed = api.probe(trio["official"], ids=SHORT, tokens=1, numerics="official", reference=trio["official"])
    agreement = probed.golden["agreement"]
    assert probed.ok() and agreement["limit"] is None and agreement["logits"] > 0.03


def test_tokens_are_those_of_the_reference_model_run_in_one_piece(trio: dict[str, Path]) -> None:
    """Each token again from the whole sequence before it: no layer is stepped, no state kept."""
    seen = survey(api.open(trio["int8"]))
    found = api.probe(trio["int8"], ids=SHORT, tokens=4, top=3)
    with CheckpointSource(seen) as source:
        model = Model(ModelConfig.from_dict(seen.checkpoint.config), source)
        sequence = list(SHORT)
        for step in found.golden["steps"]:
            logits = model(torch.tensor(sequence))[-1].double()
            order = logits.argsort(descending=True).tolist()
            assert step["token"] == order[0]
            assert [row["token"] for row in step["top"]] == order[:3]
            assert step["margin"] == pytest.approx(float(logits[order[0]] - logits[order[1]]), abs=1e-4)
            best = logits.softmax(0)[order[0]]
            assert math.exp(step["top"][0]["logprob"]) == pytest.approx(float(best), rel=1e-4)
            sequence.append(step["token"])


def test_an_answer_ends_with_the_end_token(copy: Copy) -> None:
    root = copy("mxfp4")
    config = json.loads((root / "config.json").read_bytes())
    first = tokens(api.probe(root, ids=SHORT, tokens=2))
    for ends, count in ((first[1], 2), ([first[0], 9], 1), (None, 2)):
        (root / "config.json").write_text(json.dumps(config | {"eos_token_id": ends}))
        assert tokens(api.probe(root, ids=SHORT, tokens=2)) == first[:count]


# ---- broken weights

LOW_BIT, HIGH_BYTE = (100, 0x01), (101, 0x08)


@pytest.mark.parametrize(
    ("layout", "tensor", "edit", "code", "where"),
    [
        ("mxfp4", "layers.3.attn.wkv.weight", flip(*HIGH_BYTE), "probe.differs", "layers.3.attn"),
        ("mxfp4", "layers.1.attn.wo_b.weight", flip(*LOW_BIT), "probe.differs", "layers.1.attn"),
        (
            "mxfp4",
            "layers.4.ffn.shared_experts.w2.weight",
            flip(*LOW_BIT),
            "probe.differs",
            "layers.4.ffn.shared_experts",
        ),
        ("mxfp4", "layers.2.ffn.experts.5.w3.weight", swap_nibbles, "probe.differs", "layers.2.ffn.experts"),
        ("mxfp4", "layers.2.ffn.experts.5.w3.scale", flip(3, 0x04), "probe.differs", "layers.2.ffn.experts"),
        ("mxfp4", "layers.4.attn.compressor.ape", flip(2, 0x10), "probe.differs", "layers.4.attn"),
        ("mxfp4", "layers.0.hc_ffn_base", flip(2 + 4 * 6, 0x10), "probe.differs", "layers.0.hc_ffn"),
        ("mxfp4", "embed.weight", flip(2 * 256 * 7 + 1, 0x01), "probe.differs", "embed"),
        ("mxfp4", "norm.weight", flip(8, 0x10), "probe.differs", "head"),
        ("int8", "layers.3.attn.wkv.weight", flip(*LOW_BIT), "probe.differs", "layers.3.attn"),
        ("int8", "layers.1.attn_norm.weight", flip(100, 0x40), "probe.differs", "layers.1.attn"),
        (
            "int8",
            "layers.2.ffn.experts.5.w1.weight_codes",
            swap_nibbles,
            "probe.error-limit",
            "layers.2.ffn.experts",
        ),
        (
            "int8",
            "layers.0.ffn.experts.2.w2.channel_scale",
            flip(3, 0x04),
            "probe.error-limit",
            "layers.0.ffn.experts",
        ),
        ("int8", "embed.weight", flip(2 * 256 * 7 + 1, 0x01), "probe.differs", "embed"),
    ],
)
def test_a_broken_weight_is_found_in_its_layer(
    trio: dict[str, Path],
    copy: Copy,
    layout: str,
    tensor: str,
    edit: Callable[[bytearray], None],
    code: str,
    where: str,
) -> None:
    root = copy(layout)
    change(root, tensor, edit)
    probed = api.probe(root, ids=LONG[:40], tokens=1, reference=trio["official"])
    assert codes(probed) == [(code, where)]
    assert not probed.ok()


def test_a_row_that_the_prompt_does_not_use_is_not_seen(trio: dict[str, Path], copy: Copy) -> None:
    root = copy("mxfp4")
    assert 3 not in LONG[:40]
    change(root, "embed.weight", flip(2 * 256 * 3 + 1, 0x01))
    assert api.probe(root, ids=LONG[:40], tokens=1, reference=trio["official"]).ok()


def test_a_layer_that_lost_nothing_must_be_bit_equal(trio: dict[str, Path], copy: Copy) -> None:
    """A manifest that says so of a layer that rounded is caught, by a difference far below the limit."""
    root = copy("int8")
    manifest = json.loads((root / "dsv4convert.json").read_bytes())
    for part in manifest["losses"]["layers.4"].values():
        part["codes_changed"] = 0
    (root / "dsv4convert.json").write_text(json.dumps(manifest))
    probed = api.probe(root, ids=LONG[:40], tokens=1, reference=trio["official"])
    assert codes(probed) == [("probe.differs", "layers.4.ffn.experts")]


@pytest.mark.parametrize("damage", [None, {}, {"layers.4": None}, {"layers.4": {"w1": 3}}, 7])
def test_a_manifest_without_usable_losses_claims_nothing(
    trio: dict[str, Path], copy: Copy, damage: Any
) -> None:
    root = copy("int8")
    manifest = json.loads((root / "dsv4convert.json").read_bytes()) | {"losses": damage}
    (root / "dsv4convert.json").write_text(json.dumps(manifest))
    probed = api.probe(root, ids=SHORT, tokens=1, reference=trio["official"])
    assert probed.ok() and codes(probed) == [("probe.no-losses", "dsv4convert.json")]


def test_an_activation_that_is_no_number_names_its_sublayer(copy: Copy, trio: dict[str, Path]) -> None:
    root = copy("int8")
    change(root, "layers.3.ffn_norm.weight", lambda data: data.__setitem__(slice(4, 6), b"\xc0\x7f"))
    for arguments, where in (
        ({}, "layers.3.ffn.experts"),
        ({"reference": trio["official"]}, "layers.3.ffn.experts"),
    ):
        with pytest.raises(api.Dsv4Error) as caught:
            api.probe(root, ids=SHORT, tokens=1, **arguments)
        assert [(f.code, f.where) for f in caught.value.findings] == [("probe.non-finite", where)]
    with pytest.raises(api.Dsv4Error) as caught:
        api.probe(trio["int8"], ids=SHORT, tokens=1, reference=root)
    assert caught.value.findings[0].where == "reference layers.3.ffn.experts"


# ---- the parts


SAME = Kept(0, 0, 0, 0, 0)


def judged(expected: str, rows: list[Row], **numbers: Any) -> list[tuple[str, str]]:
    limit = numbers.pop("limit", 0.0 if expected == "equal" else 0.05)
    kept = numbers.pop("kept", SAME)
    owed = Owed(Expectation(expected), limit, frozenset({"layers.7"}))
    found = Pass(rows, [SAME] * (len(rows) - 1) + [kept], **numbers).findings(owed)
    return [(f.code, f.where) for f in found]


@pytest.mark.parametrize(
    ("expected", "row", "numbers", "wanted"),
    [
        ("equal", (0, 0, 0, 0), {}, []),
        ("equal", (0, 0, 0, 1e-9), {"logits": 1}, [("probe.differs", "layers.1.hc_ffn")]),
        ("equal", (0, 1e-9, 1, 1), {}, [("probe.differs", "layers.1.ffn.experts")]),
        ("equal", (0, 0, 0, 0), {"embedded": 1e-9, "logits": 1}, [("probe.differs", "embed")]),
        ("equal", (0, 0, 0, 0), {"logits": 1e-9}, [("probe.differs", "head")]),
        ("repacked", (0, 0.05, 0, 1), {"logits": 0.05}, []),
        ("repacked", (0, 0.0501, 0, 0), {"logits": 1}, [("probe.error-limit", "layers.1.ffn.experts")]),
        ("repacked", (1e-9, 1, 1, 0), {}, [("probe.differs", "layers.1.attn")]),
        ("repacked", (0, 0.01, 1e-9, 0), {}, [("probe.differs", "layers.1.ffn.shared_experts")]),
        ("repacked", (0, 0, 0, 0), {"logits": 0.0501}, [("probe.error-limit", "head")]),
        ("repacked", (0, 0, 0, 1), {"head": 1e-9}, [("probe.differs", "head")]),
        ("repacked", (0, 0, 0, 1), {"embedded": 1e-9, "logits": 1}, [("probe.differs", "embed")]),
        ("repacked", (1, 0, 0, 0), {"kept": Kept(1e-9, 0, 0, 0, 0)}, [("probe.differs", "layers.1.hc_attn")]),
        (
            "repacked",
            (0, 0, 1, 0),
            {"kept": Kept(0, 0.1, 0, 0, 0)},
            [("probe.differs", "layers.1.attn.indexer")],
        ),
        ("repacked", (0, 0, 1, 0), {"kept": Kept(0, 0, 1e-9, 0, 0)}, [("probe.differs", "layers.1.hc_ffn")]),
        ("repacked", (0, 1, 0, 0), {"kept": Kept(0, 0, 0, 0.1, 1)}, [("probe.differs", "layers.1.ffn.gate")]),
        (
            "repacked",
            (0, 1, 0, 0),
            {"kept": Kept(0, 0, 0, 0, 1e-9)},
            [("probe.differs", "layers.1.ffn.gate")],
        ),
        ("rounded", (1, 1, 1, 1), {"logits": 0.05}, []),
        ("rounded", (0, 0, 0, 0), {"logits": 0.0501}, [("probe.error-limit", "head")]),
        ("rounded", (0, 0, 0, 0), {"logits": 9, "limit": None}, []),
    ],
)
def test_what_is_a_finding(
    expected: str, row: tuple[float, ...], numbers: dict[str, Any], wanted: list[tuple[str, str]]
) -> None:
    rows = [Row("layers.0", 0, 0, 0, 0, 1, None), Row("layers.1", *row, 1, None)]
    assert judged(expected, rows, **numbers) == wanted


def test_every_broken_layer_of_a_repack_is_named() -> None:
    rows = [Row(f"layers.{i}", 0, e, 0, e, 1, None) for i, e in ((2, 0.3), (5, 0.2), (6, 0.01), (7, 0.01))]
    assert [where for _, where in judged("repacked", rows)] == [f"layers.{i}.ffn.experts" for i in (2, 5, 7)]


@pytest.mark.parametrize(
    ("numerics", "layout", "reference", "wanted"),
    [
        ("exact", "mxfp4", "official", ("equal", 0)),
        ("exact", "int8", "int8", ("equal", 0)),
        ("exact", "int8", "mxfp4", ("repacked", 0.05)),
        ("exact", "official", "int8", ("repacked", 0.05)),
        ("bf16", "mxfp4", "official", ("rounded", 0.03)),
        ("bf16", "int8", "official", ("rounded", 0.05)),
        ("sm80", "int8", "int8", ("rounded", 0.05)),
        ("official", "int8", "official", ("rounded", None)),
    ],
)
def test_what_two_layouts_owe_each_other(
    numerics: str, layout: str, reference: str, wanted: tuple[str, float | None]
) -> None:
    owed, limit = expectation(numerics, api.Layout(layout), api.Layout(reference))
    assert (owed.value, limit) == wanted


def test_relative_error_is_zero_for_equal_tensors_only() -> None:
    x = torch.tensor([3.0, 4.0])
    assert relative_error(x, x.bfloat16()) == 0
    assert relative_error(torch.tensor([3.0, 4.5]), x) == pytest.approx(0.1)
    assert relative_error(x, torch.zeros(2)) > 1
    assert relative_error(torch.tensor([1e-45, 1.0]), torch.tensor([0.0, 1.0])) > 0
    assert relative_error(torch.tensor([-0.0]), torch.tensor([0.0])) == 0


def test_a_step_takes_the_smallest_of_equally_probable_ids() -> None:
    step = Step.of(torch.tensor([1.0, 3.0, 3.0, 2.5]), 3)
    assert (step.token, step.margin) == (1, 0)
    assert [token for token, _ in step.top] == [1, 2, 3]
    total = 1 + 2 * math.exp(2) + math.exp(1.5)
    assert step.top[0][1] == pytest.approx(math.log(math.exp(2) / total))
    assert Step.of(torch.tensor([1.0, 3.5]), 9).margin == 2.5


def test_replay_follows_and_notes_what_it_would_have_done() -> None:
    recorded = Decisions()
    following = Decisions.replay(recorded.chosen)
    name = "layers.0.ffn.gate"
    recorded.settle(name, 0, torch.tensor([[1, 2], [3, 4]]))
    assert following.settle(name, 0, torch.tensor([[2, 1], [3, 5]])).tolist() == [[1, 2], [3, 4]]
    assert following.own[name].tolist() == [[2, 1], [3, 5]]
    with pytest.raises(ValueError, match="to be replayed"):
        following.settle(name, 2, torch.tensor([[0, 1]]))
    with pytest.raises(ValueError, match="cannot go on at 5"):
        recorded.settle(name, 5, torch.tensor([[0, 1]]))
