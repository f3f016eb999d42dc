"""SIGINT and SIGTERM as a flag that the loop looks at between updates."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class Interruption:
    """Inside this context the first SIGINT or SIGTERM sets ``requested``; a second one acts as it usually does."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(number, self._before[number])

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
