"""Addresses as they may be shown."""

from __future__ import annotations

import re

_LOGIN = re.compile(r"(?<=://)[^/?#\s]*@")


def without_login(text: str) -> str:
    """A text without the user names and passwords of the addresses in it."""
    return _LOGIN.sub("", text)
