"""What can go wrong between us and a hub, told apart by what the user can do about it.

Each kind ends a command with an exit code of its own. The clients wrap errors in each other and change their HTTP
library between versions, so an error is judged by the status, the server's own words and the library it comes from,
wherever they stand in its chain of causes.
"""

from __future__ import annotations

import errno
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from angelspec.core.errors import HubError
from angelspec.hub.redaction import redact

_CLIENTS = ("huggingface_hub", "modelscope_hub")
_NETWORK_LIBRARIES = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "hf_xet")
_LONGEST_WORDS = 300


_NEVER = ("UnsupportedProtocol", "InvalidURL", "InvalidSchema", "MissingSchema", "LocalProtocolError")
"""Of the network libraries: requests that no second try can mend."""
_RATE_LIMIT = re.compile(r"\bt=(\d+)")
"""Seconds until the window of a ``RateLimit`` header ends."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class AccessDenied(HubError):
    """No token, a token that is not accepted, or one that may not do this."""

    exit_code = 3


class VisibilityConflict(HubError):
    """The repository is public where a private one was meant, or the reverse."""

    exit_code = 4


class HubUnavailable(HubError):
    """The hub is busy, failing or out of reach, after all retries."""

    exit_code = 5


class ContentRefused(HubError):
    """The hub does not take what was sent."""

    exit_code = 6


class IntegrityError(HubError):
    """What a hub holds or sent is not what it should be."""

    exit_code = 7


class NotOnHub(HubError):
    """No such repository, revision or file, or none that this token may see."""

    exit_code = 8


class NotConfirmed(HubError):
    """The user did not agree to a publication, or nobody was there to ask."""

    exit_code = 13


@dataclass(frozen=True)
class Failure:
    """One failed request, judged."""

    error: HubError
    retryable: bool = False
    retry_after: float | None = None
    """Seconds that the server asks to wait."""


def judge(error: BaseException, *, doing: str, place: str, tokens: Sequence[str] = ()) -> Failure | None:
    """What an exception of a hub's client means; None: it is none of a hub's failures, but a mistake of ours.

    Args:
        error: as the client raised it.
        doing: what was attempted, e.g. "create the repository".
        place: the repository, as users write it.
        tokens: never shown.
    """
    if isinstance(error, HubError):
        return Failure(error)
    chain = list(_chain(error))
    full = next((item for item in chain if isinstance(item, OSError) and item.errno in _FULL), None)
    if full is not None:  # ours, though a client may call it trouble with the connection
        return Failure(
            HubError(f"{place}: {full.strerror} while trying to {doing}", mend="make room (`angelspec clean`)")
        )
    words = redact(_server_words(chain), tokens)
    said = f" ({words})" if words else ""
    status = next((code for code in map(_status, chain) if code is not None), None)
    if status is not None:
        return _judge_status(
            status, said=said, doing=doing, place=place, after=next(filter(None, map(_retry_after, chain)), None)
        )
    names = {type(item).__name__ for item in chain}
    texts = " ".join(" ".join(str(item).split()) for item in chain)
    if "Invalid metadata in README.md" in texts:
        return Failure(ContentRefused(f"{place}: the hub refuses the card's metadata", mend="mend README.md"))
    if "LFS batch API returned errors" in texts:
        words = redact(texts[texts.index("LFS batch API") :], tokens)[:_LONGEST_WORDS]
        return Failure(
            ContentRefused(
                f"{place}: the hub does not take a large file ({words})",
                mend="the hub's words say why; its size limits are the usual cause",
            )
        )
    if names & {"FileIntegrityError", "FileSizeMismatchError"} or "Consistency check failed" in texts:
        return Failure(
            IntegrityError(
                f"{place}: what came is not what the hub lists while trying to {doing}",
                mend="try again; behind a mirror, try the hub itself",
            )
        )
    if "XetAuthenticationError" in names:
        return Failure(_denied(403, said=said, doing=doing, place=place))
    if "OfflineModeIsEnabled" in names:
        return Failure(
            HubUnavailable(f"{place}: HF_HUB_OFFLINE forbids to {doing}", mend="unset it, or pull while online")
        )
    if any(_is_network_trouble(item) for item in chain):
        what = said or f" ({redact(_network_words(chain), tokens)})"
        return Failure(
            _unavailable(f"the connection failed{what}", doing=doing, place=place), retryable=not names & set(_NEVER)
        )
    if any(type(item).__module__.split(".")[0] in _CLIENTS for item in chain):
        return Failure(
            ContentRefused(
                f"{place}: the hub refuses to {doing}{said or f' ({names})'}",
                mend="the hub's words say why; if they do not, its status page may",
            )
        )
    return None


def _judge_status(status: int, *, said: str, doing: str, place: str, after: float | None) -> Failure:
    if status in (401, 403):
        return Failure(_denied(status, said=said, doing=doing, place=place))
    if status == 404:
        return Failure(
            NotOnHub(
                f"{place}: not found while trying to {doing}{said}",
                mend="check the name and the revision; a private repository needs a token that may see it",
            )
        )
    if status == 429:
        return Failure(
            _unavailable(f"too many requests (429){said}", doing=doing, place=place), retryable=True, retry_after=after
        )
    if status == 408 or status >= 500:
        return Failure(
            _unavailable(f"the hub fails ({status}){said}", doing=doing, place=place),
            retryable=True,
            retry_after=after,
        )
    if status in (409, 412):
        return Failure(
            ContentRefused(
                f"{place}: somebody else changed the repository meanwhile ({status}){said}",
                mend="look at what was changed, then publish again",
            )
        )
    if status == 413:
        return Failure(
            ContentRefused(
                f"{place}: too large for the hub or for a proxy on the way (413){said}",
                mend="publish without a proxy, or ask the hub for more room",
            )
        )
    return Failure(
        ContentRefused(
            f"{place}: the hub refuses to {doing} ({status}){said}",
            mend="the hub's words say why; if they do not, its status page may",
        )
    )


def _denied(status: int, *, said: str, doing: str, place: str) -> AccessDenied:
    if status == 401:
        return AccessDenied(
            f"{place}: the hub asks for a token that it accepts (401) while trying to {doing}{said}",
            mend="log in again: the token is missing, wrong, expired or for another endpoint; a gated repository asks "
            "for one whose owner has agreed to its terms",
        )
    return AccessDenied(
        f"{place}: the token may not {doing} (403){said}",
        mend="use a token that may, or ask the owner; a gated repository opens to those who agree to its terms",
    )


def _unavailable(what: str, *, doing: str, place: str) -> HubUnavailable:
    return HubUnavailable(
        f"{place}: {what} while trying to {doing}",
        mend="run the same command again later; what was sent or fetched already is not moved again",
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes. What merely was being handled meanwhile (its context) tells nothing about it."""
    item: BaseException | None = error
    while item is not None:
        yield item
        item = item.__cause__


