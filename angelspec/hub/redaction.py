"""Nothing that could be used to log in, or to read a private file, reaches a screen or a publication."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from angelspec.core.addresses import without_login

_HIDDEN = "***"
_TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "MODELSCOPE_API_TOKEN", "OPENAI_API_KEY", "WANDB_API_KEY")
_TOKEN_SHAPES = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|ms-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{18,}|sk-[A-Za-z0-9_-]{20,}"
    r"|gh[pousr]_[A-Za-z0-9]{30,}|AKIA[0-9A-Z]{16})\b"
)
"""How tokens of the two hubs, of OpenAI's API, of GitHub and of AWS look."""
_QUERY = re.compile(r"((?:https?:/)?/[^\s?'\"<>]+)\?[^\s'\"<>]*")
_HEADER = re.compile(r"""(?i)\b(authorization["']?[ \t]*[=:][ \t]*["']?)(?:[\w-]+[ \t]+)?\S+""")
"""An Authorization header: its scheme, if it names one, and the credential."""
_PASSWORD = re.compile(r"(?i)\b[a-z][a-z0-9+.-]*://[^\s/?#'\"<>:@]*:[^\s/?#'\"<>@]+@")
_BEARER = re.compile(r"(?i)\b((?:bearer|authorization|m_session_id)[=:\s]+)\S+")


def known_tokens() -> tuple[str, ...]:
    """Values of the environment variables that usually hold tokens."""
    return tuple(value for name in _TOKEN_VARIABLES if (value := os.environ.get(name)))


def redact(text: str, tokens: Iterable[str] = ()) -> str:
    """``text`` without tokens, without log-ins in addresses, and without the query part of URLs and paths, which signs
    presigned uploads."""
    for token in (*tokens, *known_tokens()):
        text = text.replace(token, _HIDDEN)
    text = without_login(_TOKEN_SHAPES.sub(_HIDDEN, text))
    for pattern in (_HEADER, _BEARER):
        text = pattern.sub(rf"\1{_HIDDEN}", text)
    return _QUERY.sub(r"\1", text)


def holds_a_token(text: str) -> bool:
    """Whether a text that is about to be published contains one of the user's tokens, something shaped like one, or an
    address with a password in it."""
    shapes = (_TOKEN_SHAPES, _PASSWORD)
    return any(token in text for token in known_tokens()) or any(shape.search(text) for shape in shapes)
