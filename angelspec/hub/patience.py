"""Bounded retries: only where trying again can help, as long as the server asks, and never for ever."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from angelspec.hub.failures import judge

T = TypeVar("T")

ATTEMPTS = 4
"""Per operation, the first one included. The clients retry single requests besides."""
_FIRST_WAIT, _LONGEST_WAIT = 2.0, 300.0
"""Seconds. A server that asks for a longer pause gets its answer from the user."""


def with_patience(
    call: Callable[[], T],
    *,
    doing: str,
    place: str,
    tokens: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
) -> T:
    """Call until it succeeds, fails for good, or has been tried ``ATTEMPTS`` times.

    Args:
        call: may be called again after a failure.
        doing: what it does, as "upload the files".
        place: the repository, as users write it.
        tokens: never shown.
        say: told about every wait.

    Raises:
        HubError: the failure, judged.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return call()
        except Exception as error:  # judged at once; what is no failure of a hub goes on
            failure = judge(error, doing=doing, place=place, tokens=tokens)
            if failure is None:
                raise
            wait = _FIRST_WAIT * 2 ** (attempt - 1) if failure.retry_after is None else failure.retry_after
            if not failure.retryable or attempt == ATTEMPTS or wait > _LONGEST_WAIT:
                raise failure.error from error
            say(f"{failure.error.message}; trying again in {wait:g} s ({attempt} of {ATTEMPTS - 1})")
            time.sleep(wait)
    raise AssertionError("unreachable")
