"""How a server is reached: its address, what an answer that is no answer means."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx

from angelspec.core.addresses import without_login
from angelspec.core.engine import SERVER_KEY_VARIABLE
from angelspec.serving.failures import RequestRefused, ServerUnreachable, ServingError
from angelspec.serving.wire import error_words

CONNECT_SECONDS = 10.0


def is_address(url: str) -> bool:
    """Whether a server can have this address: http:// or https://, a host and port that there can be, no query."""
    try:
        httpx.URL(url)
        parts = urlsplit(url)
        (parts.hostname or "").encode("idna")
        bare = not parts.query and not parts.fragment  # paths are put behind it
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and bare
    except (ValueError, httpx.InvalidURL):
        return False


def _authorization(api_key: str | None) -> dict[str, str]:
    key = (api_key or "").strip()  # a file's line end is no part of it
    if not key:
        return {}
    if not (key.isascii() and key.isprintable()):
        raise ServingError(
            "the API key holds characters that no key can have",
            mend=f"copy it again into --api-key or {SERVER_KEY_VARIABLE}: it must be printable ASCII",
        )
    return {"Authorization": f"Bearer {key}"}


def http_settings(
    url: str, *, api_key: str | None, timeout: float, connections: int | None = None, verify: bool = True
) -> dict[str, Any]:
    """Arguments of an httpx client of the server.

    Raises:
        ServingError: the url is no address, or the key can't be sent.
    """
    if not is_address(url):
        raise ServingError(f"{without_login(url)} is no address of a server", mend="write it as http://HOST:PORT")
    host = urlsplit(url).hostname or ""
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    return {
        "base_url": url.rstrip("/"),
        "headers": _authorization(api_key),
        "verify": verify,
        "timeout": httpx.Timeout(timeout, connect=CONNECT_SECONDS),
        "limits": httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
        "trust_env": not local,  # a proxy of the environment must not stand before a local server
    }


def _shown(response: httpx.Response) -> str:
    return without_login(str(response.request.url))


def check(response: httpx.Response, body: bytes) -> None:
    """Raise ``RequestRefused`` for an answer of 4xx, ``ServerUnreachable`` for 5xx."""
    if response.status_code < 400:
        return
    words = error_words(body)
    if response.status_code < 500:
        mend = None
        if response.status_code in (401, 403):
            mend = f"give the server's API key: --api-key KEY, or {SERVER_KEY_VARIABLE}"
        elif response.status_code == 404:
            words = f"{_shown(response)}: {words}"
            mend = "give the address of an SGLang server alone, without /v1: http://HOST:PORT"
        raise RequestRefused(words, status=response.status_code, mend=mend)
    raise ServerUnreachable(
        f"{_shown(response)}: the server fails ({response.status_code}): {words}", mend="see the server's log"
    )


def json_object(response: httpx.Response) -> dict[str, Any]:
    """The JSON object of a checked answer."""
    check(response, response.content)
    try:
        value = response.json()
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ServerUnreachable(f"{_shown(response)}: the answer is no JSON object", mend="is this an SGLang server?")
    return value


@contextlib.contextmanager
def reaching(url: str) -> Iterator[None]:
    """Turn a request that was not answered into ``ServerUnreachable``."""
    try:
        yield
    except httpx.RequestError as error:
        what = "no answer in time" if isinstance(error, httpx.TimeoutException) else str(error) or type(error).__name__
        raise ServerUnreachable(f"{url}: {what}", mend="is the server running? start it: angelspec serve") from error
