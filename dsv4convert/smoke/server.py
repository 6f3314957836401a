"""One server: its pages, its key, and whether it is alive.

Every request has a time limit. What can go wrong with one is a `Trouble`; no text of it holds the key.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from dsv4convert.errors import EnvironmentFault, Finding, finding
from dsv4convert.files import printable

#: Modules of the extra `[smoke]`, and what pictures need besides.
LIBRARIES: Final = ("openai", "anthropic", "httpx")
PICTURE_LIBRARY: Final = "PIL"
#: Seconds that a healthy server may take to say so: SGLang generates a token for it, and answers within 20.
_HEALTH_SECONDS: Final = 40.0
#: Bytes of a page that are kept: no page of SGLang comes near.
_LONGEST_PAGE: Final = 64 << 20

Kind = Literal["timeout", "connection", "status", "protocol", "pictures"]


class Trouble(Exception):
    """A request that brought no usable answer.

    Attributes:
        kind: Why: no answer in time, no connection, an error status, an answer that breaks the protocol, or a
            prompt that lost pictures or has too many.
        status: HTTP status, 0 without one.
    """

    def __init__(self, kind: Kind, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.kind, self.status = kind, status


@dataclass(frozen=True, slots=True)
class Page:
    """A response: HTTP status and text."""

    status: int
    text: str

    def json(self) -> Any:
        """Return the content of a JSON page.

        Raises:
            Trouble: it is none.
        """
        try:
            return json.loads(self.text)
        except ValueError:
            raise Trouble("protocol", f"the answer is no JSON: {printable(self.text, 80)}") from None


def root_of(url: str) -> str:
    """Return the address of a server without ``/v1`` and final slash.

    Raises:
        ValueError: the text is no http address of a host.
    """
    parts = urlsplit(url)
    # `port` raises for what is no port.
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or (parts.port is not None and parts.port < 1)
    ):
        raise ValueError(f"expected http://HOST:PORT, got {url!r}")
    if parts.query or parts.fragment or parts.username or parts.password:
        raise ValueError(f"expected http://HOST:PORT without user, query or fragment, got {url!r}")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1').rstrip('/')}"


@dataclass(slots=True)
class Server:
    """A server that was reached.

    Attributes:
        url: Its address, as `root_of` returns it.
        key: API key; empty for none.
        seconds: Time limit of one request.
        model: Name of the model it serves.
        context: Longest request in tokens, None if it does not say.
        info: Its ``/server_info``; empty if it has none.
    """

    url: str
    key: str = field(repr=False)
    seconds: float
    model: str = ""
    context: int | None = None
    info: Mapping[str, Any] = field(default_factory=dict, repr=False)
    _client: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        import httpx

        self._client = httpx.Client(timeout=self.seconds)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    @property
    def speculates(self) -> bool:
        """Tell whether the server uses a draft."""
        return bool(self.info.get("speculative_algorithm"))

    @property
    def grammar_refusal(self) -> str:
        """Say why the server cannot hold an answer to a grammar; empty if it can."""
        if self.info.get("speculative_algorithm") == "DSPARK":
            return "SGLang 0.5.16 refuses grammars under DSpark"
        if self.info.get("grammar_backend") == "none":
            return "the server was started with `--grammar-backend none`"
        return ""

    def get(self, path: str, *, key: str | None = None, seconds: float | None = None) -> Page:
        """Fetch a page; `key` replaces the server's, empty for none."""
        return self._request("GET", path, None, key, seconds)

    def post(self, path: str, body: Mapping[str, Any], *, key: str | None = None) -> Page:
        """Send a JSON body."""
        return self._request("POST", path, body, key, None)

    def _request(self, method: str, path: str, body: Any, key: str | None, seconds: float | None) -> Page:
        limit = seconds or self.seconds
        with self.troubles(limit):
            headers = self._headers(key)
            answer = self._client.request(method, self.url + path, json=body, headers=headers, timeout=limit)
            return Page(answer.status_code, answer.text[:_LONGEST_PAGE])

    def lines(self, path: str, body: Mapping[str, Any]) -> list[str]:
        """Send a JSON body and return the ``data:`` lines of the answer, a stream of events."""
        with (
            self.troubles(self.seconds),
            self._client.stream("POST", self.url + path, json=body, headers=self._headers(None)) as answer,
        ):
            if answer.status_code != 200:
                answer.read()
                text = f"status {answer.status_code}: {answer.text[:200]}"
                raise Trouble("status", text, answer.status_code)
            return [line[5:].strip() for line in answer.iter_lines() if line.startswith("data:")]

    def _headers(self, key: str | None) -> dict[str, str]:
        given = self.key if key is None else key
        return {"Authorization": f"Bearer {given}"} if given else {}

    def clean(self, text: object) -> str:
        """Return text of a server as one line that holds neither control characters nor the key."""
        shown = f"{text}"
        return printable(shown.replace(self.key, "<key>") if self.key else shown)

    @contextmanager
    def troubles(self, seconds: float) -> Iterator[None]:
        """Turn what the client libraries raise into `Trouble`."""
        try:
            yield
        except Trouble as trouble:
            raise Trouble(trouble.kind, self.clean(trouble), trouble.status) from None
        except _library_errors() as error:
            raise self._trouble(error, seconds) from None

    def _trouble(self, error: Exception, seconds: float) -> Trouble:
        # The libraries have classes of their own for the same things, of two generations of httpx.
        names = {kind.__name__ for kind in type(error).__mro__}
        status = getattr(error, "status_code", None)
        if isinstance(status, int) and status >= 400:
            return Trouble("status", self.clean(f"status {status}: {_message(error)}"), status)
        if any("Timeout" in name for name in names):
            return Trouble("timeout", f"no answer within {seconds:g} s")
        if names & {"APIConnectionError", "TransportError"}:
            return Trouble("connection", self.clean(f"the connection failed: {_message(error)}"))
        return Trouble("protocol", self.clean(f"the client cannot read the answer: {_message(error)}"))

    def is_alive(self) -> bool:
        """Tell whether the server still answers."""
        try:
            return self.get("/health", seconds=_HEALTH_SECONDS).status < 500
        except Trouble:
            return False


