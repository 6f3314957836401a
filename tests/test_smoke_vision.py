"""The suite about pictures against a server whose faults are switches: each is caught by its checks alone."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dsv4convert.cli.smoke import COLUMN
from dsv4convert.errors import Dsv4Error, EnvironmentFault, Refused
from dsv4convert.golden import encode_golden
from dsv4convert.smoke import pictures
from dsv4convert.smoke.checks import Scene, Terms
from dsv4convert.smoke.server import open_server
from dsv4convert.smoke.shown import read_shown
from dsv4convert.smoke.suite import Smoke, run_suite
from dsv4convert.vision.config import MOST_PICTURE_BYTES
from tests.conftest import Ran
from tests.fakechat import KEY, TIE, FakeChat, golden
from tests.fakevision import PLACEHOLDER, Talk, block, expand, look, teach
from tests.test_schemas import require

TERMS = Terms(suite="vision", pictures=(2, 8))
#: Most pictures in a request, of most tests; `dsv4convert serve` takes 96.
LIMIT = 12
NUMBERS = count(1)
PROTOCOLS = ("chat", "responses", "messages")


@pytest.fixture(scope="module")
def server() -> Iterator[FakeChat]:
    for number in ("4711", "58213"):
        teach(number, pictures.written(number).url)
    with FakeChat() as running:
        running.context = 32768
        yield running
        running.shutdown()


@pytest.fixture(scope="module")
def ask(server: FakeChat) -> Iterator[Callable[..., Smoke]]:
    """Return ``ask(*faults, draft=..., **terms)``, which runs the suite; clients are made once."""

    def run(*faults: str, draft: bool = False, limit: int = LIMIT, **terms: Any) -> Smoke:
        server.faults, server.draft, server.refused = set(faults), draft, False
        server.aligned.clear()
        server.limit = limit
        told = None if "limit-untold" in faults else {"image": limit}
        draft_name = "DSPARK" if draft else None
        reached.info = {"speculative_algorithm": draft_name, "limit_mm_data_per_request": told}
        try:
            return run_suite(replace(scene, terms=replace(TERMS, number=next(NUMBERS), **terms)))
        finally:
            server.faults, server.draft, server.is_dead = set(), False, False

    with open_server(server.url, KEY, 20.0) as reached, Scene.of(reached, TERMS) as scene:
        yield run


def failed(found: Smoke) -> dict[str, set[str]]:
    """Return what failed: check -> codes."""
    return {o.name: {f.code for f in o.findings} for o in found.outcomes if o.findings}


def test_right_server_passes(ask: Callable[..., Smoke]) -> None:
    found = ask(limit=96, pictures=(1, 2, 8, 48, 96))
    assert failed(found) == {}
    states = {o.name: o.state for o in found.outcomes}
    skipped = {name for name, state in states.items() if state == "skipped"}
    assert skipped == {"tokens.ids", "tokens.text"} and found.ok(strict=True)
    facts = {o.name: o.facts for o in found.outcomes}
    assert facts["vision.colour"]["plain red"] == "Red."
    assert facts["vision.swap"]["nats_between_repetitions"] == 0.0 and facts["vision.limit"] == {"limit": 96}
    assert max(map(len, states)) < COLUMN
    require("smoke", found.as_dict())


def test_right_server_with_a_draft_passes(ask: Callable[..., Smoke]) -> None:
    assert failed(ask(draft=True)) == {}


#: Fault -> checks that must see it, with the code of each.
FAULTS: dict[str, dict[str, str]] = {
    "chat-loses-picture": {"vision.chat": "smoke.picture-count"},
    "responses-loses-picture": {"vision.responses": "smoke.picture-count"},
    "messages-loses-picture": {"vision.messages": "smoke.picture-count"},
    "moves-picture": {f"vision.{name}": "smoke.picture-place" for name in PROTOCOLS},
    "picture-stream-differs": {"vision.chat-stream": "smoke.differs"},
    "stream-counts-places": {"vision.responses-stream": "smoke.picture-count"},
    "no-message-stop": {"vision.messages-stream": "smoke.stream"},
    "forgets-first-colour": {f"vision.{name}-turns": "smoke.picture-unread" for name in PROTOCOLS},
    "messages-moves-tool-picture": {"vision.messages-tools": "smoke.picture-count"},
    "door-unseen": {f"vision.{name}-tools": "smoke.picture-unread" for name in ("chat", "messages")},
    "skewed-blocks": {"vision.8": "smoke.picture-count"},
    "many-fail": {"vision.48": "smoke.answer"},
    "limit-ignored": {"vision.limit": "smoke.refusal"},
    "limit-fails": {"vision.limit": "smoke.refusal"},
    "limit-uncounted": {"vision.limit": "smoke.refusal"},
    "surplus-dropped": {"vision.surplus": "smoke.refusal"},
    "missing-fails": {"vision.missing": "smoke.refusal"},
    "undecodable-fails": {"vision.undecodable": "smoke.refusal"},
    "undecodable-shown": {"vision.undecodable": "smoke.refusal"},
    "assistant-pictures": {"vision.roles": "smoke.refusal"},
    "messages-literal-fails": {"vision.messages-literal": "smoke.placeholder"},
    "responses-literal-counts": {"vision.responses-literal": "smoke.placeholder"},
    "messages-literal-kills-turns": {"vision.messages-literal": "smoke.placeholder"},
    "responses-opens-tags": {"vision.responses-tags": "smoke.placeholder"},
    "unsalted": {"vision.alignment": "smoke.answer"},
    "tires": {"vision.alignment": "smoke.differs"},
    "places-cached": {"vision.swap": "smoke.picture-mixed"},
    "other-prefix": {"vision.swap": "smoke.picture-mixed"},
    "blind": {"vision.swap": "smoke.picture-mixed"},
    "colour-blind": {"vision.colour": "smoke.picture-unread"},
    "disorders": {"vision.order": "smoke.picture-unread"},
    "shape-blind": {"vision.shape": "smoke.picture-unread"},
    "cannot-read": {"vision.reading": "smoke.picture-unread"},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught_by_its_checks(fault: str, ask: Callable[..., Smoke]) -> None:
    found = ask(fault, **({"pictures": (8, 48), "limit": 96} if fault == "many-fail" else {}))
    assert failed(found) == {name: {code} for name, code in FAULTS[fault].items()} and not found.ok()


def test_literal_that_chat_refuses_fails_everywhere(ask: Callable[..., Smoke]) -> None:
    """The other protocols are held against Chat's encoding, and they share it."""
    found = failed(ask("chat-literal-fails"))
    assert found == {f"vision.{name}-literal": {"smoke.placeholder"} for name in PROTOCOLS}


