"""Who may ask, and what the server tells about itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from dsv4convert.errors import Finding, finding
from dsv4convert.smoke.checks import EVERY, Check, Result, Scene
from dsv4convert.smoke.server import Server

#: Characters of a key that must not appear anywhere: 48 bits of a key that `keygen` makes.
_PREFIX: Final = 8
#: Pages that show how the server was started.
_PAGES: Final = (
    "/server_info",
    "/get_server_info",
    "/model_info",
    "/get_model_info",
    "/v1/models",
    "/metrics",
)


def checks(scene: Scene) -> Iterator[Check]:
    """Yield the checks of access."""
    yield Check(
        "models",
        "the official client lists the model by a name that it can be asked by",
        lambda: _models(scene),
        EVERY,
    )
    no_key = "every endpoint answers 401 to a request without a key"
    yield Check("access.none", no_key, lambda: _closed(scene.server, ("",)))
    wrong = (
        "every endpoint answers 401 to a key whose last character is wrong, and to the beginning of the key"
    )
    yield Check("access.wrong", wrong, lambda: _closed(scene.server, _wrong(scene.server.key)))
    hidden = f"no page about the server holds the key or its first {_PREFIX} characters"
    yield Check("access.hidden", hidden, lambda: _hidden(scene.server))


def _models(scene: Scene) -> Result:
    names = scene.chat.models()
    facts = {"models": names, "context": scene.server.context}
    if scene.server.model in names:
        return Result(facts=facts)
    problem, found = "the client does not list the model that the page lists", ", ".join(names) or "none"
    return Result(
        (finding("smoke.models", "models", problem, expected=scene.server.model, found=found),), facts
    )


def _wrong(key: str) -> tuple[str, ...]:
    return (key[:-1] + ("A" if key[-1:] != "A" else "B"), key[: len(key) // 2]) if key else ()


def _closed(server: Server, keys: tuple[str, ...]) -> Result:
    if not server.key:
        return Result(skipped="no key was given, and the server answers without one")
    findings = tuple(_open(server, keys))
    return Result(findings, {"requests": len(_requests(server)) * len(keys)})


def _requests(server: Server) -> dict[str, Any]:
    """Return a path and a legal body for everything that a key must guard; None for a GET."""
    said = [{"role": "user", "content": "Hi"}]
    return {
        "/v1/models": None,
        "/server_info": None,
        "/get_server_info": None,
        "/v1/chat/completions": {"model": server.model, "messages": said, "max_tokens": 1},
        "/v1/responses": {"model": server.model, "input": "Hi", "max_output_tokens": 1},
        "/v1/messages": {"model": server.model, "messages": said, "max_tokens": 1},
        "/generate": {"text": "Hi", "sampling_params": {"max_new_tokens": 1}},
    }


def _open(server: Server, keys: tuple[str, ...]) -> Iterator[Finding]:
    for key in keys:
        what = "answers a request with a wrong key" if key else "answers a request without a key"
        for path, body in _requests(server).items():
            page = server.get(path, key=key) if body is None else server.post(path, body, key=key)
            if page.status != 401:
                yield finding("smoke.open", path, what, expected="status 401", found=f"{page.status}")


def _hidden(server: Server) -> Result:
    if not server.key:
        return Result(skipped="no key was given, so that none can be looked for")
    findings, read = [], {}
    for path in _PAGES:
        page = server.get(path)
        read[path] = page.status
        shown = _shown(page.text, server.key)
        if page.status == 200 and shown:
            problem = f"the page shows {shown}"
            findings.append(finding("smoke.leak", path, problem, expected="no character of the key"))
    return Result(tuple(findings), {"status": read})


def _shown(text: str, key: str) -> str:
    """Say how much of a key is in a text; empty for nothing."""
    for form in {key, json.dumps(key)[1:-1]}:
        if form in text:
            return "the API key"
    return "the beginning of the API key" if key[:_PREFIX] in text else ""
