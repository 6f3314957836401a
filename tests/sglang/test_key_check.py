"""SGLang's check of the API key on a Starlette application, asked by hand-made requests.

The environment has a Starlette that no longer believes the Host header. `believing` puts back how Starlette
before 1.0.1 built the URL of a request, so that the hole is there to be closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from sglang.srt.utils import auth
from starlette import requests
from starlette.applications import Starlette
from starlette.datastructures import URL
from starlette.responses import PlainTextResponse
from starlette.routing import Route

#: Made up for these tests.
_KEY = "sk-5Qk0pZ-not-a-key-of-anybody"
_STOCK = auth.add_api_key_middleware.__wrapped__


def _app(add: Callable[..., None] = auth.add_api_key_middleware, path: str = "/v1/models") -> Starlette:
    app = Starlette(routes=[Route(p, lambda request: PlainTextResponse("served")) for p in (path, "/health")])
    add(app, api_key=_KEY, admin_api_key=None)
    return app


def _ask(app: Starlette, *hosts: bytes, path: str = "/v1/models", key: str | None = None) -> int:
    """Return the status of a GET; a request that was served answers with its content."""
    headers = [(b"host", host) for host in hosts]
    if key is not None:
        headers.append((b"authorization", f"Bearer {key}".encode()))
    scope = {
        "type": "http",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "server": ("127.0.0.1", 30000),
    }
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    status, body = sent[0]["status"], b"".join(m.get("body", b"") for m in sent[1:])
    assert (body == b"served") == (status == 200)
    assert dict(sent[0]["headers"])[b"content-length"] == str(len(body)).encode()
    return int(status)


@pytest.fixture
def believing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build the URL of a request as Starlette 1.0.0 did: the Host header, then the path, as one text."""

    def url(scope: dict[str, Any]) -> URL:
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        return URL(f"{scope['scheme']}://{hosts[0]}{scope['path']}" if hosts else scope["path"])

    monkeypatch.setattr(requests, "URL", url)


_FORGED = [b"x/health?", b"x/health#", b"x/metrics?", b"a@x/health?", b"x\\health?", b"x?", b"x#", b"x y"]


@pytest.mark.parametrize("host", _FORGED)
def test_a_host_that_is_none_is_answered_before_the_key_is_asked_for(host: bytes) -> None:
    assert _ask(_app(), host) == _ask(_app(), host, key=_KEY) == 400
    assert _ask(_app(), b"x", host, key=_KEY) == 400
    # Starlette of this environment is not fooled: the answer is ours, not the check's.
    assert _ask(_app(_STOCK), host) == 401


@pytest.mark.parametrize("host", [b"x/health?", b"x/health#", b"x/metrics?", b"a@x/health?"])
def test_an_old_starlette_serves_without_a_key_but_for_the_patch(believing: None, host: bytes) -> None:
    assert _ask(_app(_STOCK), host) == 200
    assert _ask(_app(), host) == 400
    assert _ask(_app(), b"x", host) == 400


def test_a_path_that_is_checked_as_another_is_refused(believing: None) -> None:
    """`%3F` in a request is a question mark in its path: routed as a whole, checked up to there."""
    app = _app(path="/{rest:path}")
    assert _ask(_app(_STOCK, "/{rest:path}"), b"x", path="/health?/secret") == 200
    assert _ask(app, b"x", path="/health?/secret") == 400
    assert _ask(app, b"x[", path="/v1/models") == 400
    assert _ask(app, b"x", path="/v1/models") == 401


@pytest.mark.parametrize(
    "host",
    [b"127.0.0.1", b"127.0.0.1:30000", b"localhost:30000", b"[::1]:30000", b"gpu_7.example-net.org:443", b""],
)
@pytest.mark.parametrize("old", [False, True])
def test_honest_hosts_are_asked_for_the_key(request: pytest.FixtureRequest, host: bytes, old: bool) -> None:
    if old:
        request.getfixturevalue("believing")
    app = _app()
    assert _ask(app, host) == _ask(app, host, key=_KEY + "x") == 401
    assert _ask(app, host, key=_KEY) == 200
    # Probes of a container platform need none.
    assert _ask(app, host, path="/health") == 200


def test_no_host_at_all_is_fine() -> None:
    """HTTP/1.0, and servers behind a proxy that speaks it."""
    assert (_ask(_app()), _ask(_app(), key=_KEY)) == (401, 200)


def test_other_traffic_is_handed_on() -> None:
    """Start-up and shutdown of the application come the same way."""
    seen: list[object] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)

    from dsv4convert.runtime.patches.secret import OnePathOnly

    asyncio.run(OnePathOnly(inner)({"type": "lifespan"}, None, None))
    assert seen == [{"type": "lifespan"}]
