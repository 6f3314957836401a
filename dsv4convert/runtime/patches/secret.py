"""Keys: no log and no answer shows them, and the check that asks for one cannot be led astray."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

#: Fields of ``ServerArgs`` whose value nobody but the server may see.
SECRETS: Final = ("api_key", "admin_api_key", "ssl_keyfile_password")
HIDDEN: Final = "<hidden>"
#: What a host and a port are made of (RFC 3986, 3.2.2); ``/ ? # @ \\`` would end the authority of a URL.
_HOST: Final = re.compile(rb"[A-Za-z0-9._~%!$&'()*+,;=:\[\]-]*")
_STATUS: Final = 400
_ANSWER: Final = (
    b'{"error":"The Host header or the path is malformed: expected HOST or HOST:PORT, and a plain path"}'
)


def args_repr(stock: Any, module: ModuleType) -> Callable[..., str]:
    """S1: the text of the arguments, which the server logs at start."""

    def __repr__(self: Any) -> str:
        shown = copy.copy(self)
        for name in SECRETS:
            if getattr(self, name, None):
                object.__setattr__(shown, name, HIDDEN)
        return str(stock(shown))

    return __repr__


def builtins(stock: Any, module: ModuleType) -> Callable[..., Any]:
    """S2: what every information endpoint passes its answer through.

    The stock function calls itself by its name in the module, so that each nested level comes by here.
    """

    def msgspec_to_builtins(obj: Any) -> Any:
        plain = stock(obj)
        if isinstance(plain, dict):
            for name in SECRETS:
                if plain.get(name):
                    plain[name] = HIDDEN
        return plain

    return msgspec_to_builtins


def key_check(stock: Any, module: ModuleType) -> Callable[..., None]:
    """S3: what stands before the endpoints and asks for the key.

    The stock check exempts ``/health`` and ``/metrics`` by the path of ``Request.url``. Starlette before
    1.0.1 makes that URL from the Host header, while requests are routed by the path of the scope: with the
    header ``x/health?`` every endpoint is exempt. The two must be the same for the check to mean anything.
    """

    def add_api_key_middleware(app: Any, *, api_key: str | None, admin_api_key: str | None) -> None:
        stock(app, api_key=api_key, admin_api_key=admin_api_key)
        # What is added last runs first.
        app.add_middleware(OnePathOnly)

    return add_api_key_middleware


class OnePathOnly:
    """ASGI middleware that answers 400 unless a request is checked and routed by one and the same path."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or is_plain(scope):
            await self.app(scope, receive, send)
            return
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(_ANSWER))]
        await send({"type": "http.response.start", "status": _STATUS, "headers": headers})
        await send({"type": "http.response.body", "body": _ANSWER})


def is_plain(scope: Any) -> bool:
    """Tell whether every Host header is a host, and `Request.url` has the path that routes the request."""
    from starlette.requests import Request

    if not all(_HOST.fullmatch(value) for name, value in scope["headers"] if name.lower() == b"host"):
        return False
    try:
        return bool(Request(scope).url.path == scope["path"])
    except ValueError:  # A bracket without its twin.
        return False
