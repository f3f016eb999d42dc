"""A card's facts from a checkpoint's manifest, report and plots."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from angelspec.core.engine import SGLANG_VERSION
from angelspec.core.errors import DataError
from angelspec.core.known_targets import KNOWN_TARGETS, KnownTarget
from angelspec.core.manifest import DrafterManifest
from angelspec.core.modes import mode_family
from angelspec.core.repositories import Repository
from angelspec.core.routing import named_by
from angelspec.evaluation.report import REPORT_FILE, Report
from angelspec.hub.card import CardFacts, Measurement, Served, ServedLine, ServeLine, SpeedLine
from angelspec.hub.stated_facts import read_config
from angelspec.serving.answers import ServedDrafter
from angelspec.serving.bench_result import RESULT_FILE, BenchResult, Cell
from angelspec.serving.instructions import serve_instructions

_SERVED_TERMS = ("concurrency", "tokens/s", "speedup", "accepted length", "kept ratio")
_MARKS = ("†", "‡")


def known_target(manifest: DrafterManifest) -> KnownTarget | None:
    """The target as angelspec knows it by name; None: it does not."""
    return KNOWN_TARGETS.get(manifest.recipe.target.name or "")


def base_model(manifest: DrafterManifest) -> str | None:
    """The target's ORG/NAME on the Hugging Face hub; None: unknown."""
    source = manifest.target.source
    if source.startswith("hf:"):
        return Repository.parse(source).name
    known = known_target(manifest)
    return known.release if known else None


def target_license(manifest: DrafterManifest) -> str | None:
    """The target's licence; None: unknown."""
    known = known_target(manifest)
    return known.license if known else None


def card_facts(
    folder: Path,
    manifest: DrafterManifest,
    *,
    name: str,
    license: str,
    base: str | None,
    places: Sequence[Repository] = (),
) -> CardFacts:
    """All that a card says, from a checkpoint's folder.

    Args:
        folder: with weights, config.json, report and plots; a load test of a server that held the drafter
            (``serve-bench.json``, from ``angelspec bench serve``) may lie there as well.
        manifest: that lies in it.
        name: by which the commands name it.
        places: where it will be published.
        license: of the drafter.
        base: the target's ORG/NAME; None: it is on no hub.

    Raises:
        DataError: the report or the load test can't be read, or the load test is not of this drafter.
        CheckpointError: ``config.json`` can't be read.
    """
    known = known_target(manifest)
    # made from a release, but not the same weights: other engines can't fetch it
    on_no_hub = known is not None and known.derived_from is not None
    instructions = serve_instructions(
        manifest.drafter,
        checkpoint=name,
        target=manifest.target.name if on_no_hub else base or manifest.target.name,
        mode=manifest.mode,
        family=manifest.target.mode_family,
    )[: 1 if on_no_hub else None]
    engines = [instruction.engine for instruction in instructions]
    return CardFacts(
        manifest=manifest,
        name=name,
        places=tuple(places),
        license=license,
        weight_bytes=sum(path.stat().st_size for path in folder.glob("*.safetensors")),
        dtype=str(read_config(folder).get("dtype", "unknown")),
        base_model=base,
        target_license=target_license(manifest),
        library=next((engine.lower() for engine in engines if " " not in engine), "angelspec"),
        serve=tuple(
            ServeLine(_with_version(instruction.engine), instruction.command, instruction.note)
            for instruction in instructions
        ),
        measurement=_measurement(folder, drafter=manifest.recipe.name),
        served=_served(folder, manifest),
        plots={_caption(path): path.name for path in sorted(folder.glob("*.png"))},
    )


def _with_version(engine: str) -> str:
    """An engine with the version that angelspec is made for, where that is known."""
    return engine.replace("SGLang", f"SGLang {SGLANG_VERSION}", 1)


def _caption(path: Path) -> str:
    words = re.sub(r"-t([\d.]+)$", r", temperature \1", path.stem).replace("-", " ")
    return words[0].upper() + words[1:]


def _measurement(folder: Path, *, drafter: str) -> Measurement | None:
    if not (folder / REPORT_FILE).is_file():
        return None
    report = Report.load(folder / REPORT_FILE)
    settings = report.settings
    return Measurement(
        machine=f"{report.machine.description}, {report.machine.threads_in_words}",
        versions=report.versions,
        settings=f"up to {settings.max_new_tokens} tokens, batch {settings.batch_size}, seed {settings.seed}, "
        f"target in {report.target.dtype}, "
        + ", ".join(f"{suite.name}: {suite.prompts} prompts" for suite in report.suites),
        measured=report.created,
        commands=report.commands,
        definitions=report.definitions,
        notes=report.notes,
        speed=tuple(
            SpeedLine(
                line.suite,
                line.temperature,
                line.tokens_per_second,
                line.plain_tokens_per_second,
                concurrency=settings.rows_together(line.prompts),
            )
            for line in report.speed
            if line.proposer == drafter
        ),
        speed_of="the reference loop against plain decoding in the same loop, one process, in turns; engines are "
        "faster on both sides",
    )


