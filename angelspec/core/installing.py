"""How a part of angelspec that is not installed is installed: the words of every error that says so."""

from __future__ import annotations

from typing import Literal

Extra = Literal["serve", "demo", "modelscope", "tracking"]
_SERVE = (
    "SGLang pins other versions, so give it an environment of its own, in the clone of angelspec: "
    "python3 -m venv .venv-serve && .venv-serve/bin/pip install -e '.[serve,demo]'"
)


def install_hint(extra: Extra) -> str:
    """The commands that install an optional part."""
    return _SERVE if extra == "serve" else f"in the clone of angelspec: pip install -e '.[{extra}]'"
