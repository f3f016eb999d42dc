"""A card's facts from a checkpoint's manifest, report and plots."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from angelspec.core.errors import DataError
from angelspec.core.files import read_json
from angelspec.core.known_targets import KNOWN_TARGETS, KnownTarget
from angelspec.core.manifest import DrafterManifest
from angelspec.core.repositories import Repository
from angelspec.evaluation.report import REPORT_FILE, Report
from angelspec.hub.card import CardFacts, Measurement, Served, ServedLine, ServeLine, SpeedLine
from angelspec.serving.bench_result import RESULT_FILE, BenchResult
from angelspec.serving.instructions import serve_instructions

_SERVED_TERMS = ("concurrency", "tokens/s", "speedup", "accepted length", "kept ratio")


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
        DataError: the report or the load test can't be read, or the load test is of other drafters.
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
        dtype=str(read_json(folder / "config.json").get("dtype", "unknown")),
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
    """An engine with the version that angelspec is made for, as its own requirements say it."""
    try:
        wanted = requires("angelspec") or []
    except PackageNotFoundError:
        wanted = []
    for item in wanted:
        found = re.match(rf"{re.escape(engine.lower())}==([\w.]+)", item)
        if found:
            return f"{engine} {found[1]}"
    return engine


def _caption(path: Path) -> str:
    words = re.sub(r"-t([\d.]+)$", r", temperature \1", path.stem).replace("-", " ")
    return words[0].upper() + words[1:]


def _measurement(folder: Path, *, drafter: str) -> Measurement | None:
    if not (folder / REPORT_FILE).is_file():
        return None
    report = Report.load(folder / REPORT_FILE)
    settings = report.settings
    return Measurement(
        machine=f"{report.machine.description}, {report.machine.threads} threads",
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
                concurrency=min(settings.batch_size, line.prompts),
            )
            for line in report.speed
            if line.proposer == drafter
        ),
        speed_of="the reference loop against plain decoding in the same loop, one process, in turns; engines are "
        "faster on both sides",
    )


def _served(folder: Path, manifest: DrafterManifest) -> Served | None:
    if not (folder / RESULT_FILE).is_file():
        return None
    result = BenchResult.load(folder / RESULT_FILE)
    ours = {manifest.recipe.name, manifest.drafter.algorithm, manifest.drafter.family}
    choices = {choice.name for choice in result.choices if choice.route in ours}
    if not choices:
        raise DataError(
            f"{folder / RESULT_FILE} measures {', '.join(choice.name for choice in result.choices)}, none of which is "
            f"this drafter ({', '.join(sorted(ours))})",
            mend="measure it with --route, or remove the file",
        )
    settings = result.settings
    return Served(
        engine=f"SGLang {result.engine_version}",
        machine=result.hardware,
        settings=f"{settings.requests} requests a window of up to {settings.max_tokens} tokens, temperature "
        f"{settings.temperature:g}, {settings.repeats} windows each",
        measured=result.created,
        command=result.command,
        definitions={name: result.definitions[name] for name in _SERVED_TERMS},
        lines=tuple(
            ServedLine(
                traffic=cell.traffic,
                concurrency=cell.concurrency,
                choice=cell.choice,
                tokens_per_second=cell.tokens_per_second,
                speedup=cell.speedup,
                interval=None
                if cell.speedup_low is None or cell.speedup_high is None
                else (cell.speedup_low, cell.speedup_high),
                accepted_length=cell.accepted_length,
                kept_ratio=cell.kept_ratio,
            )
            for cell in result.cells
            if cell.choice in choices and cell.tokens_per_second is not None
        ),
    )
