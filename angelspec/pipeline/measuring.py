"""Drafters measured side by side on prompts that are rendered as a server renders them, and the report of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from angelspec.core.drafter_config import DrafterConfig
from angelspec.core.recipe import Recipe
from angelspec.data.chat import chat_format, prompt_rows
from angelspec.data.conversation import Conversation
from angelspec.data.quarantine import require_usable, write_quarantine
from angelspec.data.reading import read_sources
from angelspec.data.reasons import count_reasons, listed
from angelspec.data.rounds import first_round
from angelspec.decoding.block_proposer import BlockProposer
from angelspec.decoding.lookup import LookupProposer
from angelspec.decoding.proposer import Proposer
from angelspec.evaluation.acceptance import check_exactness, measure, measure_speed, num_answers
from angelspec.evaluation.machine import Machine
from angelspec.evaluation.plots import plot_report
from angelspec.evaluation.rendering import write_report
from angelspec.evaluation.report import DrafterFacts, Report, SuiteFacts, TargetFacts
from angelspec.evaluation.results import MeasureSettings, ShortlistResult
from angelspec.evaluation.shortlist import ROUNDS, SIZES, measure_shortlists
from angelspec.evaluation.step_times import measure_step_times, num_steps
from angelspec.evaluation.suites import Suite
from angelspec.evaluation.training_plots import plot_training
from angelspec.pipeline.progress import Progress
from angelspec.targets.target import Target

LOOKUP = "prompt lookup"
"""Name of the drafter without weights in every table."""
_SPEED_PROMPTS, _SPEED_TOKENS = 8, 64
"""The race against plain decoding: prompts of all suites in turns, and the longest answer."""
_SHORTLIST_PROMPTS = 16
"""Answered with every size of a shortlist."""
_EXACT_TOKENS = 96
"""Longest answer of the comparison with plain decoding, which decodes one request at a time."""


def evaluation_prompts(
    recipe: Recipe, *, classify: bool = False, quarantine: Path, say: Callable[[str], None]
) -> list[Conversation]:
    """The recipe's evaluation sources, read; what can't be used is written aside and said.

    Args:
        recipe: resolved.
        classify: let the classifier name the workload of rows whose source names none.
        quarantine: file of the rows that can't be used.
        say: told how many.

    Raises:
        DataError: a source has nothing usable or too many refused rows.
    """
    read = read_sources(
        recipe.data.evaluation, recipe.data, responses="rollout", classify=classify, quarantine=quarantine
    )
    if read.counts:
        say(f"  evaluation: {len(read.accepted)} conversations; refused: {listed(read.counts)} (see {quarantine})")
    return read.accepted


def suites_of(
    conversations: Sequence[Conversation],
    target: Target,
    recipe: Recipe,
    *,
    names: Sequence[str],
    limit: int | None,
    quarantine: Path,
    say: Callable[[str], None],
) -> list[Suite]:
    """Evaluation prompts (first user turns) as a server renders them, by source.

    Args:
        conversations: of all sources.
        target: renders them.
        recipe: its mode and the limits of ``data``.
        names: the sources, in order.
        limit: prompts of each; None: all.
        quarantine: file of the prompts that can't be asked.
        say: told how many of a source can't.

    Raises:
        DataError: too many of a source can't be asked.
    """
    chat = chat_format(target, mode=recipe.mode)
    by_source: dict[str, list[Conversation]] = {name: [] for name in names}
    for item in first_round(conversations):
        by_source[item.conversation.source].append(item.conversation)
    rendered = {
        name: prompt_rows(members, chat, max_prompt_tokens=recipe.longest_prompt(recipe.evaluation.max_new_tokens))
        for name, members in by_source.items()
    }
    refused = [row for rows in rendered.values() for row in rows.rejected]
    if refused:
        write_quarantine(quarantine, refused)
    suites = []
    for name, rows in rendered.items():
        require_usable(
            accepted=len(rows.prompts),
            rejected=rows.rejected,
            max_bad_fraction=recipe.data.max_bad_fraction,
            what=f"evaluation suite '{name}'",
            quarantine=quarantine,
        )
        suites.append(Suite(name, tuple(rows.prompts), count_reasons(row.reason for row in rows.rejected)).first(limit))
    for suite in suites:
        if suite.refused:
            say(f"  {_refused(suite)} (see {quarantine})")
    return suites


def _refused(suite: Suite) -> str:
    """What of a suite's source is not measured, in words."""
    return f"evaluation suite '{suite.name}': prompts refused: {listed(suite.refused)}"


def mixed_suite(suites: Sequence[Suite], count: int) -> Suite:
    """``count`` prompts, taken from the suites in turns."""
    turns = zip_longest(*(suite.prompts for suite in suites))
    prompts = [prompt for turn in turns for prompt in turn if prompt is not None]
    return Suite("mixed", tuple(prompts[:count]))


