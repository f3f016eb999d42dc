"""What can go wrong between us and a server, told apart by what the user can do about it.

Each kind ends a command with an exit code of its own (3 to 8 and 13 are the hubs').
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from angelspec.core.errors import AngelspecError

if TYPE_CHECKING:
    from angelspec.serving.answers import ChatAnswer, GenerateAnswer


class ServingError(AngelspecError):
    """A server that cannot be started, reached or used; its kinds follow."""


class RequestRefused(ServingError):
    """The server does not take a request as it is (4xx): a bad label, a prompt that is too long, a wrong key.

    Args:
        message: the server's own words.
        status: HTTP status.
    """

    def __init__(self, message: str, *, status: int, mend: str | None = None) -> None:
        super().__init__(message, mend=mend)
        self.status = status


class StartFailed(ServingError):
    """The server ended, or did not become ready in time."""

    exit_code = 9


class NotSpeculating(ServingError):
    """The server answers but does not speculate: no plugin, or a trained drafter of which nothing is accepted."""

    exit_code = 10


class ServerUnreachable(ServingError):
    """Nothing answers, or the server fails (5xx)."""

    exit_code = 11


class StreamBroken(ServerUnreachable):
    """The connection ended in the middle of an answer.

    Args:
        message: what happened.
        partial: what had come until then.
    """

    def __init__(self, message: str, *, partial: ChatAnswer | GenerateAnswer, mend: str | None = None) -> None:
        super().__init__(message, mend=mend)
        self.partial = partial


class BenchFailed(ServingError):
    """A load test whose figures can't be used: requests failed."""

    exit_code = 12
