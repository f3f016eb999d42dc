"""What publishing and pulling ask of a hub; ``hugging_face`` and ``modelscope`` answer through the official clients.

Every method asks the hub once and raises what its client raises: retrying and judging is ``patience``'s and
``failures``' work, so that it is the same for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol

from angelspec.core.repositories import HubKind
from angelspec.hub.staging import StagedFile


@dataclass(frozen=True)
class RemoteFile:
    """A file as a hub lists it."""

    size: int
    sha256: str | None = None
    """Of its content; None where the hub does not tell."""
    git_sha1: str | None = None
    """Of its content as a git blob, which the Hugging Face hub tells of small files."""

    def differs_from(self, size: int, sha256: str, git_sha1: str) -> str | None:
        """In what it differs from such a file: "size" or "hash"; None: in nothing that the hub tells."""
        if self.size != size:
            return "size"
        if self.sha256 is not None:
            return None if self.sha256 == sha256 else "hash"
        if self.git_sha1 is not None:
            return None if self.git_sha1 == git_sha1 else "hash"
        return None

    @property
    def has_hash(self) -> bool:
        """Whether the hub tells a hash."""
        return self.sha256 is not None or self.git_sha1 is not None


class Hub(Protocol):
    """One hub at one endpoint, with one token."""

    kind: HubKind
    endpoint: str
    default_branch: str

    @property
    def tokens(self) -> tuple[str, ...]:
        """What must never be shown."""

    def account(self) -> str:
        """Whose token it is; asks the hub.

        Raises:
            AccessDenied: there is no token.
        """

    def is_private(self, name: str) -> bool | None:
        """Whether the repository is private; None: there is none (that this token may see)."""

    def create(self, name: str, *, private: bool, license: str) -> None:
        """Create the repository with that visibility; fails if it exists."""

    def need_branch(self, name: str, branch: str) -> None:
        """Create the branch unless it exists.

        Raises:
            NotOnHub: it does not, and this hub's client can't create one.
        """

    def snapshot(self, name: str, revision: str | None) -> str:
        """The exact revision to read at: a commit where the hub has a name for it, else the branch or tag itself."""

    def files(self, name: str, revision: str) -> dict[str, RemoteFile]:
        """All files by path."""

    def commit(
        self, name: str, files: Sequence[StagedFile], *, remove: Sequence[str], branch: str, message: str
    ) -> str:
        """Upload what the hub lacks, put all files into one commit that removes the paths ``remove`` as well, and
        return the revision to read back at."""

    def download(self, name: str, path: str, *, revision: str, into: Path, expected: RemoteFile) -> Path:
        """Fetch one file into a folder, going on where an earlier attempt was cut off."""

    def url(self, name: str) -> str:
        """The repository's page."""


def connect(kind: HubKind) -> Hub:
    """The hub of that kind, at the endpoint and with the token that its own variables and log-in say.

    Raises:
        MissingRequirement: its client is not installed.
    """
    return _CONNECT[kind]()


def require_clients(kinds: Iterable[HubKind]) -> None:
    """Raises MissingRequirement where the client of one of these hubs is not installed."""
    for kind in kinds:
        import_module(_MODULES[kind])


def _hugging_face() -> Hub:
    from angelspec.hub.hugging_face import HuggingFace

    return HuggingFace()


def _modelscope() -> Hub:
    from angelspec.hub.modelscope import ModelScope

    return ModelScope()


_CONNECT: Mapping[HubKind, Callable[[], Hub]] = {"hf": _hugging_face, "modelscope": _modelscope}
_MODULES: Mapping[HubKind, str] = {"hf": "angelspec.hub.hugging_face", "modelscope": "angelspec.hub.modelscope"}
"""Those that import a client."""