def measured_report(
    target: Target,
    proposers: Sequence[Proposer],
    suites: Sequence[Suite],
    *,
    recipe: Recipe,
    settings: MeasureSettings,
    exact_target: Callable[[], Target],
    folder: Path,
    progress: Progress,
    title: str,
    commands: Sequence[str],
    descriptions: Mapping[str, str],
    breakeven: Sequence[int] = (),
    shortlists_of: str | None = None,
) -> Report:
    """Measure everything and put it into one report; finished parts in ``folder`` are not measured again.

    Args:
        exact_target: loads the target in float32, to compare the output with plain decoding; not called where the
            recipe asks for no such prompts.
        breakeven: batch sizes at which the break-even with MTP is measured; none: it is not.
        shortlists_of: name of the block drafter whose sequential head is measured with shortlists of every size; None:
            none is.
    """
    total = num_answers(suites, proposers, settings=settings)
    with progress.meter("evaluate", total=total, unit="answers") as meter:
        results = measure(target, proposers, suites, settings=settings, folder=folder / "units", advance=meter)
    progress.say("  speed beside plain decoding")
    speed = measure_speed(
        target,
        proposers,
        [mixed_suite(suites, _SPEED_PROMPTS)],
        settings=settings.model_copy(update={"max_new_tokens": min(_SPEED_TOKENS, settings.max_new_tokens)}),
        rounds=2,
        folder=folder / "units",
    )
    step_times = []
    if breakeven:
        total = num_steps(proposers, settings=settings, batch_sizes=breakeven)
        with progress.meter("step times", total=total, unit="steps") as meter:
            step_times = measure_step_times(
                target,
                proposers,
                mixed_suite(suites, max(breakeven)),
                settings=settings,
                batch_sizes=breakeven,
                folder=folder / "units",
                advance=meter,
            )
    shortlists, notes = [], [_refused(suite) for suite in suites if suite.refused]
    if shortlists_of is not None:
        shortlists = _shortlists(
            target, proposers, suites, of=shortlists_of, settings=settings, folder=folder / "units", progress=progress
        )
        notes.append(f"shortlists were measured with {shortlists_of} alone")
    exactness = []
    if recipe.evaluation.exactness_prompts:
        progress.say("  output against plain decoding, token for token, in float32")
        exactness = check_exactness(
            exact_target(),
            proposers,
            mixed_suite(suites, recipe.evaluation.exactness_prompts),
            settings=settings.model_copy(update={"max_new_tokens": min(_EXACT_TOKENS, settings.max_new_tokens)}),
            folder=folder / "units",
        )
    return Report(
        title=title,
        target=TargetFacts(name=target.name, digest=target.digest, dtype=str(target.dtype).removeprefix("torch.")),
        mode=recipe.mode,
        machine=Machine.here(target.device),
        settings=settings,
        commands=tuple(commands),
        drafters=tuple(
            DrafterFacts(
                name=proposer.name,
                description=descriptions[proposer.name],
                depth=proposer.depth,
                identity=dict(proposer.identity),
            )
            for proposer in proposers
        ),
        suites=tuple(SuiteFacts(name=s.name, prompts=len(s.prompts), digest=s.digest) for s in suites),
        results=tuple(results),
        speed=tuple(speed),
        exactness=tuple(exactness),
        shortlist=tuple(shortlists),
        step_times=tuple(step_times),
        notes=tuple(notes),
    )


def _shortlists(
    target: Target,
    proposers: Sequence[Proposer],
    suites: Sequence[Suite],
    *,
    of: str,
    settings: MeasureSettings,
    folder: Path,
    progress: Progress,
) -> list[ShortlistResult]:
    (proposer,) = (one for one in proposers if one.name == of)
    assert isinstance(proposer, BlockProposer), "only blocks have a sequential head"
    suite = mixed_suite(suites, _SHORTLIST_PROMPTS)
    sizes = [size for size in SIZES if size is None or size < target.geometry.vocab_size]
    total = len(sizes) * ROUNDS * len(suite.prompts)
    with progress.meter("shortlists", total=total, unit="answers") as meter:
        return measure_shortlists(
            target, proposer.drafter, suite, settings=settings, sizes=sizes, folder=folder, advance=meter
        )


def save_report(report: Report, folder: Path, *, metrics: Mapping[str, Path], consecutive: bool) -> None:
    """Write report.json, report.md and the plots into ``folder``.

    Args:
        report: what was measured.
        folder: where to.
        metrics: training logs by stage or drafter; none: no training curves.
        consecutive: the logs are stages of one run.
    """
    pictures = dict(plot_report(report, folder))
    if metrics:
        pictures["Training"] = plot_training(metrics, folder / "training.png", consecutive=consecutive)
    write_report(report, folder, plots={caption: path.name for caption, path in pictures.items()})


def lookup_proposer(recipe: Recipe) -> LookupProposer:
    """Prompt lookup as the recipe sets it."""
    lookup = recipe.evaluation.lookup
    return LookupProposer(max_match=lookup.max_match, num_proposals=lookup.num_proposals, name=LOOKUP)


def lookup_description(recipe: Recipe) -> str:
    """Its row in the report."""
    lookup = recipe.evaluation.lookup
    return f"longest suffix match up to {lookup.max_match} tokens, {lookup.num_proposals} proposals, no weights"


def drafter_description(config: DrafterConfig) -> str:
    """A trained drafter's row in the report."""
    if config.family == "mtp":
        return f"{config.algorithm}, one {config.mlp} layer, {config.num_depths} depths"
    layers = f"{config.num_layers} layers, taps {list(config.target_layer_ids)}"
    return f"{config.algorithm}, {layers}, block {config.block_size}"


def measure_settings(recipe: Recipe) -> MeasureSettings:
    """The recipe's evaluation as settings of a measurement."""
    evaluation = recipe.evaluation
    return MeasureSettings(
        temperatures=evaluation.temperatures,
        max_new_tokens=evaluation.max_new_tokens,
        batch_size=evaluation.batch_size,
        seed=evaluation.seed,
    )
