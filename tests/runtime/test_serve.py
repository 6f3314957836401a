"""`serve` from start to end with real processes; a stand-in for SGLang listens, logs and fails as told."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsv4convert.runtime.guards import Guards
from dsv4convert.runtime.keys import make_key, read_key
from dsv4convert.runtime.logs import LONGEST_LINE, ServerLog
from tests.conftest import Ran
from tests.fakeserving import FakeServing, guard_lines
from tests.test_schemas import require
from tests.toy import Toybox

#: Two cores and several processes that start Python: a start takes seconds.
PATIENCE = 90.0
#: With it, `serve` looks at the machine first, as it does without the driver of the tests.
LOOKS = {"TEST_LOOKS_AT_MACHINE": "1"}


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Toybox:
    return Toybox(tmp_path_factory.mktemp("toys"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
        return number


class Running:
    """A `serve` in the background, whose lines can be waited for."""

    def __init__(self, command: list[str], environ: dict[str, str], cwd: Path) -> None:
        self.process = subprocess.Popen(
            command, env=environ, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.out: list[str] = []
        self.err: list[str] = []
        self._threads = [
            threading.Thread(target=lines.extend, args=(stream,), daemon=True)
            for lines, stream in ((self.out, self.process.stdout), (self.err, self.process.stderr))
        ]
        for thread in self._threads:
            thread.start()

    def wait_for(self, pattern: str) -> re.Match[str]:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            for line in [*self.out, *self.err]:
                if match := re.search(pattern, line):
                    return match
            assert self.process.poll() is None or any(t.is_alive() for t in self._threads), self.said()
            time.sleep(0.05)
        raise AssertionError(f"nothing like {pattern!r} in:\n{self.said()}")

    def end(self) -> int:
        status = self.process.wait(PATIENCE)
        for thread in self._threads:
            thread.join(PATIENCE)
        for stream in (self.process.stdout, self.process.stderr):
            if stream:
                stream.close()
        return status

    def said(self) -> str:
        return "".join([*self.out, *self.err])


@pytest.fixture
def fake(tmp_path: Path) -> FakeServing:
    return FakeServing(tmp_path / "fake")


@pytest.fixture
def serve(fake: FakeServing, toys: Toybox, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Return ``serve(*options)``, which starts `serve` on a free port."""
    started: list[Running] = []

    def start(*options: object, environ: dict[str, str] | None = None) -> Running:
        root = toys.original("int8")
        command = fake.command("serve", root, "--tp", 1, "--port", free_port(), "--log-file", "log", *options)
        started.append(Running(command, fake.driver_environ(**(environ or {})), tmp_path))
        return started[-1]

    yield start
    for running in started:
        running.process.kill()
        running.end()


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def gone(pid: int) -> bool:
    """Wait for a process that was killed to disappear."""
    deadline = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_alive(pid)


# ---- a server that works


