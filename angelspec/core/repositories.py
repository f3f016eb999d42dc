"""Names of repositories on the two hubs: ``hf:ORG/NAME[@REVISION]`` and ``modelscope:ORG/NAME[@REVISION]``."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal, Self, get_args

from angelspec.core.errors import HubError, suggest

HubKind = Literal["hf", "modelscope"]
HUBS: tuple[HubKind, ...] = get_args(HubKind)
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_]|[.-](?![.-])){0,94}(?<![.-])"
_NAME = re.compile(rf"{_PART}/{_PART}")
_REVISION = re.compile(r"[A-Za-z0-9][\w./-]*")


def is_repository_name(text: str) -> bool:
    """Whether ``text`` is an ORG/NAME that both hubs can have."""
    return _NAME.fullmatch(text) is not None


@dataclass(frozen=True)
class Repository:
    """A repository of models on a hub."""

    hub: HubKind
    name: str
    """ORG/NAME."""
    revision: str | None = None
    """Branch, tag or commit; None: the hub's default branch."""

    def __str__(self) -> str:
        return f"{self.hub}:{self.name}" + (f"@{self.revision}" if self.revision else "")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a name as users write it.

        Raises:
            HubError: an unknown hub, or no ORG/NAME behind it.
        """
        hub, colon, rest = text.partition(":")
        grammar = "write hf:ORG/NAME[@REVISION] or modelscope:ORG/NAME[@REVISION]"
        if not colon or hub not in HUBS:
            raise HubError(f"'{text}' names no known hub{suggest(hub, HUBS)}", mend=grammar)
        name, at, revision = rest.partition("@")
        if not is_repository_name(name):
            raise HubError(f"'{text}' has no ORG/NAME behind '{hub}:' that a hub would accept", mend=grammar)
        if at and not _REVISION.fullmatch(revision):
            raise HubError(f"'{text}' has no usable revision behind '@'", mend=grammar)
        return cls(hub, name, revision or None)

    def at(self, revision: str | None) -> Self:
        """The same repository at another revision."""
        return replace(self, revision=revision)


def names_a_hub(text: str) -> bool:
    """Whether ``text`` is written as a repository name rather than as a path."""
    return text.partition(":")[0] in HUBS and ":" in text
