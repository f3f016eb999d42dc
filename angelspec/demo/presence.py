"""Which columns run on which machine right now: visitors that ask at once slow each other down, and are told so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from angelspec.demo.stream import ColumnState


class Presence:
    """All columns that run, of all visitors of the page."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[object, ColumnState]] = {}

    @contextmanager
    def running(self, visit: object, state: ColumnState) -> Iterator[None]:
        """While a column runs; it and those of other visits that run on its machine meanwhile are marked as shared.

        Args:
            visit: whose column it is; those of one visit run together because the visitor said so.
            state: of the column.
        """
        machine = state.column.server.machine
        for other_visit, other in self._running.values():
            if other_visit is not visit and other.column.server.machine == machine:
                other.shared = state.shared = True
        self._running[id(state)] = visit, state
        try:
            yield
        finally:
            del self._running[id(state)]