def test_pictures_of_the_system_are_missed_in_chat_and_in_responses(ask: Callable[..., Smoke]) -> None:
    assert failed(ask("system-pictures")) == {"vision.roles": {"smoke.refusal", "smoke.picture-dropped"}}


def test_picture_that_responses_drops_from_a_system_turn_is_a_warning(ask: Callable[..., Smoke]) -> None:
    found = ask("responses-drops-system-pictures")
    assert failed(found) == {"vision.roles": {"smoke.picture-dropped"}}
    assert found.ok() and not found.ok(strict=True)


@pytest.mark.parametrize("protocol", ["responses", "messages"])
def test_pictures_of_earlier_turns_that_are_lost_are_missed(protocol: str, ask: Callable[..., Smoke]) -> None:
    check, fault = f"vision.{protocol}-turns", f"{protocol}-forgets-pictures"
    assert failed(ask(fault)) == {check: {"smoke.picture-count", "smoke.picture-unread"}}
    assert failed(ask(fault, random_weights=True)) == {check: {"smoke.picture-count"}}


def test_server_that_limps_after_a_refusal_is_caught_after_each(ask: Callable[..., Smoke]) -> None:
    found = ask("limps")
    names = ("limit", "surplus", "missing", "undecodable", "roles")
    assert failed(found) == {f"vision.{name}": {"smoke.answer"} for name in names}


def test_tool_result_may_be_refused_or_kept_by_responses_and_not_lost(ask: Callable[..., Smoke]) -> None:
    found = ask()
    facts = {o.name: o.facts for o in found.outcomes}
    assert "string" in facts["vision.responses-tools"]["refused"]
    assert failed(ask("responses-tool-pictures")) == {}
    found = ask("responses-tool-pictures", "responses-moves-tool-picture")
    assert failed(found) == {"vision.responses-tools": {"smoke.picture-count"}}


def test_random_weights_are_counted_and_not_judged(ask: Callable[..., Smoke]) -> None:
    blind = ("colour-blind", "disorders", "shape-blind", "cannot-read", "door-unseen", "forgets-first-colour")
    found = ask(*blind, random_weights=True)
    assert failed(found) == {}
    reasons = {o.name: o.reason for o in found.outcomes if o.state == "skipped"}
    names = {f"vision.{name}" for name in ("colour", "order", "shape", "reading")}
    assert names < reasons.keys() and all("--random-weights" in reasons[name] for name in names)
    # What a picture changes is seen without training.
    assert failed(ask("blind", random_weights=True)) == {"vision.swap": {"smoke.picture-mixed"}}


