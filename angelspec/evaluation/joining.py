"""One report over drafters that were measured apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from angelspec.core.errors import DataError
from angelspec.evaluation.report import DrafterFacts, Report


def join_reports(reports: Sequence[Report], *, title: str, commands: Sequence[str]) -> Report:
    """One report over drafters that were measured apart: same target, mode, suites and settings.

    What is comparable only side by side, shortlists and step times, is left out.

    Raises:
        DataError: the reports differ in one of them (named), or share a drafter's name with different identity.
    """
    first = reports[0]
    for report in reports[1:]:
        for name in ("target", "mode", "settings", "suites"):
            if getattr(report, name) != getattr(first, name):
                raise DataError(
                    f"reports '{first.title}' and '{report.title}' differ in their {name}",
                    mend="compare drafters measured alike",
                )
    drafters: dict[str, DrafterFacts] = {}
    for report in reports:
        for drafter in report.drafters:
            known = drafters.setdefault(drafter.name, drafter)
            if known.identity != drafter.identity:
                raise DataError(f"two different drafters are called '{drafter.name}'", mend="name them differently")

    def union(name: str, key: Callable[[Any], tuple]) -> tuple:
        return tuple({key(item): item for report in reports for item in getattr(report, name)}.values())

    return first.model_copy(
        update={
            "title": title,
            "commands": tuple(commands),
            "drafters": tuple(drafters.values()),
            "results": union("results", lambda r: (r.suite, r.temperature, r.proposer)),
            "speed": union("speed", lambda r: (r.suite, r.temperature, r.proposer)),
            "exactness": union("exactness", lambda r: (r.temperature, r.proposer)),
            "shortlist": (),
            "step_times": (),
            "notes": tuple(dict.fromkeys(note for report in reports for note in report.notes)),
        }
    )
