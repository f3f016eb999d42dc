"""What came of a step, until it is learnt from.

With overlap a step is launched before the results of the one before are known to the host, so some of its requests may
have ended already: what it yields for them is text behind the end of their answers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from angelspec.ops.step_planner import Step
from sglang_ext.metrics import StepReport
from sglang_ext.requests import ServedRequest


@dataclass(eq=False)
class Outcome:
    """A launched step."""

    step: Step
    rows: list[ServedRequest]
    report: StepReport
    outputs: list[int]
    """Output tokens of each row's request before the step."""
    ended: set[int] = field(default_factory=set)
    """Rows whose request had ended before, or was retracted: their tokens are dropped."""

    def ends(self, known: ServedRequest) -> bool:
        """A request has ended: whether with this step. If before it, its row is noted."""
        for row, one in enumerate(self.rows):
            if one is known:
                if len(known.req.output_ids) > self.outputs[row]:
                    return True
                self.ended.add(row)
        return False

    def leave_out_dropped(self) -> None:
        """Note the rows whose tokens SGLang drops and nobody tells: a request that ended with its first token, or was
        retracted, while the step was on its way."""
        for row, known in enumerate(self.rows):
            req = known.req
            if len(req.output_ids) <= self.outputs[row] and (req.is_retracted or req.finished()):
                self.ended.add(row)

    @property
    def accepted(self) -> list[int | None]:
        """Accepted proposals by row; None where the tokens are dropped."""
        return [None if row in self.ended else number - 1 for row, number in enumerate(self.report.committed)]
