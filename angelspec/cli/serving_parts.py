"""What serving needs of the other parts: where targets and drafters lie, what their files hold, the hardware; and the
road from what a user names to a plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from filelock import FileLock

from angelspec.cli.drafters import find
from angelspec.core.errors import BundleError
from angelspec.core.fingerprint import fingerprint
from angelspec.core.geometry import TargetGeometry
from angelspec.core.known_targets import KNOWN_TARGETS
from angelspec.core.locations import cache_folder
from angelspec.core.modes import Mode
from angelspec.core.repositories import is_repository_name
from angelspec.serving.plan import Hardware, ServePlan
from angelspec.serving.resolving import Examined, FoundDrafter, FoundTarget, Parts


def parts() -> Parts:
    """The real ones."""
    return Parts(find_target=find_target, find_drafter=find_drafter, examine=examine, digest=model_digest)


def check_choice(bundle_file: Path | None, *, target: str | None, drafters: Sequence[str], command: str) -> None:
    """Refuse what is neither a bundle nor a target with its drafters, or is both.

    Args:
        bundle_file: as on the command line.
        target: as on the command line.
        drafters: as on the command line.
        command: of angelspec, whose help says more.

    Raises:
        BundleError: the choice is not one of the two.
    """
    if (bundle_file is None) == (target is None) or (target is not None) != bool(drafters):
        raise BundleError(
            "give either --bundle FILE, or --target with --drafter", mend=f"see `angelspec {command} --help`"
        )


def shown_plan(
    bundle_file: Path | None,
    *,
    target: str | None = None,
    drafters: Sequence[str] = (),
    mode: Mode | None = None,
    arguments: Sequence[str] = (),
    host: str,
    port: int,
) -> ServePlan:
    """Check the engine, find every part, decide how it is served, and show that.

    Args:
        bundle_file: what to serve; None: ``target`` with ``drafters``.
        target: as on the command line.
        drafters: as on the command line.
        mode: of drafters that say nothing of theirs.
        arguments: flags for SGLang.
        host: to listen on.
        port: to listen on.

    Raises:
        AngelspecError: SGLang is missing, a part can't be found, or something does not fit.
    """
    from angelspec.core.bundle import load_bundle
    from angelspec.pipeline.progress import table_console
    from angelspec.serving.engine_package import check_engine
    from angelspec.serving.plan import make_plan
    from angelspec.serving.plan_table import print_plan
    from angelspec.serving.resolving import compose_bundle, resolve_bundle

    version = check_engine()
    ours = parts()
    if bundle_file is not None:
        bundle = load_bundle(bundle_file)
    else:
        assert target is not None, "a caller without a bundle names a target"
        bundle = compose_bundle(target, drafters, parts=ours, mode=mode)
    plan = make_plan(
        resolve_bundle(bundle, parts=ours),
        arguments=arguments,
        host=host,
        port=port,
        hardware=hardware(),
        engine_version=version,
    )
    print_plan(plan, console=table_console())
    return plan


def find_target(text: str, *, bare_paths: bool = True) -> FoundTarget:
    """A target by a known name, a folder, ORG/NAME of the Hugging Face hub, or a source as in recipes; fetched if it is
    not on this machine.

    Args:
        bare_paths: see ``Parts``.

    Raises:
        TargetError: there is none.
    """
    from angelspec.targets.sources import materialise

    source = target_source(text, bare_paths=bare_paths)
    known = next((target for target in KNOWN_TARGETS.values() if target.source == source), None)
    folder = materialise(source, progress=lambda line: click.echo(line, err=True))
    if known is None:
        return FoundTarget(folder)
    return FoundTarget(folder, known.mode_family, known.release)


def target_source(text: str, *, bare_paths: bool = True) -> str:
    """A target as a user names it, written as in recipes: SCHEME:PLACE."""
    from angelspec.targets.sources import SCHEMES

    if text in KNOWN_TARGETS:
        return KNOWN_TARGETS[text].source
    if text.partition(":")[0] in SCHEMES:
        return text
    is_folder = bare_paths and Path(text).exists()
    return f"hf:{text}" if is_repository_name(text) and not is_folder else f"folder:{text}"


def find_drafter(text: str, *, bare_paths: bool = True) -> FoundDrafter:
    """A drafter by path, hub or registered name; one whose config.json lacks fields is completed in the cache.

    Args:
        bare_paths: see ``Parts``.

    Raises:
        AngelspecError: there is none, or it can't be fetched.
    """
    found = find(text, bare_paths=bare_paths)
    if found.entry is None:
        return FoundDrafter(found.folder if found.folder.is_dir() else found.folder.parent)
    overrides = found.entry.config_overrides
    folder = _completed(found.folder, overrides) if overrides else found.folder
    return FoundDrafter(folder, found.entry.algorithm, found.entry.mode, found.entry.target)


def examine(found: FoundDrafter, geometry: TargetGeometry) -> Examined:
    """Everything that `angelspec checkpoint check` says, with the target's shape."""
    from angelspec.drafters.checkpoint import HARMLESS, examine_checkpoint

    inspection = examine_checkpoint(found.folder, geometry=geometry)
    problems = [str(problem) for problem in inspection.problems if problem.code not in HARMLESS]
    if inspection.config is None and not problems:
        problems = [f"{found.folder} has no config.json: give the folder of an exported drafter"]
    return Examined(
        problems=tuple(problems),
        notes=tuple(inspection.notes),
        config=inspection.config,
        manifest=inspection.manifest,
        num_weights=sum(tensor.numel() for tensor in inspection.tensors.values()),
    )


def model_digest(folder: Path, chat_template: Path | None) -> str:
    """Content hash of a target or a drafter, with the chat template that replaces its own."""
    from angelspec.core.model_content import content_digest

    return content_digest(folder, extra=None if chat_template is None else chat_template.read_text(encoding="utf-8"))


def hardware() -> Hardware:
    """What this machine offers."""
    import torch

    from angelspec.evaluation.machine import Machine

    device = "cuda" if torch.cuda.is_available() else "cpu"
    capability = torch.cuda.get_device_capability() if device == "cuda" else None
    return Hardware(device, Machine.here(device).description, capability)


def _completed(folder: Path, overrides: dict[str, object]) -> Path:
    """The drafter in angelspec's own format, whose configuration is whole: the server reads nothing else of it."""
    from angelspec.drafters.checkpoint import convert_checkpoint

    name = fingerprint([str(folder.resolve()), overrides])
    place = cache_folder() / "completed" / name
    place.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(place.with_name(f".{name}.lock")):
        if not (place / "config.json").is_file():
            convert_checkpoint(folder, place, dialect="angelspec", overrides=overrides)
    return place