def _message(error: Exception) -> str:
    cause = error.__cause__
    return f"{error}{f' ({cause})' if cause and f'{cause}' not in f'{error}' else ''}"


def _library_errors() -> tuple[type[Exception], ...]:
    found: list[type[Exception]] = [json.JSONDecodeError]
    # Clients built on httpx2 let its errors through while a stream is read.
    for library, name in (
        ("openai", "OpenAIError"),
        ("anthropic", "AnthropicError"),
        ("httpx", "HTTPError"),
        ("httpx2", "HTTPError"),
        ("pydantic", "ValidationError"),
    ):
        if library in sys.modules:
            found.append(getattr(sys.modules[library], name))
    return tuple(found)


def require_libraries(names: Sequence[str] | None = None) -> None:
    """Refuse to begin without client libraries, by default all of the extra.

    Raises:
        EnvironmentFault: ``env.missing``; all that are missing together.
    """
    hint = "pip install 'dsv4convert[smoke]'"
    problem = "is not installed; the server is asked with it"
    missing = [name for name in names or LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise EnvironmentFault(finding("env.missing", name, problem, hint=hint) for name in missing)


def open_server(url: str, key: str, seconds: float) -> Server:
    """Reach a server and learn what it serves.

    Args:
        url: Its address, as `root_of` returns it.
        key: API key; empty for none.
        seconds: Time limit of one request.

    Raises:
        EnvironmentFault: nothing answers, the server is not ready, refuses the key, or lists no model.
    """
    server = Server(url, key, seconds)
    with ExitStack() as stack:
        stack.enter_context(server)
        try:
            _learn(server)
        except Trouble as trouble:
            raise EnvironmentFault(_unreachable(url, f"{trouble}")) from None
        stack.pop_all()
    return server


def _learn(server: Server) -> None:
    _require_health(server)
    listed = server.get("/v1/models")
    if listed.status in (401, 403):
        problem = "refuses the key" if server.key else "asks for a key, and none was given"
        fault = finding("smoke.key", server.url, f"the server {problem}", found=f"{listed.status}")
        raise EnvironmentFault(fault)
    server.model, server.context = _model(listed, server.url)
    info = server.get("/server_info")
    server.info = _object(info) if info.status == 200 else {}


def _require_health(server: Server) -> None:
    # Servers without this page are judged by their models.
    health = server.get("/health", seconds=min(server.seconds, _HEALTH_SECONDS))
    if health.status >= 500:
        problem = "the server answers, but is not ready"
        raise EnvironmentFault(finding("smoke.not-ready", server.url, problem, found=f"{health.status}"))


def _model(page: Page, url: str) -> tuple[str, int | None]:
    models = _object(page).get("data") if page.status == 200 else None
    first = models[0] if isinstance(models, list) and models else None
    if not isinstance(first, dict) or not isinstance(first.get("id"), str):
        problem = "`/v1/models` lists no model, so that nothing can be asked"
        raise EnvironmentFault(finding("smoke.no-model", url, problem, found=f"status {page.status}"))
    context = first.get("max_model_len")
    return first["id"], context if isinstance(context, int) else None


def _object(page: Page) -> Mapping[str, Any]:
    content = page.json()
    return content if isinstance(content, dict) else {}


def _unreachable(url: str, why: str) -> Finding:
    return finding("smoke.unreachable", url, "no server answers here", found=why)
