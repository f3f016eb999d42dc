"""Break-even with MTP: the accepted length at which a drafter pays for its step (arXiv 2607.25852, section 5).

A step takes T = T_draft + T_verify + T_sample and commits MAL tokens per row. Two drafters are equally fast where
MAL / T is the same, so a drafter needs MAL_mtp * T / T_mtp to match MTP.
"""

from __future__ import annotations

from angelspec.evaluation.report import Report
from angelspec.evaluation.results import StepTimes

PLAIN = "plain decoding"
"""What step times call decoding without a drafter; it reaches 1."""
PAPER_MTP_LENGTH = 3.0
PAPER_NEEDED_LENGTHS = {"DFlash": 4.61, "DFly": 5.14}
"""Table 8: what the paper's block drafters need where MTP-3 reaches ``PAPER_MTP_LENGTH``."""


def needed_length(mtp_length: float, *, seconds: float, mtp_seconds: float) -> float:
    """The accepted length that a drafter needs to match MTP.

    Args:
        mtp_length: MTP's accepted length.
        seconds: the drafter's step.
        mtp_seconds: MTP's step, at the same batch size.
    """
    return mtp_length * seconds / mtp_seconds


class BreakEven:
    """The break-even figures of a report at one temperature, against its first MTP drafter.

    Args:
        report: with step times and an MTP drafter, or everything here is empty.
    """

    def __init__(self, report: Report, *, temperature: float) -> None:
        self._report, self._temperature = report, temperature
        self.mtp = next((drafter.name for drafter in report.drafters if drafter.identity.get("kind") == "mtp"), None)
        """The MTP drafter that is to be matched; None: there is none."""
        times = [item for item in report.step_times if item.temperature == temperature]
        self._times = {(item.proposer, item.batch_size): item for item in times} if self.mtp else {}

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Measured batch sizes, ascending."""
        return tuple(sorted({batch_size for _, batch_size in self._times}))

    @property
    def others(self) -> tuple[str, ...]:
        """The drafters that are compared with MTP, plain decoding last."""
        timed = dict.fromkeys(name for name, _ in self._times)
        return tuple(name for name in timed if name not in (self.mtp, PLAIN)) + ((PLAIN,) if PLAIN in timed else ())

    def times(self, drafter: str, *, batch_size: int) -> StepTimes | None:
        """A drafter's step; None: not measured."""
        return self._times.get((drafter, batch_size))

    def reached(self, drafter: str, *, workload: str | None) -> float | None:
        """Accepted length on finished answers of a workload (None: all); None: no such answers."""
        if drafter == PLAIN:
            return 1.0
        group = self._report.pooled(
            drafter, temperature=self._temperature, workloads=None if workload is None else [workload]
        )
        return group.counts.mean_accepted_length

    def needed(self, drafter: str, *, batch_size: int, mtp_length: float | None) -> float | None:
        """Accepted length that the drafter needs where MTP reaches ``mtp_length``; None: not measured."""
        ours = self._times.get((drafter, batch_size))
        theirs = None if self.mtp is None else self._times.get((self.mtp, batch_size))
        if ours is None or theirs is None or mtp_length is None:
            return None
        return needed_length(mtp_length, seconds=ours.seconds_per_step, mtp_seconds=theirs.seconds_per_step)
