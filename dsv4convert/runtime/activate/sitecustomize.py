"""Put this directory on PYTHONPATH and set ENABLE_DSV4_SM80=1: every Python process then patches SGLang.

Python imports one `sitecustomize` at start-up. This one asks the environment first and costs nothing when the
answer is no; then it hands over to the next `sitecustomize` on the path, which it would otherwise hide. That
may be another copy of this file, so that the places that had their turn are kept where every copy finds them.
"""

from __future__ import annotations

import os
import sys

# The directory on the path. The file in it may be a link, as some installers make them.
_HERE = os.path.realpath(os.path.dirname(__file__))


def _activate() -> None:
    if not {"ENABLE_DSV4_SM80", "ENABLE_SGLANG_DSV4_A100_PATCH"} & os.environ.keys():
        return
    try:
        from dsv4convert.runtime import hook
    except ImportError as error:
        # Compilers and tools in other environments inherit the variable; they do not import SGLang.
        print(f"dsv4convert: {sys.executable} cannot import the SM80 shim: {error}", file=sys.stderr)
    else:
        hook.install()


def _hand_over() -> None:
    import importlib.machinery

    visited: set[str] = sys.__dict__.setdefault("dsv4convert_sitecustomize", set())
    visited.add(_HERE)
    others = [entry for entry in sys.path if os.path.realpath(entry) not in visited]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        import importlib.util

        visited.add(os.path.realpath(os.path.dirname(spec.origin or "")))
        module = importlib.util.module_from_spec(spec)
        # The import system takes what lies here when this file is done.
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_activate()
_hand_over()
