"""How long a busy hub asks to wait, in each of the ways in which one says it."""

from __future__ import annotations

import time
from email.utils import formatdate
from types import SimpleNamespace

import pytest

from angelspec.hub.failures import _retry_after


class Busy(Exception):
    def __init__(self, headers: dict[str, str]) -> None:
        super().__init__("slow down")
        self.response = SimpleNamespace(headers=headers)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "7"}, 7),
        ({"Retry-After": formatdate(time.time() + 7200, usegmt=True)}, 7200),
        ({"Retry-After": formatdate(time.time() - 30, usegmt=True)}, 0),
        ({"RateLimit": '"api";r=0;t=55'}, 55),
        ({"Retry-After": "7", "RateLimit": '"api";r=0;t=55'}, 7),
    ],
)
def test_said(headers, seconds):
    assert _retry_after(Busy(headers)) == pytest.approx(seconds, rel=0.5)  # a date is nearer by the time of the test


@pytest.mark.parametrize("headers", [{}, {"Retry-After": "soon"}, {"RateLimit": "none"}])
def test_not_said(headers):
    assert _retry_after(Busy(headers)) is None
