"""Keys stay out of logs and answers: they are replaced by a mark wherever SGLang prints its arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

#: Fields of ``ServerArgs`` whose value nobody but the server may see.
SECRETS: Final = ("api_key", "admin_api_key", "ssl_keyfile_password")
HIDDEN: Final = "<hidden>"


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
