"""The accepted lengths of a model card, read from its text, and what a report says in the same places."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import dropwhile, takewhile

import yaml

from angelspec.core.acceptance import AcceptanceCounts
from angelspec.core.bundle import WorkloadAcceptance
from angelspec.evaluation.report import Report
from angelspec.hub.card_metadata import split_card
from angelspec.pipeline.measuring import LOOKUP

ALL = "all"
_NOTHING = "–"


@dataclass
class Figures:
    """As they are written; nothing measured is a dash."""

    lengths: dict[tuple[str, float], tuple[str, str, str]]
    """By suite (or all) and temperature: accepted length, that of prompt lookup, verify steps."""
    positions: dict[float, list[str]]
    """By temperature: p_1 to p_D, full-depth steps."""
    index: dict[tuple[str, float], float]
    """By suite and temperature: accepted length in the ``model-index``."""


def card_estimates(card: str) -> dict[str, list[str]]:
    """By workload: accepted length, p_1 to p_D and steps that a card says a server begins with."""
    header, *rows = _table_below(split_card(card)[1], "What `angelspec serve` expects of it")
    assert (header[:2], header[-1]) == (["workload", "accepted length"], "steps")
    return {row[0]: row[1:] for row in rows}


def server_estimates(acceptance: Iterable[WorkloadAcceptance]) -> dict[str, list[str]]:
    """The same as a server says it of one drafter."""
    return {
        one.workload: [f"{one.accepted_length:.2f}", *(f"{rate:.3f}" for rate in one.cumulative), f"{one.steps:,}"]
        for one in acceptance
    }


def card_figures(card: str) -> Figures:
    """What a card says."""
    matter, body = split_card(card)
    metadata = yaml.safe_load(matter)
    header, *rows = _table_below(body, "Accepted length by real speculative decoding, finished answers:")
    lengths = {}
    for column in range(1, len(header), 3):
        assert header[column + 1 : column + 3] == ["prompt lookup", "verify steps"]
        for row in rows:
            lengths[row[0], _temperature(header[column])] = tuple(row[column : column + 3])
    header, *rows = _table_below(body, "Share of full-depth steps whose proposals 1 to k were all accepted")
    assert header[-1] == "full-depth steps"
    positions = {_temperature(row[0]): row[1:] for row in rows}
    index = {
        (result["dataset"]["name"], _temperature(metric["name"])): metric["value"]
        for result in metadata["model-index"][0]["results"]
        for metric in result["metrics"]
    }
    return Figures(lengths, positions, index)


def report_figures(report: Report, drafter: str) -> Figures:
    """What a report says of a drafter, as a card is to write it."""
    suites = [suite.name for suite in report.suites]

    def counts(suite: str, temperature: float, proposer: str = drafter) -> AcceptanceCounts:
        of = None if suite == ALL else [suite]
        return report.pooled(proposer, temperature=temperature, suites=of).counts

    lengths, index = {}, {}
    for temperature in report.temperatures:
        for suite in (*suites, ALL):
            ours, lookup = counts(suite, temperature), counts(suite, temperature, LOOKUP)
            written = (_length(ours), _length(lookup), f"{ours.verify_steps:,}")
            lengths[suite, temperature] = written
            if suite != ALL and ours.mean_accepted_length is not None:
                index[suite, temperature] = round(ours.mean_accepted_length, 3)
    whole = {temperature: counts(ALL, temperature) for temperature in report.temperatures}
    depth = max(len(one.cumulative_acceptance) for one in whole.values())
    positions = {
        temperature: [*([f"{rate:.3f}" for rate in one.cumulative_acceptance] or [_NOTHING] * depth),
                      f"{one.full_depth_steps:,}"]
        for temperature, one in whole.items()
    }  # fmt: skip
    return Figures(lengths, positions, index)


def _length(counts: AcceptanceCounts) -> str:
    return _NOTHING if counts.mean_accepted_length is None else f"{counts.mean_accepted_length:.2f}"


def _temperature(text: str) -> float:
    return float(re.search(r"temperature ([\d.]+)", text)[1])


def _table_below(text: str, words: str) -> Sequence[list[str]]:
    """The rows of the first table below some words, without its rule."""
    assert text.count(words) == 1
    lines = text.partition(words)[2].splitlines()
    table = list(takewhile(_is_row, dropwhile(lambda line: not _is_row(line), lines)))
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in (table[0], *table[2:])]


def _is_row(line: str) -> bool:
    return line.startswith("|")
