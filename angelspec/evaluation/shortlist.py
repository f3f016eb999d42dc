"""What a shortlist costs in accepted length and gains in draft time, to choose the default from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from angelspec.core.acceptance import pool
from angelspec.decoding.block_proposer import BlockProposer
from angelspec.evaluation.results import MeasureSettings, ShortlistResult
from angelspec.evaluation.suite_decoding import decode_suites, in_turns, unit_facts
from angelspec.evaluation.suites import Suite
from angelspec.evaluation.units import cached

if TYPE_CHECKING:
    from angelspec.drafters.block import BlockDrafter
    from angelspec.targets.target import Target

SIZES: tuple[int | None, ...] = (8, 16, 32, 64, 128, None)
"""Candidates per slot; None: the whole vocabulary (exact)."""
ROUNDS = 2
"""Turns of all sizes."""


def measure_shortlists(
    target: Target,
    drafter: BlockDrafter,
    suite: Suite,
    *,
    settings: MeasureSettings,
    sizes: Sequence[int | None] = SIZES,
    rounds: int = ROUNDS,
    folder: Path | None = None,
    advance: Callable[[int], None] | None = None,
) -> list[ShortlistResult]:
    """Decode one suite greedily with every size, in turns, ``rounds`` times.

    All answers are counted, finished or not: every size gives the same answers in float32, so only the drafts differ.

    Args:
        target: the frozen model.
        drafter: with a sequential head; without one every size gives the same drafts.
        suite: the prompts.
        settings: how to decode; its temperatures are not used.
        sizes: candidates per slot.
        rounds: the order is reversed every other round.
        folder: where the finished measurement is kept; None keeps none.
        advance: progress in answers, of ``len(sizes) * rounds * len(suite.prompts)``.
    """
    proposers = [
        BlockProposer(drafter, target=target, name="exact" if size is None else str(size), shortlist=size)
        for size in sizes
    ]
    unit = {
        "unit": "shortlist",
        **unit_facts(target, [suite], settings, temperature=0.0),
        "digest": proposers[0].digest,
        "sizes": list(sizes),
        "rounds": rounds,
    }
    return cached(
        folder, unit, list[ShortlistResult], lambda: _race(target, proposers, suite, settings, rounds, advance)
    )


def _race(
    target: Target,
    proposers: Sequence[BlockProposer],
    suite: Suite,
    settings: MeasureSettings,
    rounds: int,
    advance: Callable[[int], None] | None,
) -> list[ShortlistResult]:
    short = settings.model_copy(update={"max_new_tokens": min(4, settings.max_new_tokens)})
    for proposer in proposers:
        decode_suites(target, proposer, [suite], settings=short, temperature=0.0)
    results: dict[str, ShortlistResult] = {}
    done = 0
    for proposer in in_turns(proposers, rounds=rounds):
        run = decode_suites(target, proposer, [suite], settings=settings, temperature=0.0)
        before = results.get(proposer.name)
        counts = [answer.counts(depth=proposer.depth) for answer in run.answers]
        results[proposer.name] = ShortlistResult(
            size=proposer.shortlist,
            counts=pool([*counts, *([before.counts] if before else [])]),
            draft_seconds=run.seconds["draft"] + (before.draft_seconds if before else 0.0),
            total_seconds=run.total_seconds + (before.total_seconds if before else 0.0),
            tokens=sum(len(answer.tokens) for answer in run.answers) + (before.tokens if before else 0),
        )
        done += len(suite.prompts)
        if advance is not None:
            advance(done)
    return [results[proposer.name] for proposer in proposers]