def load_test_problems(folder: Path, manifest: DrafterManifest) -> list[str]:
    """Why the load test beside a drafter is not of this drafter (empty: it is, or there is none).

    Raises:
        DataError: it can't be read.
    """
    path = folder / RESULT_FILE
    problem = _foreign(BenchResult.load(path), manifest) if path.is_file() else None
    return [] if problem is None else [f"{RESULT_FILE} {problem}"]


def _served(folder: Path, manifest: DrafterManifest) -> Served | None:
    if not (folder / RESULT_FILE).is_file():
        return None
    if problems := load_test_problems(folder, manifest):
        raise DataError(f"{folder}: {problems[0]}", mend="measure this drafter with --route, or remove the file")
    result = BenchResult.load(folder / RESULT_FILE)
    choices = _own_choices(result, manifest)
    cells = [cell for cell in result.cells if cell.choice in choices and cell.tokens_per_second is not None]
    lines = tuple(_served_line(cell, result) for cell in cells)
    marks = "".join(line.speedup_marks for line in lines)
    faults = result.faults_of([*choices, result.baseline])
    if result.engine is not None and result.engine.target_digest is None:
        faults.append("the file does not say which target was served")
    settings = result.settings
    return Served(
        engine=f"SGLang {result.engine_version}",
        machine=result.hardware,
        settings=f"{settings.window_text} a window, up to {settings.max_tokens} tokens, temperature "
        f"{settings.temperature:g}, {settings.repeats} windows each",
        measured=result.created,
        command=result.command,
        definitions={
            name: result.definitions[name] for name in (*_SERVED_TERMS, *(mark for mark in _MARKS if mark in marks))
        },
        lines=lines,
        faults=tuple(faults),
    )


def _served_line(cell: Cell, result: BenchResult) -> ServedLine:
    plain = result.cell(traffic=cell.traffic, concurrency=cell.concurrency, choice=result.baseline)
    both = cell.marks + (plain.marks if plain is not None else "")
    return ServedLine(
        traffic=cell.traffic,
        concurrency=cell.concurrency,
        choice=cell.choice,
        tokens_per_second=cell.tokens_per_second or 0.0,
        speedup=cell.speedup,
        interval=None
        if cell.speedup_low is None or cell.speedup_high is None
        else (cell.speedup_low, cell.speedup_high),
        accepted_length=cell.accepted_length,
        kept_ratio=cell.kept_ratio,
        marks=cell.marks,
        speedup_marks="".join(mark for mark in _MARKS if mark in both),
    )


def _foreign(result: BenchResult, manifest: DrafterManifest) -> str | None:
    """Why a load test is not of this drafter; None: it is."""
    if result.engine is None:
        return "does not say which drafters the server held"
    held = "; ".join(_described(one) for one in result.engine.drafters) or "no drafter"
    alike = [one for one in result.engine.drafters if _is_like(one, manifest)]
    if not alike:
        wanted = f"{manifest.algorithm}, {manifest.mode}, depth {manifest.drafter.num_proposals}"
        return f"is of a server with {held}, none of which is this drafter ({wanted})"
    if len(alike) > 1:
        return f"is of a server with several drafters like this one: {held}"
    there = result.engine.target_digest
    if manifest.recipe.target.chat_template is None and there not in (None, manifest.target.digest):
        return f"is of the target {there[:16]}, this drafter's is {manifest.target.digest[:16]}"
    if (mode := _mode(result)) != manifest.mode:
        return f"is of answers in {mode} mode, this drafter's is {manifest.mode}"
    if not _own_choices(result, manifest):
        return f"measures {', '.join(choice.name for choice in result.choices)}, none of which is this drafter alone"
    return None


def _is_like(served: ServedDrafter, manifest: DrafterManifest) -> bool:
    ours = (manifest.drafter.family, manifest.mode, manifest.drafter.num_proposals)
    return (served.family, served.mode, served.depth) == ours and served.algorithm in (None, manifest.algorithm)


def _described(served: ServedDrafter) -> str:
    return f"{served.name} ({served.algorithm or served.family}, {served.mode}, depth {served.depth})"


def _mode(result: BenchResult) -> str:
    """The thinking mode of the answers."""
    assert result.engine is not None, "the caller has looked"
    return result.settings.mode or mode_family(result.engine.mode_family).default


def _own_choices(result: BenchResult, manifest: DrafterManifest) -> list[str]:
    """Names of the choices whose route leads to this drafter alone."""
    assert result.engine is not None, "the caller has looked"
    found = []
    for choice in result.choices:
        named = named_by(choice.route, result.engine.drafters) if choice.route else []
        fitting = [one for one in named if one.mode == _mode(result)]
        if len(fitting) == 1 and _is_like(fitting[0], manifest):
            found.append(choice.name)
    return found