def test_ready_then_stopped(serve: Callable[..., Running], fake: FakeServing, tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    key = read_key(tmp_path / "key")
    fake.plan(lines=guard_lines(), tells_key=True, child=True)
    running = serve("--api-key-file", "key", environ=LOOKS)
    assert running.wait_for(r"ready after \d+ s: http://127.0.0.1:\d+/v1, model int8")
    child = int(running.wait_for(r"child (\d+)")[1])
    running.process.send_signal(signal.SIGTERM)
    assert running.end() == 143
    assert "  dsv4convert guard: model=DeepseekV4ForCausalLM rank=0/1" in "".join(running.out)
    assert "stopped: the server and all of its processes have ended" in running.said()
    assert gone(child)
    log = (tmp_path / "log").read_text()
    # The server had the key, and nobody else could see it.
    assert "key_given=True key_seen=False" in log and "api_key='[API key]'" in log
    assert key not in log + running.said()
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600


def test_what_clients_put_into_the_log_of_a_ready_server_decides_nothing(
    serve: Callable[..., Running], fake: FakeServing
) -> None:
    fake.plan(lines=guard_lines())
    running = serve()
    url = running.wait_for(r"ready after \d+ s: (http://127.0.0.1:\d+)/v1")[1]
    texts = [
        "[2026-11-29 21:00:02 TP0] Hit invalid json_schema: key_string={not found in params_dict}",
        "[2026-11-29 21:00:02 TP0] layers.0.x not found in params_dict.",
        *guard_lines(fp8="3"),
        "the last one",
    ]
    for text in texts:
        urllib.request.urlopen(f"{url}/{urllib.parse.quote(text)}", timeout=PATIENCE).close()
    running.wait_for("the last one")
    running.process.send_signal(signal.SIGTERM)
    assert running.end() == 143 and "serve.guard" not in running.said()
    # The first of them stands in the log of a server that comes up, and does not end it either.
    assert told([texts[0], *guard_lines()], 1).failed == ()


def test_running_requests_are_finished_first(serve: Callable[..., Running], fake: FakeServing) -> None:
    fake.plan(lines=guard_lines(), drains=1.0)
    running = serve()
    running.wait_for("ready after")
    running.process.send_signal(signal.SIGINT)
    assert running.end() == 130
    assert "drained" in running.said()


def test_second_signal_ends_at_once(serve: Callable[..., Running], fake: FakeServing) -> None:
    fake.plan(lines=guard_lines(), drains=300.0)
    running = serve("--stop-timeout", 300)
    running.wait_for("ready after")
    running.process.send_signal(signal.SIGTERM)
    running.wait_for("draining")
    running.process.send_signal(signal.SIGTERM)
    assert running.end() == 143 and "drained" not in running.said()


def test_server_that_ignores_sigterm_is_killed(serve: Callable[..., Running], fake: FakeServing) -> None:
    fake.plan(lines=guard_lines(), ignores_sigterm=True)
    running = serve("--stop-timeout", 0.5)
    running.wait_for("ready after")
    running.process.send_signal(signal.SIGTERM)
    assert running.end() == 143


def test_server_does_not_outlive_serve(serve: Callable[..., Running], fake: FakeServing) -> None:
    fake.plan(lines=[*guard_lines()], drains=0.0)
    running = serve()
    running.wait_for("ready after")
    pid = running.process.pid
    (server,) = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    running.process.kill()
    running.end()
    assert gone(server)


def test_systemd_hears_of_it(serve: Callable[..., Running], fake: FakeServing, tmp_path: Path) -> None:
    fake.plan(lines=guard_lines())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(os.fspath(tmp_path / "notify"))
        systemd.settimeout(PATIENCE)
        running = serve(environ={"NOTIFY_SOCKET": os.fspath(tmp_path / "notify")})
        assert systemd.recv(64) == b"READY=1"
        running.process.send_signal(signal.SIGTERM)
        assert systemd.recv(64) == b"STOPPING=1"
    assert running.end() == 143


def test_json_of_a_server_that_was_ready_is_one_object(
    serve: Callable[..., Running], fake: FakeServing
) -> None:
    fake.plan(lines=guard_lines(), dies_after=2.0)
    running = serve("--json", "-q")
    assert running.end() == 4
    page = json.loads("".join(running.out))
    require("serve", page)
    assert page["guards"][1].startswith("dsv4convert guard: model=")
    assert "[serve.died]" in "".join(running.err)


def test_json_of_a_server_that_never_was(serve: Callable[..., Running], fake: FakeServing) -> None:
    fake.plan(lines=guard_lines(fp8="1"))
    running = serve("--json", "-q")
    assert running.end() == 3
    page = json.loads("".join(running.out))
    require("error", page)
    assert [f["code"] for f in page["findings"]] == ["serve.guard"]


def test_json_of_a_start_that_was_stopped(serve: Callable[..., Running], fake: FakeServing) -> None:
    fake.plan(lines=guard_lines(), ready=False)
    running = serve("--json")
    running.wait_for("dsv4convert guard")
    running.process.send_signal(signal.SIGTERM)
    assert running.end() == 143
    page = json.loads("".join(running.out))
    require("error", page)
    assert page["exit_status"] == 143


# ---- servers that do not


def test_crash_at_start_shows_the_last_lines(serve: Callable[..., Running], fake: FakeServing) -> None:
    fake.plan(lines=guard_lines(), crashes="CUDA error: an illegal memory access was encountered")
    running = serve("-q")
    assert running.end() == 4
    assert "[serve.died]" in running.said() and "before it was ready" in running.said()
    assert "illegal memory access" in running.said()


def test_death_of_a_ready_server(serve: Callable[..., Running], fake: FakeServing) -> None:
    fake.plan(lines=guard_lines(), dies_after=2.0)
    running = serve()
    running.wait_for("ready after")
    assert running.end() == 4
    assert "after it had been ready" in running.said() and "exit status 3" in running.said()


@pytest.mark.slow
@pytest.mark.parametrize("hang", [{"ready": False}, {"health": 503}], ids=["no line", "no health"])
def test_server_that_never_gets_ready(
    hang: dict[str, object], serve: Callable[..., Running], fake: FakeServing
) -> None:
    fake.plan(lines=[*guard_lines(), "compiling"], **hang)
    running = serve("-q", "--ready-timeout", 12)
    assert running.end() == 4
    assert "[serve.timeout]" in running.said() and "compiling" in running.said()


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([], "no line `dsv4convert shim:`"),
        (guard_lines()[:1], "no line `dsv4convert guard:`"),
        (guard_lines(fp8="3"), "quantized to FP8"),
        (guard_lines(experts="marlin/mxfp4"), "backend `ours`"),
        ([*guard_lines(), "layers.0.x not found in params_dict."], "not found in params_dict"),
    ],
    ids=["stock", "no guard", "fp8", "backend", "left over"],
)
def test_server_that_is_up_but_wrong_is_ended(
    lines: list[str], reason: str, serve: Callable[..., Running], fake: FakeServing
) -> None:
    fake.plan(lines=lines, child=True)
    running = serve()
    child = int(running.wait_for(r"child (\d+)")[1])
    assert running.end() == 3
    assert "[serve.guard]" in running.said() and reason in running.said()
    assert not any("ready after" in line for line in running.out) and gone(child)


