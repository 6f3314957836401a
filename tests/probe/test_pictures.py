"""`probe --image`: what a checkpoint with a vision tower answers about pictures, and what is refused."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4convert import api
from dsv4convert.errors import EnvironmentFault, Refused
from dsv4convert.golden import read_golden
from dsv4convert.probe.pictures import StreamedTower, read_pictures
from dsv4convert.probe.prompt import Vocabulary
from dsv4convert.probe.source import CheckpointSource
from dsv4convert.survey import survey
from dsv4convert.vision.config import VisionConfig
from dsv4convert.vision.layout import expand
from dsv4convert.vision.tower import Tower
from dsv4convert.webreport import make_page
from kernels_ref.config import ModelConfig
from kernels_ref.model import Model
from tests.conftest import Ran
from tests.probe.conftest import SHORT, change, flip
from tests.reference import tiny
from tests.samples import read_json
from tests.test_schemas import require

Image = pytest.importorskip("PIL.Image")

Cli = Callable[..., Ran]
#: Stands for a picture in a tiny vocabulary.
PLACE = 262
MARK = "<｜deepseek_image｜>"


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return layout -> a checkpoint with a vision tower, all of one model; not to be changed."""
    root = tmp_path_factory.mktemp("vision")
    made = {"official": tiny.make(root, "plain", tiny.VISION_RELEASE)}
    for layout in ("mxfp4", "int8"):
        made[layout] = root / layout
        api.convert(made["official"], made[layout], experts=layout)
    return made