def _status(error: BaseException) -> int | None:
    code = getattr(getattr(error, "response", None), "status_code", None) or getattr(error, "status_code", None)
    return code if isinstance(code, int) and code >= 400 else None


def _retry_after(error: BaseException) -> float | None:
    """Seconds that the server asks to wait: a number, a date, or the ``t`` of a ``RateLimit`` header."""
    headers: Any = getattr(getattr(error, "response", None), "headers", None) or {}
    value: Any = getattr(error, "retry_after", None)
    value = headers.get("Retry-After") if value is None else value
    if value is None:
        left = _RATE_LIMIT.search(headers.get("RateLimit") or "")
        return float(left[1]) if left else None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return None


def _server_words(chain: Sequence[BaseException]) -> str:
    """The server's explanation, one line."""
    for item in chain:
        words = getattr(item, "server_message", None)
        if words is None and hasattr(item, "status_code"):  # an answer, not a lost connection
            words = getattr(item, "message", None)
        if isinstance(words, str) and words.strip():
            return " ".join(words.split())[:_LONGEST_WORDS]
    return ""


def _network_words(chain: Sequence[BaseException]) -> str:
    """What the network library says, one line."""
    item = next((item for item in reversed(chain) if _is_network_trouble(item)), chain[-1])
    return " ".join(str(item).split())[:_LONGEST_WORDS] or type(item).__name__


def usable_token(token: str | None, *, variable: str) -> str | None:
    """The token, if there is one.

    Raises:
        AccessDenied: it holds what no request can carry; the token itself is not shown.
    """
    if token and not (token.isascii() and token.isprintable()):
        raise AccessDenied(
            "the token holds characters that no token can have", mend=f"copy it again, whole, into {variable}"
        )
    return token or None


def usable_endpoint(text: str, *, variable: str) -> str:
    """The endpoint, without a slash behind it.

    Raises:
        HubUnavailable: it is no address.
    """
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:  # half a pair of brackets
        usable = False
    if not usable:
        raise HubUnavailable(f"{variable}={redact(text)} is no address", mend="write it as https://HOST")
    return text.rstrip("/")


def _is_network_trouble(error: BaseException) -> bool:
    if isinstance(error, ConnectionError | TimeoutError | json.JSONDecodeError):
        return True
    return getattr(error, "retryable", False) is True or type(error).__module__.split(".")[0] in _NETWORK_LIBRARIES
