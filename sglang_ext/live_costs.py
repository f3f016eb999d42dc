"""The costs that an engine plans its steps by, on all ranks alike."""

from __future__ import annotations

from angelspec.core.step_costs import StepCosts
from sglang_ext.clock import TimedStep
from sglang_ext.cost_tracking import CostTracker
from sglang_ext.metrics import Counters
from sglang_ext.ranks import Ranks

_LOOK_EVERY = 16
"""Steps between two looks at whether costs have drifted."""
_PAUSE = 20.0
"""A step that took so many times what it was to take was interrupted: it says nothing of the costs."""


class LiveCosts:
    """Measured costs, kept true by what served steps take.

    Args:
        measured: at start-up; None: not yet, and then nothing is foretold or learnt.
        ranks: of the engine.
        counters: count how far what was foretold is off.
    """

    def __init__(self, measured: StepCosts | None, *, ranks: Ranks, counters: Counters) -> None:
        self.measured = self.current = measured
        self._ranks, self._counters = ranks, counters
        self._tracker = None if measured is None else CostTracker(measured)
        self._steps = 0

    def observe(self, timed: TimedStep) -> None:
        """Learn from a step that has passed."""
        if self._tracker is None or self.current is None:
            return
        foretold = self.current.seconds(timed.batch_size, drafted=timed.drafted, slots=timed.slots)
        if timed.taken is not None and foretold is not None and timed.taken < _PAUSE * foretold:
            self._counters.cost(foretold=foretold, taken=timed.taken)
        self._tracker.observe(timed)

    def renewed(self) -> bool:
        """Whether ``current`` is another table than before; to be asked once a step on every rank."""
        self._steps += 1
        if self._tracker is None or self._steps % _LOOK_EVERY:
            return False
        drifted = self._ranks.is_first and self._tracker.drifted()
        costs = self._ranks.agree(self._tracker.current() if drifted else None)
        if costs is None:
            return False
        self.current = costs
        return True