@pytest.fixture
def copy(vision: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """Return ``copy(layout)``, which gives a test a checkpoint of its own."""
    return lambda layout: Path(shutil.copytree(vision[layout], tmp_path / f"own-{layout}"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return name -> a picture file."""
    root = tmp_path_factory.mktemp("files")
    pictures = {
        "red": Image.new("RGB", (200, 150), (255, 0, 0)),
        "blue": Image.new("RGB", (200, 150), (0, 0, 255)),
        "noise": Image.effect_noise((560, 266), 80).convert("RGB"),
    }
    for name, picture in pictures.items():
        picture.save(root / f"{name}.png")
    return {name: root / f"{name}.png" for name in pictures}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def tokens(probed: api.Probed) -> list[int]:
    return [step["token"] for step in probed.golden["steps"]]


def codes(probed: api.Probed) -> list[tuple[str, str]]:
    return [(f.code, f.where) for f in probed.findings]


def refused(**question: Any) -> list[tuple[str, str]]:
    with pytest.raises((Refused, EnvironmentFault)) as caught:
        api.probe(**question)
    return [(f.code, f.where) for f in caught.value.findings]


# ---- answers


@pytest.mark.parametrize("layout", ["mxfp4", "int8"])
def test_pictures_are_compared_with_the_source(
    layout: str, sample: Callable[[str], Path], files: dict[str, Path], tmp_path: Path
) -> None:
    """Of a synthetic checkpoint, whose experts are wide enough that the repack has to round."""
    api.convert(sample("vision"), tmp_path / layout, experts=layout)
    question: dict[str, Any] = {"images": [files["red"], files["noise"]], "chat": True, "tokens": 2}
    probed = api.probe(tmp_path / layout, "Which?", reference=sample("vision"), **question)
    agreement = probed.golden["agreement"]
    assert probed.ok() and not probed.findings
    assert agreement["expectation"] == ("equal" if layout == "mxfp4" else "repacked")
    rows = agreement["layers"]
    assert all(row["attention"] == row["shared"] == 0 for row in rows)
    assert all((row["routed"] == 0) == (layout == "mxfp4") for row in rows)
    assert agreement["logits"] < 5e-3 and agreement["equal_tokens"] == 2
    assert len(probed.picture_seconds) == 2 and min(probed.picture_seconds) > 0


def whole_tower(source: CheckpointSource, numbers: VisionConfig) -> Tower:
    """Return the tower with all of its weights in memory, float32."""
    tower = Tower(numbers).requires_grad_(False)
    tower.load_state_dict({name: source.tensor(name).float() for name in tower.state_dict()})
    return tower


def test_tokens_are_those_of_model_and_tower_run_in_one_piece(
    vision: dict[str, Path], files: dict[str, Path]
) -> None:
    """Placeholder by hand, whole tower, each token again from the whole sequence before it."""
    root, ids = vision["int8"], [*SHORT, PLACE, 9, PLACE]
    found = api.probe(root, ids=ids, images=[files["noise"], files["red"]], tokens=3)
    seen = survey(api.open(root))
    numbers = VisionConfig.from_config(seen.checkpoint.config)
    assert numbers is not None
    pictures = read_pictures([files["noise"], files["red"]], numbers)
    done = expand(ids, pictures.grids, PLACE, 512)
    with CheckpointSource(seen) as source:
        tower = whole_tower(source, numbers)
        parts = zip(pictures.shown, done.blocks, strict=True)
        rows = torch.cat([tower.rows(p.patches, p.grid, b.lead) for p, b in parts])
        model = Model(ModelConfig.from_dict(seen.checkpoint.config), source)
        sequence = list(done.ids)
        for step in found.golden["steps"]:
            logits = model(torch.tensor(sequence), pictures=rows)[-1].double()
            top = logits.topk(2).values
            assert step["token"] == int(logits.argmax())
            assert step["margin"] == pytest.approx(float(top[0] - top[1]), abs=1e-4)
            sequence.append(step["token"])
    assert found.golden["prompt"]["ids"] == ids
    shown = found.golden["prompt"]["pictures"]
    assert [(p["start"], p["lead"], p["positions"]) for p in shown] == [(4, 3, 125), (130, 1, 99)]
    assert [(p["rows"], p["cols"], p["width"], p["height"]) for p in shown] == [
        (7, 14, 560, 266),
        (8, 11, 200, 150),
    ]


def test_a_streamed_tower_is_the_whole_one(vision: dict[str, Path], files: dict[str, Path]) -> None:
    seen = survey(api.open(vision["mxfp4"]))
    numbers = VisionConfig.from_config(seen.checkpoint.config)
    assert numbers is not None
    picture = read_pictures([files["noise"]], numbers).shown[0]
    calls: list[str] = []
    with CheckpointSource(seen) as source:
        streamed = StreamedTower(source, numbers, lambda name, _: calls.append(name))
        for lead in (0, 3, 3):
            rows = streamed.rows(picture, lead)
            assert torch.equal(rows, whole_tower(source, numbers).rows(picture.patches, picture.grid, lead))
    parts = ["vision.patch_embed", "vision.blocks.0", "vision.blocks.1", "vision.norm", "aligner"]
    assert calls == parts * 3
    kept = {n for n, p in streamed._tower.named_parameters() if not p.is_meta}
    assert kept == {f"image_{end}" for end in ("start", "pad", "newline", "end")}


def test_the_answer_depends_on_the_picture_and_on_its_place(
    vision: dict[str, Path], files: dict[str, Path]
) -> None:
    """The same picture at four alignments, twice each; another picture under the same text."""

    def logprobs(name: str, before: int) -> list[float]:
        ids = [*range(7, 7 + before), PLACE, 300, 301]
        probed = api.probe(vision["official"], ids=ids, images=[files[name]], tokens=1)
        picture = probed.golden["prompt"]["pictures"][0]
        assert picture["lead"] == 3 - before % 4 and picture["positions"] == 98 + picture["lead"]
        return [row["logprob"] for row in probed.golden["steps"][0]["top"]]

    answers = {before: logprobs("red", before) for before in range(4)}
    assert all(logprobs("red", before) == answers[before] for before in range(4))
    assert len({tuple(a) for a in answers.values()}) == 4
    assert logprobs("blue", 2) != answers[2]


def test_a_draft_looks_at_positions_of_pictures(vision: dict[str, Path], files: dict[str, Path]) -> None:
    probed = api.probe(
        vision["mxfp4"],
        "What?",
        images=[files["red"]],
        tokens=7,
        draft=True,
        reference=vision["official"],
    )
    assert probed.ok() and [code for code, _ in codes(probed)] in ([], ["probe.draft-idle"])
    assert probed.golden["draft"]["starts"] == 2 and probed.golden["draft"]["reference_error"] == 0


def _nan(data: bytearray) -> None:
    data[:] = b"\xff\x7f" * (len(data) // 2)


def test_a_text_is_answered_without_a_look_at_the_tower(
    vision: dict[str, Path], copy: Callable[[str], Path]
) -> None:
    """Tower, its vectors and the pictures' router bias are NaN: no text reads them."""
    expected = api.probe(vision["int8"], ids=SHORT, tokens=3).golden["steps"]
    root = copy("int8")
    names = [n for n in api.open(root).tensors if n.startswith(("vision.", "aligner.", "image_"))]
    names += [n for n in api.open(root).tensors if n.endswith("bias_vl")]
    assert len(names) == 2 * 8 + 3 + 4 + 4 + 8
    for name in names:
        change(root, name, _nan)
    assert api.probe(root, ids=SHORT, tokens=3).golden["steps"] == expected


# ---- broken weights


@pytest.mark.parametrize(
    ("layout", "tensor", "edit", "where"),
    [
        ("mxfp4", "vision.blocks.1.attn.wqkv.weight", flip(101, 0x01), "vision"),
        ("int8", "aligner.w2.bias", flip(31, 0x01), "vision"),
        ("int8", "image_pad", flip(1, 0x01), "vision"),
        ("mxfp4", "layers.0.ffn.gate.bias_vl", lambda data: _loud(data), "layers.0.ffn.experts"),
        ("int8", "layers.3.ffn.gate.bias_vl", lambda data: _loud(data), "layers.3.ffn.gate"),
    ],
)
def test_a_broken_weight_of_pictures_is_found(
    vision: dict[str, Path],
    files: dict[str, Path],
    copy: Callable[[str], Path],
    layout: str,
    tensor: str,
    edit: Callable[[bytearray], None],
    where: str,
) -> None:
    root = copy(layout)
    change(root, tensor, edit)
    question: dict[str, Any] = {"tokens": 1, "reference": vision["official"]}
    assert api.probe(root, ids=SHORT, **question).ok()
    probed = api.probe(root, ids=[5, PLACE, 6], images=[files["red"]], **question)
    assert codes(probed) == [("probe.differs", where)]


def _loud(data: bytearray) -> None:
    """Let a router bias favour its first expert."""
    data[:4] = b"\x00\x00\x80\x42"


def test_rounding_arithmetic_excuses_no_broken_tower(
    vision: dict[str, Path], files: dict[str, Path], copy: Callable[[str], Path]
) -> None:
    root, question = copy("int8"), {"numerics": "sm80", "reference": vision["official"], "tokens": 1}
    assert api.probe(root, ids=[5, PLACE, 6], images=[files["red"]], **question).ok()
    change(root, "vision.norm.weight", flip(0, 0x01))
    probed = api.probe(root, ids=[5, PLACE, 6], images=[files["red"]], **question)
    assert codes(probed) == [("probe.differs", "vision")]


def test_a_tower_that_gives_no_numbers_is_named(
    vision: dict[str, Path], files: dict[str, Path], copy: Callable[[str], Path]
) -> None:
    root = copy("int8")
    change(root, "vision.blocks.0.norm2.weight", _nan)
    with pytest.raises(api.Dsv4Error) as caught:
        api.probe(root, ids=[5, PLACE, 6], images=[files["red"]], tokens=1)
    assert [(f.code, f.where) for f in caught.value.findings] == [("probe.non-finite", "vision")]
    assert "the first at token 4" in str(caught.value.findings[0])


# ---- prompts


def test_pictures_come_before_a_text_that_names_no_place(vision: dict[str, Path]) -> None:
    words = Vocabulary(vision["official"])
    assert words.placeholder == PLACE
    assert words.decode([PLACE]) == MARK
    join, hi = words.encode("\n\n", chat=False), words.encode("Hi", chat=False)
    assert words.encode("Hi", chat=False, pictures=2) == (PLACE, *join, PLACE, *join, *hi)
    assert words.encode("Hi", chat=True, pictures=1) == (0, 2, PLACE, *join, *hi, 3, 5)
    assert words.encode("", chat=True, pictures=2) == (0, 2, PLACE, *join, PLACE, 3, 5)
    assert words.encode(f"Hi{MARK}", chat=False, pictures=2) == (*hi, PLACE)
    assert words.encode("<image>Hi</image>", chat=False, pictures=0)[-3:] != (PLACE,) * 3


def test_the_golden_file_says_where_pictures_stand(
    cli: Cli, vision: dict[str, Path], files: dict[str, Path]
) -> None:
    options = ("--tokens", 1, "--image", files["red"], "--image", files["noise"])
    ran = cli("probe", vision["int8"], "--prompt", f"A{MARK}B{MARK}", *options, "--json")
    assert ran.exit_code == 0
    require("probe", ran.json())
    golden = read_json(Path("int8-golden.json"))
    require("golden", golden)
    assert golden == read_golden(Path("int8-golden.json"))
    assert "[red.png] [noise.png] A" in make_page(vision["int8"], golden=Path("int8-golden.json")).html
    first, second = golden["prompt"]["pictures"]
    assert (first["file"], second["file"]) == ("red.png", "noise.png")
    assert first["sha256"] == hashlib.sha256(files["red"].read_bytes()).hexdigest()
    assert (first["start"], first["lead"], first["positions"]) == (1, 2, 100)
    assert (second["start"], second["lead"], second["positions"]) == (102, 1, 123)
    assert golden["prompt"]["ids"].count(PLACE) == 2 and len(golden["prompt"]["ids"]) == 4
    assert golden["prompt"]["text"] == f"A{MARK}B{MARK}"


def test_the_page_says_what_was_shown(cli: Cli, vision: dict[str, Path], files: dict[str, Path]) -> None:
    ran = cli("probe", vision["int8"], "--ids", f"7,{PLACE},8", "--tokens", 1, "--image", files["red"])
    lines = ran.out.splitlines()
    assert lines[1:3] == [
        "  prompt     3 tokens: 7, 262, 8",
        "  picture    red.png, 200 x 150: 100 positions from 1",
    ]
    assert any(line.startswith("             1 picture through the vision tower, ") for line in lines)


def test_an_older_golden_file_is_read_and_a_wrong_picture_is_not(
    cli: Cli, vision: dict[str, Path], files: dict[str, Path]
) -> None:
    assert (
        cli("probe", vision["int8"], "--prompt", "A", "--tokens", 1, "--image", files["red"]).exit_code == 0
    )
    path = Path("int8-golden.json")
    golden = read_golden(path)
    for damage in ({"sha256": None}, {"start": "1"}, {"lead": True}):
        broken = json.loads(json.dumps(golden))
        broken["prompt"]["pictures"][0] |= damage
        path.write_text(json.dumps(broken))
        with pytest.raises(Refused, match=r"prompt\.pictures"):
            read_golden(path)
    del golden["prompt"]["pictures"]
    path.write_text(json.dumps(golden))
    assert read_golden(path) == golden
    assert "[red.png]" not in make_page(vision["int8"], golden=path).html


# ---- refusals: each with its legal neighbour


def test_a_text_checkpoint_is_shown_no_picture(trio: dict[str, Path], files: dict[str, Path]) -> None:
    question: dict[str, Any] = {"path": trio["int8"], "ids": SHORT, "tokens": 1}
    assert refused(**question, images=[files["red"]]) == [("probe.no-vision", "int8")]
    assert api.probe(**question).ok()


@pytest.mark.parametrize(
    ("question", "count", "neighbour"),
    [
        ({"prompt": f"A{MARK}"}, 2, {"prompt": "A"}),
        ({"prompt": f"{MARK}{MARK}"}, 1, {"prompt": MARK}),
        ({"prompt": MARK}, 0, {"prompt": "<image>"}),
        ({"ids": [4, PLACE]}, 0, {"ids": [4, PLACE + 1]}),
        ({"ids": [4, 5]}, 1, {"ids": [4, PLACE]}),
    ],
)
def test_places_and_pictures_are_counted(
    vision: dict[str, Path],
    files: dict[str, Path],
    question: dict[str, Any],
    count: int,
    neighbour: dict[str, Any],
) -> None:
    shown: dict[str, Any] = {"path": vision["int8"], "images": [files["red"]] * count, "tokens": 1}
    assert refused(**question, **shown) == [("probe.pictures", "prompt")]
    assert api.probe(**neighbour, **shown).ok()


def test_too_many_pictures_are_refused_before_any_is_read(vision: dict[str, Path]) -> None:
    question: dict[str, Any] = {"path": vision["int8"], "prompt": "A", "tokens": 1}
    assert refused(**question, images=["none.png"] * 97) == [("probe.pictures", "prompt")]
    assert refused(**question, images=["none.png"] * 96) == [("file.unreadable", "none.png")]


@pytest.mark.parametrize("data", [b"", b"no picture", b"\x89PNG\r\n\x1a\n" + bytes(40)])
def test_a_file_that_is_no_picture_is_refused(
    data: bytes, cli: Cli, vision: dict[str, Path], files: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "broken.png").write_bytes(data)
    question = ("probe", vision["int8"], "--prompt", "A", "--tokens", 1, "--json", "--image")
    ran = cli(*question, tmp_path / "broken.png")
    assert ran.exit_code == 3
    assert [(f["code"], f["where"]) for f in ran.json()["findings"]] == [("probe.picture", "broken.png")]
    require("error", ran.json())
    (tmp_path / "broken.png").write_bytes(files["red"].read_bytes())
    assert cli(*question, tmp_path / "broken.png").exit_code == 0


def test_a_folder_and_a_missing_file_are_no_pictures(vision: dict[str, Path], tmp_path: Path) -> None:
    question: dict[str, Any] = {"path": vision["int8"], "prompt": "A"}
    assert refused(**question, images=[tmp_path]) == [("file.not-regular", tmp_path.name)]
    with open(tmp_path / "large.png", "wb") as file:
        file.truncate((256 << 20) + 1)
    assert refused(**question, images=[tmp_path / "large.png"]) == [("probe.picture", "large.png")]


@pytest.mark.parametrize("name", ["tokenizer.json", "red.png"])
@pytest.mark.parametrize(
    ("call", "number", "code", "problem"),
    [
        ("open", errno.EACCES, "file.unreadable", "permission denied"),
        ("pread", errno.EIO, "io.read", "reading failed: Input/output error"),
    ],
)
def test_a_tokenizer_and_a_picture_that_cannot_be_read_get_the_same_sentence(
    vision: dict[str, Path],
    files: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    call: str,
    number: int,
    code: str,
    problem: str,
) -> None:
    config = VisionConfig.from_config(read_json(vision["int8"] / "config.json"))
    assert config

    def read() -> None:
        Vocabulary(vision["int8"])
        read_pictures([files["red"]], config)

    works = getattr(os, call)

    def fail(file: int | os.PathLike[str], *rest: int) -> Any:
        path = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else os.fspath(file)
        if os.path.basename(path) == name:
            raise OSError(number, os.strerror(number))
        return works(file, *rest)

    read()
    monkeypatch.setattr(os, call, fail)  # root ignores modes
    with pytest.raises(EnvironmentFault) as caught:
        read()
    assert [(f.code, f.where, f.problem) for f in caught.value.findings] == [(code, name, problem)]


def test_without_pillow_the_extra_is_named(
    vision: dict[str, Path], files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "PIL" else real(name))
    question: dict[str, Any] = {"path": vision["int8"], "prompt": "A", "tokens": 1}
    assert refused(**question, images=[files["red"]]) == [("env.missing", "pillow")]
    assert api.probe(**question).ok()


def test_a_tokenizer_without_a_place_for_pictures_is_refused(
    copy: Callable[[str], Path], files: dict[str, Path]
) -> None:
    root = copy("int8")
    tokenizer = read_json(root / "tokenizer.json")
    tokenizer["added_tokens"] = [t for t in tokenizer["added_tokens"] if t["content"] != MARK]
    del tokenizer["model"]["vocab"][MARK]
    (root / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert refused(path=root, prompt="A", images=[files["red"]]) == [("probe.chat", "tokenizer.json")]
    assert api.probe(root, "A", tokens=1).ok()


def _config(root: Path, **values: Any) -> None:
    config = read_json(root / "config.json") | values
    (root / "config.json").write_text(json.dumps(config))


def test_a_context_without_room_for_the_picture_is_refused(
    copy: Callable[[str], Path], files: dict[str, Path]
) -> None:
    """Two ids and a block of 99 positions from position 2; then one token of the answer."""
    root = copy("int8")
    question: dict[str, Any] = {"path": root, "ids": [1, 2, PLACE], "images": [files["red"]], "tokens": 1}
    _config(root, max_position_embeddings=101)
    assert refused(**question) == [("probe.prompt", "prompt")]
    _config(root, max_position_embeddings=102)
    assert api.probe(**question).ok()


def test_a_reference_with_other_eyes_is_another_model(
    vision: dict[str, Path], copy: Callable[[str], Path], files: dict[str, Path]
) -> None:
    root = copy("official")
    _config(root, vision_max_n_token=300)
    question: dict[str, Any] = {"reference": root, "tokens": 1}
    assert api.probe(vision["mxfp4"], ids=SHORT, **question).ok()
    with pytest.raises(api.Dsv4Error) as caught:
        api.probe(vision["mxfp4"], ids=[PLACE], images=[files["red"]], **question)
    assert [f.code for f in caught.value.findings] == ["reference.other"]
    assert "`max_tokens` differ" in str(caught.value.findings[0])


def test_unusable_numbers_of_the_tower_are_named(copy: Callable[[str], Path], files: dict[str, Path]) -> None:
    root = copy("int8")
    _config(root, vision_rope_theta=0)
    with pytest.raises(Refused, match="vision_rope_theta"):
        api.probe(root, ids=[PLACE], images=[files["red"]], tokens=1)
    assert api.probe(root, ids=SHORT, tokens=1).ok()