def test_failed_preflight_starts_nothing(
    serve: Callable[..., Running], fake: FakeServing, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("0123456789abcdef\n")
    (tmp_path / "key").chmod(0o640)
    fake.cards([])
    running = serve("--api-key-file", "key", environ=LOOKS)
    assert running.end() == 3
    assert "[gpu.count]" in running.said() and "[key.mode]" in running.said()
    assert not (tmp_path / "log").exists()


def test_log_that_cannot_be_made_starts_nothing(serve: Callable[..., Running], tmp_path: Path) -> None:
    running = serve("--log-file", tmp_path / "nowhere" / "log")
    assert running.end() == 4 and "[io.write]" in running.said() and "key_given" not in running.said()


def test_server_process_refuses_without_the_shim(fake: FakeServing, tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    command = [
        sys.executable,
        "-m",
        "dsv4convert.runtime.server",
        "--api-key-file",
        "key",
        "--",
        "--port",
        "1",
    ]
    environ = fake.driver_environ()
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 3 and "shim is not active" in done.stderr
    # With it, it comes as far as the key.
    (tmp_path / "key").chmod(0o644)
    armed = {**environ, "PYTHONPATH": os.pathsep.join((str(fake.root / "armed"), environ["PYTHONPATH"]))}
    done = subprocess.run(command, env=armed, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 3 and "[key.mode]" in done.stderr


# ---- guards


def told(lines: list[str], tp: int, dspark: bool = False, backend: str = "ours") -> Guards:
    guards = Guards(tp, dspark, backend)
    for line in lines:
        guards.feed(line)
    return guards


@pytest.mark.parametrize("dspark", [False, True])
@pytest.mark.parametrize("tp", [1, 4])
def test_every_rank_and_model_has_to_speak(tp: int, dspark: bool) -> None:
    lines = guard_lines(tp, dspark)
    assert told(lines, tp, dspark).missing() == () and told(lines, tp, dspark).failed == ()
    for line in lines:
        # Any one of them missing is noticed.
        (missing,) = told([other for other in lines if other is not line], tp, dspark).missing()
        assert ("shim:" in missing) == ("shim:" in line)
        if "guard:" in line:
            assert re.search(r"rank=(\S+)", line)[1] in missing  # type: ignore[index]


def test_a_rank_that_speaks_twice_does_not_stand_for_another() -> None:
    lines = guard_lines(2)
    assert "rank 1/2" in told([*lines[:3], lines[2]], 2).missing()[0]


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        ({"fp8": "1"}, "FP8"),
        ({"main_proj": "float8_e4m3fn"}, "main_proj"),
        ({"experts": "humming/mxfp4"}, "ours"),
    ],
)
def test_facts_that_are_wrong(facts: dict[str, str], word: str) -> None:
    assert word in told(guard_lines(1, True, **facts), 1, True).failed[0]
    assert told(guard_lines(1, True), 1, True).failed == ()


def test_backend_of_the_guard_line() -> None:
    lines = guard_lines(experts="humming/mxfp4")
    assert told(lines, 1, backend="humming").failed == ()


SHIM, GUARD = guard_lines()
STAMP = "[2026-11-29 21:00:00 TP0] "
READY = "The server is fired up and ready to roll!"


@pytest.mark.parametrize(
    "line",
    [
        f"{STAMP}Hit invalid json_schema: key_string={{not found in params_dict}}",
        f"{STAMP}Receive: text='x not found in params_dict.'",
        f"{STAMP}Receive: text='Some weights are not initialized from checkpoints: x'",
        f"{STAMP}Receive: text='{SHIM}'",
        f"{STAMP}Receive: text='{GUARD}'",
        f"{STAMP}Receive: text='{READY}'",
    ],
)
def test_words_inside_a_message_are_no_line_of_the_server(line: str) -> None:
    guards = told([], 1)
    assert not guards.feed(line)
    assert guards.failed == () and guards.lines == [] and not guards.is_up


@pytest.mark.parametrize(
    "before", [STAMP, "[2026-11-29 21:00:00.123] ", "", f"\rLoading:  50%|##  | 1/2{STAMP}"]
)
def test_messages_are_found_behind_what_stands_before_them(before: str) -> None:
    shim, guard = SHIM.removeprefix(STAMP), GUARD.removeprefix(STAMP)
    guards = told([before + text for text in (shim, guard, READY)], 1)
    assert guards.lines == [shim, guard] and guards.missing() == () and guards.is_up
    for wrong in (
        "a.b not found in params_dict.",
        "Some weights are not initialized from checkpoints: {'a'}",
    ):
        assert told([before + wrong], 1).failed == (before + wrong,)


# ---- the log


def test_log_rotates_and_hides_the_key(tmp_path: Path) -> None:
    echoed: list[str] = []
    log = ServerLog(tmp_path / "log", "sekret-sekret-sekret", echoed.append, file_bytes=200)
    for number in range(100):
        log.write(f"line {number} sekret-sekret-sekret")
    log.close()
    files = sorted(tmp_path.iterdir())
    assert [f.name for f in files] == ["log", *(f"log.{n}" for n in range(1, 6))]
    assert all(f.stat().st_size <= 200 and stat.S_IMODE(f.stat().st_mode) == 0o600 for f in files)
    assert "sekret" not in "".join(f.read_text() for f in files) + "".join([*log.tail, *echoed])
    assert log.tail[-1] == "line 99 [API key]" and len(log.tail) == 30


SECRET = "sekret-'sekret'-\\-\"sekret"


@pytest.mark.parametrize("before", [0, LONGEST_LINE - 60, *range(LONGEST_LINE - 30, LONGEST_LINE + 2)])
def test_no_cut_goes_through_a_key(tmp_path: Path, before: int) -> None:
    log = ServerLog(tmp_path / "log", SECRET)
    text = b"x" * before + SECRET.encode() + b"y" * LONGEST_LINE + b"\nnext\n" + b"z" * LONGEST_LINE
    *pieces, following, last, rest = log.lines(io.BytesIO(text))
    log.close()
    assert "".join(pieces) == "x" * before + "[API key]" + "y" * LONGEST_LINE
    assert all(len(piece) <= LONGEST_LINE + len(SECRET) * 2 for piece in pieces)
    assert (following, last + rest) == ("next", "z" * LONGEST_LINE)


def test_a_quoted_key_is_hidden_too(tmp_path: Path) -> None:
    log = ServerLog(tmp_path / "log", SECRET)
    for form in (SECRET, repr(SECRET)[1:-1], json.dumps(SECRET)[1:-1]):
        assert log.write(f"<{form}>") == "<[API key]>"
    log.close()
    log = ServerLog(tmp_path / "log")
    assert list(log.lines(io.BytesIO(b"a\r\n\nb"))) == ["a", "", "b"]
    log.close()


def test_an_older_log_is_closed_to_others(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("before\n")
    (tmp_path / "log").chmod(0o644)
    log = ServerLog(tmp_path / "log")
    log.write("after")
    log.close()
    assert (tmp_path / "log").read_text() == "before\nafter\n"
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600


def test_log_in_place_of_the_key_is_a_usage_error(
    cli: Callable[..., Ran], toys: Toybox, tmp_path: Path
) -> None:
    make_key(tmp_path / "key")
    (tmp_path / "link").symlink_to("key")
    options = ("serve", toys.original("int8"), "--tp", 1, "--dry-run", "--api-key-file", tmp_path / "key")
    refused = cli(*options, "--log-file", tmp_path / "link")
    assert refused.exit_code == 2 and "the same file" in refused.err
    assert cli(*options, "--log-file", tmp_path / "other").exit_code == 0


def test_lines_that_are_missing_are_told_when_quiet(serve: Callable[..., Running], fake: FakeServing) -> None:
    fake.plan(lines=guard_lines())
    running = serve("-q", "--log-file", "/dev/full", "--", "--served-model-name", "foo")
    # Clients know the model by the name that was given.
    running.wait_for("ready after .*, model foo, log")
    running.process.send_signal(signal.SIGTERM)
    assert running.end() == 143
    assert "lines are missing: " in "".join(running.err)


def test_log_that_cannot_be_written_does_not_stop_a_server(tmp_path: Path) -> None:
    log = ServerLog(Path("/dev/full"))
    log.write("line")
    assert list(log.tail) == ["line"] and "No space left" in log.fault
    log.close()