def test_tie_after_a_swap_is_no_fault(ask: Callable[..., Smoke]) -> None:
    # The cache holds the text for every request but the first, so that one of the red ones differs.
    found = ask("ties-from-cache", random_weights=True)
    assert failed(found) == {}
    assert (
        next(o.facts for o in found.outcomes if o.name == "vision.swap")["nats_between_pictures"]
        == "other tokens"
    )
    assert failed(ask("ties-from-cache", tie=TIE / 2)) == {"vision.swap": {"smoke.picture-mixed"}}


def test_swap_cannot_be_judged_without_probabilities(ask: Callable[..., Smoke]) -> None:
    found = ask("blind", random_weights=True, draft=True)
    facts = next(o.facts for o in found.outcomes if o.name == "vision.swap")
    assert failed(found) == {} and facts["judged"] is False


def test_what_the_server_cannot_take_is_skipped_with_the_reason(
    server: FakeChat, ask: Callable[..., Smoke]
) -> None:
    found = ask("limit-untold", pictures=(97,))
    reasons = {o.name: o.reason for o in found.outcomes if o.state == "skipped"}
    assert "limit_mm_data_per_request" in reasons["vision.limit"]
    reasons = {o.name: o.reason for o in ask(pictures=(13,)).outcomes if o.state == "skipped"}
    assert reasons["vision.13"] == "the server takes 12 pictures in a request"


def test_other_suites_show_no_pictures(ask: Callable[..., Smoke]) -> None:
    found = ask(suite="quick", concurrency=(1,))
    assert failed(found) == {} and not [o for o in found.outcomes if o.name.startswith("vision")]
    assert found.not_checked[0] == "pictures: `--suite vision`"


def test_server_that_drops_every_picture_fails(ask: Callable[..., Smoke]) -> None:
    """SGLang without a vision class flattens messages to their texts and answers with status 200."""
    found = failed(ask("text-only", random_weights=True))
    assert found.keys() >= {f"vision.{name}" for name in ("chat", "messages-turns", "8", "alignment", "swap")}
    # Whether it is refused is asked before what is encoded.
    codes = {"smoke.refusal", "smoke.picture-count", "smoke.picture-dropped"}
    assert found.pop("vision.roles") == codes
    assert all("smoke.picture-count" in codes or "smoke.placeholder" in codes for codes in found.values())


