"""`original --online` against a Hub of our own, on the loopback interface."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.faults import COMMIT, S, etag, files_of, records
from tests.toy import Toy, Toybox

Run = Callable[..., Any]
REPO = "deepseek-ai/Toy"


@pytest.fixture(scope="session")
def toybox(tmp_path_factory: pytest.TempPathFactory) -> Toybox:
    """Return the toys of this session."""
    return Toybox(tmp_path_factory.mktemp("toys"))


@pytest.fixture
def k(toybox: Toybox, tmp_path: Path) -> Toy:
    """Return a copy of the 0731 toy."""
    return toybox.copy("0731", tmp_path / "work")


@dataclass
class Hub:
    """A Hub that knows one commit of one repository.

    Attributes:
        url: Where it listens.
        page: What it answers about the commit.
        asked: Paths it was asked for.
    """

    url: str = ""
    page: dict[str, Any] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def know(self, k: Toy) -> None:
        """Publish the files of a toy as they are now."""
        rows = []
        for name, path in files_of(k).items():
            content = path.read_bytes()
            row: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": "0" * 40}
            if len(tag := etag(name, content)) == 64:
                row["lfs"] = {"sha256": tag, "size": len(content), "pointerSize": 134}
            else:
                row["blobId"] = tag
            rows.append(row)
        self.page = {"id": REPO, "sha": COMMIT, "siblings": rows}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Return a running Hub, to which the client of this process is pointed."""
    import huggingface_hub.constants as constants

    state = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if "/models/" in self.path:  # The client asks for other things on its own account.
                state.asked.append(self.path)
            if self.path.split("?")[0] == f"/api/models/{REPO}/revision/{COMMIT}":
                self._answer(200, state.page, "")
            elif self.path.startswith(f"/api/models/{REPO}/"):
                self._answer(404, {"error": "Invalid rev id"}, "RevisionNotFound")
            else:
                self._answer(404, {"error": "Repository not found"}, "RepoNotFound")

        def _answer(self, status: int, page: Any, code: str) -> None:
            body = json.dumps(page).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            if code:
                self.send_header("X-Error-Code", code)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        state.url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", state.url)
        yield state
        server.shutdown()
        thread.join()


def errors(seen: Any) -> list[tuple[str, str]]:
    return [(f["code"], f["where"]) for f in seen.json()["findings"] if f["severity"] == "error"]


ASK = ("--online", "--repo", f"{REPO}@{COMMIT}")


def test_online_alone_compares_names_and_sizes_in_one_request(k: Toy, hub: Hub, cli: Run) -> None:
    hub.know(k)
    seen = cli("original", k.root, *ASK)
    assert seen.exit_code == 0 and seen.out.splitlines()[-1] == "structure OK, contents not verified"
    assert len(hub.asked) == 1 and "blobs=true" in hub.asked[0].lower()
    k.put("generation_config.json", "{}")
    (k.root / "LICENSE").unlink()
    seen = cli("original", k.root, *ASK, "--json")
    assert errors(seen) == [("content.hash", "generation_config.json")]
    assert [f["where"] for f in seen.json()["findings"] if f["code"] == "content.absent"] == ["LICENSE"]


def test_online_hashes_verify_and_find_one_byte(k: Toy, hub: Hub, cli: Run) -> None:
    hub.know(k)
    seen = cli("original", k.root, *ASK, "--checksums", "auto")
    assert seen.exit_code == 0 and seen.out.splitlines()[-1] == "contents verified"
    assert f"against the Hub at {hub.url}" in seen.out
    k.flip("norm.weight")
    seen = cli("original", k.root, *ASK, "--checksums", "auto", "--json")
    assert errors(seen) == [("content.hash", S(5))]
    command = seen.json()["fetch_command"]
    assert command.startswith(f"hf download {REPO} --revision {COMMIT} ") and command.endswith(S(5))


def test_online_takes_the_commit_from_the_download(k: Toy, hub: Hub, cli: Run) -> None:
    hub.know(k)
    records(k)
    assert cli("original", k.root, "--online", "--repo", REPO).exit_code == 0
    assert COMMIT in hub.asked[0]


def test_online_and_records_that_disagree_are_a_finding(k: Toy, hub: Hub, cli: Run) -> None:
    hub.know(k)
    records(k)
    for row in hub.page["siblings"]:
        if row["rfilename"] == S(3):
            row["lfs"]["sha256"] = hashlib.sha256(b"").hexdigest()
    seen = cli("original", k.root, *ASK, "--checksums", "auto", "--json")
    assert errors(seen) == [("content.sources", S(3))]


@pytest.mark.parametrize(
    ("repo", "word"),
    [
        (f"{REPO}@{'1' * 40}", "commit"),
        (f"nobody/nothing@{COMMIT}", "repository"),
        (f"../x@{COMMIT}", "name"),
    ],
)
def test_online_unknown_revision_is_refused(k: Toy, hub: Hub, cli: Run, repo: str, word: str) -> None:
    hub.know(k)
    seen = cli("original", k.root, "--online", "--repo", repo, "--json")
    (fault,) = seen.json()["findings"]
    assert seen.exit_code == 3 and fault["code"] == "online.unknown-revision" and word in fault["problem"]


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", ""])
def test_online_names_cannot_leave_the_directory(k: Toy, hub: Hub, cli: Run, name: str) -> None:
    hub.know(k)
    hub.page["siblings"].append({"rfilename": name, "size": 1, "blobId": "0" * 40})
    assert cli("original", k.root, *ASK, "--checksums", "auto").exit_code == 0


@pytest.mark.parametrize("page", [{}, {"id": REPO}, {"id": REPO, "siblings": [{"rfilename": "a"}]}, []])
def test_online_odd_answers_are_no_internal_error(k: Toy, hub: Hub, cli: Run, page: Any) -> None:
    hub.page = page
    seen = cli("original", k.root, *ASK, "--checksums", "auto")
    assert seen.exit_code in (0, 4) and "internal error" not in seen.err


# What only a real process shows: the environment is read when the client is loaded.


def _run(k: Toy, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {n: v for n, v in os.environ.items() if n != "HF_HUB_OFFLINE"}
    command = [
        sys.executable,
        "-m",
        "dsv4convert",
        "original",
        str(k.root),
        *ASK,
        "--checksums",
        "auto",
        "--json",
    ]
    root = Path(__file__).parent.parent
    return subprocess.run(
        command, capture_output=True, text=True, cwd=root, env=clean | env, timeout=60, check=False
    )


def test_online_honours_the_endpoint_of_the_environment(k: Toy, hub: Hub) -> None:
    hub.know(k)
    seen = _run(k, HF_ENDPOINT=hub.url)
    assert seen.returncode == 0, seen.stderr
    assert json.loads(seen.stdout)["contents_percent"] == 100 and len(hub.asked) == 1


@pytest.mark.parametrize(
    ("env", "word"),
    [({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE"), ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "127.0.0.1:9")],
    ids=["forbidden", "nobody-listens"],
)
def test_online_without_a_hub_says_so(k: Toy, env: dict[str, str], word: str) -> None:
    seen = _run(k, **env)
    (fault,) = json.loads(seen.stdout)["findings"]
    assert seen.returncode == 4 and fault["code"] == "online.offline" and word in fault["problem"]
    assert "--checksums auto" in fault["hint"] and "Traceback" not in seen.stderr
