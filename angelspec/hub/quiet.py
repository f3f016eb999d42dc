"""The hubs' clients at work without their own log lines, which show presigned URLs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_clients() -> Iterator[None]:
    """No log lines meanwhile; failures come as exceptions, and waits are told by ``patience``.

    All logging is held back, not the clients' own loggers: those set their level anew when they are first imported.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