def test_command(cli: Callable[..., Ran], server: FakeChat, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text(KEY)
    server.limit = LIMIT
    ran = cli("smoke", server.url, "--api-key-file", key, "--suite", "vision", "-q")
    assert ran.exit_code == 0, ran.err
    assert "  skip  vision.48" in ran.out and "the server takes 12 pictures" in ran.out
    assert ran.out.splitlines()[-1].endswith("4 skipped; 0 errors, 0 warnings")


# ---- golden pictures

TEXT = "Tell what is in these pictures"


def golden_with_pictures(
    server: FakeChat, shown: Sequence[pictures.Picture], text: str = TEXT
) -> dict[str, Any]:
    """Return what `probe` would say about pictures and a text, for the fake's model."""
    said = text if PLACEHOLDER in text else "\n\n".join([PLACEHOLDER] * len(shown) + [text])
    seen = [look(picture.url) for picture in shown]
    talk = Talk([("user", said)], [], seen)
    ids = server.words.encode(talk.render())
    whole, starts = expand(ids, seen)
    known = golden(whole, talk.lines().removeprefix("user: "))
    rows = [
        {
            "file": f"{picture.name}.png",
            "sha256": hashlib.sha256(picture.data).hexdigest(),
            **{"width": picture.width, "height": picture.height, "rows": 1, "cols": 1},
            **{"start": start, "lead": 3 - start % 4, "positions": len(block(one, start))},
        }
        for picture, one, start in zip(shown, seen, starts, strict=True)
    ]
    known["prompt"] |= {"ids": ids, "text": text, "pictures": rows}
    return known


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Return two pictures as files."""
    paths = []
    for picture in (pictures.plain("blue"), pictures.shape("circle")):
        paths.append(tmp_path / f"{picture.name}.png")
        paths[-1].write_bytes(picture.data)
    return paths


@pytest.mark.parametrize("text", [TEXT, f"First:\n\n{PLACEHOLDER}\n\nSecond:\n\n{PLACEHOLDER}\n\nWhat?"])
def test_golden_pictures(text: str, server: FakeChat, files: list[Path], ask: Callable[..., Smoke]) -> None:
    known = golden_with_pictures(server, (pictures.plain("blue"), pictures.shape("circle")), text)
    shown = read_shown(files, known)
    terms = {"golden": known, "shown": shown, "pictures": ()}
    found = ask(**terms)
    assert failed(found) == {}
    facts = {o.name: o.facts for o in found.outcomes}
    assert facts["tokens.ids"] == {"tokens": 8, "ties": 0, "wrong": 0, "complete": True}
    assert facts["tokens.text"] == {"compared": "equal"}
    found = failed(ask("blind", **terms))
    assert found == {"tokens.ids": {"smoke.golden"}, "vision.swap": {"smoke.picture-mixed"}}


def test_golden_pictures_that_were_not_given_are_a_reason(
    server: FakeChat, ask: Callable[..., Smoke]
) -> None:
    known = golden_with_pictures(server, (pictures.plain("blue"),))
    reasons = {o.name: o.reason for o in ask(golden=known, suite="quick", concurrency=()).outcomes}
    assert "`--image`" in reasons["tokens.ids"] and "`--image`" in reasons["tokens.text"]


def test_text_that_a_chat_cannot_say_is_a_reason(server: FakeChat, ask: Callable[..., Smoke]) -> None:
    shown = (pictures.plain("blue"),)
    known = golden_with_pictures(server, shown, f"First: {PLACEHOLDER} and then?")
    found = {o.name: o for o in ask(golden=known, shown=shown, suite="quick", concurrency=()).outcomes}
    assert found["tokens.ids"].state == "passed" and found["tokens.text"].state == "skipped"
    assert "blank line" in found["tokens.text"].reason


def test_other_files_are_refused(
    server: FakeChat, files: list[Path], cli: Callable[..., Ran], tmp_path: Path
) -> None:
    known = golden_with_pictures(server, (pictures.plain("blue"), pictures.shape("circle")))
    path = tmp_path / "golden.json"
    path.write_bytes(encode_golden(known))

    def codes(*images: Path) -> list[str]:
        given = [word for image in images for word in ("--image", image)]
        ran = cli("smoke", server.url, "--golden", path, *given, "--json")
        assert ran.exit_code == 3
        return [f["code"] for f in ran.json()["findings"]]

    assert codes(*reversed(files)) == codes(files[0]) == ["golden.pictures"]
    assert cli("smoke", server.url, "--image", files[0]).exit_code == 2


def test_what_is_no_picture_file_is_told_without_waiting(
    server: FakeChat, files: list[Path], tmp_path: Path
) -> None:
    known = golden_with_pictures(server, (pictures.plain("blue"),))
    assert [shown.data for shown in read_shown(files[:1], known)] == [files[0].read_bytes()]
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large.png").touch()
    os.truncate(tmp_path / "large.png", MOST_PICTURE_BYTES + 1)
    # Held open for writing, so that a reader of the pipe would wait for its end: it must not be one.
    held = os.open(tmp_path / "pipe", os.O_RDWR)
    try:
        with told_in_time() as told:
            for name in ("pipe", "none.png", ".", "large.png"):
                try:
                    read_shown([tmp_path / name], known)
                except Dsv4Error as fault:
                    told += [(type(fault), f.code, f.where) for f in fault.findings]
    finally:
        os.close(held)
    assert told == [
        (EnvironmentFault, "file.not-regular", "pipe"),
        (EnvironmentFault, "file.unreadable", "none.png"),
        (EnvironmentFault, "file.not-regular", tmp_path.name),
        (Refused, "golden.pictures", "large.png"),
    ]


@contextmanager
def told_in_time() -> Iterator[list[Any]]:
    """Yield an empty list; what takes longer than 20 seconds fails instead of waiting forever."""

    def late(*_: object) -> None:
        raise TimeoutError("still waiting after 20 seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    try:
        yield []
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# ---- pictures


def test_pictures_are_the_same_every_time() -> None:
    pictures.plain.cache_clear()
    one = pictures.plain("red", 96, 48)
    pictures.plain.cache_clear()
    assert pictures.plain("red", 96, 48) == one
    image = Image.open(BytesIO(one.data))
    assert image.size == (one.width, one.height) == (96, 48)
    assert image.getcolors() == [(96 * 48, (220, 20, 20))]


def test_marked_pictures_differ_in_their_dots_alone() -> None:
    one, two = (Image.open(BytesIO(pictures.marked("red", n).data)) for n in (5, 6))
    white = [
        {(x, y) for x in range(64) for y in range(64) if i.getpixel((x, y)) == (255,) * 3} for i in (one, two)
    ]
    # Bits 0 and 2 of five, bits 1 and 2 of six; dots stand two pixels apart.
    assert white == [{(0, 0), (4, 0)}, {(2, 0), (4, 0)}]


def test_many_pictures_have_every_size_and_colour() -> None:
    found = pictures.many(24)
    assert {(p.width, p.height) for p in found} == set(pictures.SIZES)
    assert {p.name for p in found} == {f"plain {colour}" for colour in pictures.COLOURS}


@pytest.mark.parametrize("picture", pictures.damaged(), ids=lambda picture: picture.name)
def test_damaged_files_are_none(picture: Any) -> None:
    with pytest.raises((OSError, SyntaxError)):
        Image.open(BytesIO(picture.data)).convert("RGB")
