"""From what a user calls a target and its drafters to a bundle whose parts lie on this machine and fit together.

Fetching, checkpoints and content hashes belong to other parts of angelspec; ``Parts`` holds them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from angelspec.core.bundle import (
    AUTO,
    DRAFTER_NAME,
    PLAIN,
    Bundle,
    BundleDrafter,
    BundleTarget,
    WorkloadAcceptance,
    of_checkpoint,
    parse_bundle,
)
from angelspec.core.drafter_config import DrafterConfig
from angelspec.core.errors import BundleError
from angelspec.core.files import expanded, read_json
from angelspec.core.geometry import TargetGeometry
from angelspec.core.manifest import DrafterManifest
from angelspec.core.modes import Mode, mode_family_of
from angelspec.core.trained_template import trained_template
from angelspec.serving.answers import EngineState


@dataclass(frozen=True)
class FoundTarget:
    """A target on this machine."""

    folder: Path
    mode_family: str | None = None
    """None: not known by name."""
    release: str | None = None
    """ORG/NAME that it was released as; None: unknown."""


@dataclass(frozen=True)
class FoundDrafter:
    """A drafter on this machine, and what the registry knows of it."""

    folder: Path
    algorithm: str | None = None
    mode: Mode | None = None
    target: str | None = None
    """ORG/NAME of the target that the registry names."""


@dataclass(frozen=True)
class Examined:
    """What a drafter's files hold."""

    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()
    config: DrafterConfig | None = None
    manifest: DrafterManifest | None = None
    num_weights: int = 0
    """Numbers in its tensors."""


@dataclass(frozen=True)
class Parts:
    """What is passed in.

    Both finders take ``bare_paths``: whether the name of a folder counts without ``./`` before it. On a command line it
    does; what a bundle says must not depend on where one stands.
    """

    find_target: Callable[..., FoundTarget]
    find_drafter: Callable[..., FoundDrafter]
    examine: Callable[[FoundDrafter, TargetGeometry], Examined]
    digest: Callable[[Path, Path | None], str]
    """Content hash of a model's folder, and of the chat template's file that replaces its own."""


@dataclass(frozen=True)
class ResolvedTarget:
    """The target of a bundle, found and read."""

    folder: Path
    geometry: TargetGeometry
    dtype: str
    """Precision of its files, as its config.json says."""
    digest: str
    name: str
    """What users know it by: its name here or on a hub, or that of its folder."""


@dataclass(frozen=True)
class ResolvedDrafter:
    """A drafter of a bundle, found, read and fitting."""

    entry: BundleDrafter
    """Its source is an absolute path."""
    config: DrafterConfig
    num_weights: int
    manifest: DrafterManifest | None
    notes: tuple[str, ...] = ()

    @property
    def is_trained(self) -> bool:
        """Whether something must be accepted of what it proposes; only a manifest can say that it is not."""
        return self.manifest is None or self.manifest.training.steps > 0

    @property
    def chat_template(self) -> Path | None:
        """The chat template's file that it was trained with, in place of the target's own."""
        return None if self.manifest is None else trained_template(Path(self.entry.source), self.manifest)


@dataclass(frozen=True)
class ResolvedBundle:
    """A bundle whose sources are folders of this machine."""

    bundle: Bundle
    target: ResolvedTarget
    drafters: tuple[ResolvedDrafter, ...]


def compose_bundle(
    target: str,
    drafters: Sequence[str],
    *,
    parts: Parts,
    name: str = "",
    mode: Mode | None = None,
    relative_to: Path | None = None,
) -> Bundle:
    """A bundle of what a user names on a command line.

    Args:
        target: a folder, a source as in recipes, or the name of a known target.
        drafters: ``[NAME=]CHECKPOINT``; without a name a drafter is called by its algorithm.
        parts: see ``Parts``.
        name: of the bundle.
        mode: of drafters of which neither a manifest nor the registry says it.
        relative_to: folder of the bundle's file: paths are written as seen from it; None: absolute.

    Returns:
        With acceptance from the drafters' manifests; sources that are no paths stay as the user wrote them.

    Raises:
        BundleError: a drafter does not fit, says nothing of its mode, or is called what no drafter can be called.
    """
    labels = [_named(text) for text in drafters]
    given = [label for label, _ in labels if label is not None]
    _check_labels(given)
    found_target = parts.find_target(target)
    resolved = _read_target(found_target, parts, name=_known_name(target))
    entries: list[BundleDrafter] = []
    measured: list[WorkloadAcceptance] = []
    families = {found_target.mode_family} - {None}
    for label, source in labels:
        found = parts.find_drafter(source)
        examined = _examined(source, found, resolved, found_target, parts)
        said = _source(source, relative_to)
        taken = [*given, *(entry.name for entry in entries)]
        entry, acceptance = _entry(source, found, examined, label=label or "", said=said, taken=taken, mode=mode)
        entries.append(entry.model_copy(update={"digest": parts.digest(found.folder, None)}))
        measured += acceptance
        if examined.manifest is not None:
            families.add(examined.manifest.target.mode_family)
    if len(families) > 1:
        raise BundleError(
            f"thinking is switched in different ways: {', '.join(sorted(map(str, families)))}",
            mend="serve drafters of one target",
        )
    return Bundle(
        name=name,
        target=BundleTarget(
            source=_source(target, relative_to),
            mode_family=next(iter(families), None) or mode_family_of(resolved.geometry.architecture) or "plain",
            digest=resolved.digest,
        ),
        drafters=tuple(entries),
        acceptance=tuple(measured),
    )


def resolve_bundle(bundle: Bundle, *, parts: Parts) -> ResolvedBundle:
    """Find every part of a bundle on this machine, and check that they fit.

    Raises:
        BundleError: everything that does not fit, one line each.
        AngelspecError: a source that can't be found.
    """
    found_target = parts.find_target(bundle.target.source, bare_paths=False)
    target = _read_target(found_target, parts, name=_known_name(bundle.target.source))
    problems: list[str] = []
    if bundle.target.digest not in (None, target.digest):
        problems.append(
            f"target {target.folder}: its content is {target.digest[:16]}, the bundle was made for "
            f"{bundle.target.digest[:16]}"
        )
    resolved: list[ResolvedDrafter] = []
    for entry in bundle.drafters:
        found = parts.find_drafter(entry.source, bare_paths=False)
        try:
            examined = _examined(entry.name, found, target, found_target, parts)
            digest = parts.digest(found.folder, None)
            _check_entry(entry, found, examined, digest=digest)
        except BundleError as error:
            problems.append(error.message)
            continue
        assert examined.config is not None, "an examined drafter without problems has a configuration"
        located = entry.model_copy(update={"source": str(found.folder.resolve()), "digest": digest})
        notes = list(examined.notes)
        if examined.manifest is None:
            notes.append("no manifest: that it was trained for this very target can't be checked")
        resolved.append(
            ResolvedDrafter(located, examined.config, examined.num_weights, examined.manifest, tuple(notes))
        )
    problems += _apart(resolved)
    if not bundle.drafters:
        problems.append("there is no drafter: add one, or serve the target with plain SGLang")
    if problems:
        raise BundleError("\n".join(problems), mend="change what is named, or create the bundle again")
    located_target = bundle.target.model_copy(update={"source": str(target.folder), "digest": target.digest})
    local = bundle.model_copy(
        update={"target": located_target, "drafters": tuple(drafter.entry for drafter in resolved)}
    )
    return ResolvedBundle(local, target, tuple(resolved))


def _known_name(source: str) -> str:
    if Path(source).is_absolute():
        return Path(source).name
    name = source.rpartition(":")[2]
    return Path(name).name if source.startswith("folder:") else name.partition("@")[0]


def _read_target(found: FoundTarget, parts: Parts, *, name: str) -> ResolvedTarget:
    path = found.folder / "config.json"
    try:
        config = read_json(path)
        geometry = TargetGeometry.from_config(config)
    except (OSError, ValueError) as error:
        raise BundleError(f"{path}: {error}", mend="give the folder of a model saved by transformers") from error
    text = config.get("text_config") or config
    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    dtype = str(dtype or "float32").removeprefix("torch.")
    return ResolvedTarget(found.folder.resolve(), geometry, dtype, parts.digest(found.folder, None), name)


def _examined(
    name: str, found: FoundDrafter, target: ResolvedTarget, found_target: FoundTarget, parts: Parts
) -> Examined:
    """The drafter's files, if they are whole and made for this target."""
    examined = parts.examine(found, target.geometry)
    problems = list(examined.problems)
    manifest = examined.manifest
    if manifest is not None:
        template = trained_template(found.folder, manifest)
        if template is not None and not template.is_file():
            problems.append(f"the chat template that it was trained with, {template}, is missing")
        elif manifest.target.digest != (digest := parts.digest(target.folder, template)):
            problems.append(
                f"it was trained for the target {manifest.target.name} ({manifest.target.digest[:16]}), not for "
                f"{target.folder} ({digest[:16]})"
            )
    if found.target is not None and found_target.release not in (None, found.target):
        problems.append(f"it drafts for {found.target}, not for {found_target.release}")
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise BundleError(
            f"drafter '{name}' ({found.folder}) can't be served beside {target.folder}:{lines}",
            mend="see `angelspec checkpoint check`",
        )
    return examined


def _entry(
    text: str,
    found: FoundDrafter,
    examined: Examined,
    *,
    label: str,
    said: str,
    taken: Sequence[str],
    mode: Mode | None,
) -> tuple[BundleDrafter, list[WorkloadAcceptance]]:
    manifest, config = examined.manifest, examined.config
    assert config is not None, "an examined drafter without problems has a configuration"
    mode = manifest.mode if manifest is not None else found.mode or mode
    if mode is None:
        raise BundleError(
            f"drafter '{text}' has no angelspec_manifest.json, so the thinking mode it was trained for is unknown",
            mend="state it with --mode no-think or --mode high-think",
        )
    algorithm = manifest.algorithm if manifest is not None else found.algorithm or config.algorithm
    name = label or _free_name(algorithm.replace("+", "-"), mode, taken)
    if manifest is not None:
        return of_checkpoint(manifest, name=name, source=said)
    return BundleDrafter(
        name=name, source=said, family=config.family, algorithm=algorithm if algorithm != config.family else None,
        mode=mode, depth=config.num_proposals,
    ), []  # fmt: skip


def _free_name(wanted: str, mode: Mode, taken: Sequence[str]) -> str:
    options = [wanted, f"{wanted}-{mode}", *(f"{wanted}-{number}" for number in range(2, len(taken) + 3))]
    return next(option for option in options if option not in taken)


def _check_entry(entry: BundleDrafter, found: FoundDrafter, examined: Examined, *, digest: str) -> None:
    """What a bundle says of a drafter against what its files say."""
    config = examined.config
    assert config is not None, "an examined drafter without problems has a configuration"
    known_mode = examined.manifest.mode if examined.manifest is not None else found.mode
    wrong = []
    if entry.digest not in (None, digest):
        wrong.append(
            f"its content is {digest[:16]}, the bundle was made for {entry.digest[:16]}: create the bundle again, or "
            "leave its digest out"
        )
    if entry.family != config.family:
        wrong.append(f"family is {config.family}, not {entry.family}")
    if known_mode not in (None, entry.mode):
        wrong.append(f"it was trained for {known_mode}, not for {entry.mode}")
    if entry.depth > config.num_proposals or (config.family == "block" and entry.depth < config.num_proposals):
        wrong.append(f"it proposes {config.num_proposals} tokens, not {entry.depth}")
    if config.target_num_layers - 1 in config.target_layer_ids:
        wrong.append("it reads the output of the target's last layer, which SGLang's models do not hand out")
    if wrong:
        raise BundleError(f"drafters.{entry.name}: {'; '.join(wrong)}")


def _apart(drafters: Sequence[ResolvedDrafter]) -> list[str]:
    """Why drafters can't share one pool of keys and values (empty: they can)."""
    return [
        f"drafters '{drafters[0].entry.name}' and '{other.entry.name}' can't be served together: {key} is "
        f"{getattr(drafters[0].config, key)} and {getattr(other.config, key)}, but they share one pool"
        for other in drafters[1:]
        for key in ("num_kv_heads", "head_dim")
        if getattr(drafters[0].config, key) != getattr(other.config, key)
    ]


def _check_labels(labels: Sequence[str]) -> None:
    for label in labels:
        if re.fullmatch(DRAFTER_NAME, label) is None or label in (PLAIN, AUTO):
            raise BundleError(
                f"--drafter {label}=...: a drafter can't be called '{label}'",
                mend=f"use small letters, digits, '.', '_' and '-', and not {PLAIN} or {AUTO}",
            )
        if labels.count(label) > 1:
            raise BundleError(f"--drafter: two are called '{label}'", mend="give each a name of its own")


def _named(text: str) -> tuple[str | None, str]:
    """``NAME=CHECKPOINT``; a path that exists may itself hold an equals sign."""
    if expanded(text).exists():
        return None, text
    label, separator, source = text.partition("=")
    return (label, source) if separator and "/" not in label else (None, text)


def _source(text: str, relative_to: Path | None) -> str:
    """A source as a bundle says it: paths absolute or relative to the bundle, anything else as it is."""
    path = expanded(text.removeprefix("folder:"))
    if not path.exists():
        return text
    if relative_to is None:
        return str(path.resolve())
    relative = os.path.relpath(path.resolve(), relative_to.resolve())
    return relative if relative.startswith("..") else f"./{relative}"


def with_routes(bundle: Bundle, texts: Sequence[str]) -> Bundle:
    """The bundle with fixed routes, each ``[WORKLOAD][/MODE]=ROUTE``.

    Raises:
        BundleError: a rule that is misspelt, or names what the bundle does not have.
    """
    rules = []
    for text in texts:
        who, separator, route = text.partition("=")
        workload, _, mode = who.partition("/")
        if not separator or not route:
            raise BundleError(f"route '{text}' is no rule", mend="write [WORKLOAD][/MODE]=ROUTE, such as code=dfly")
        rules.append({"workload": workload or None, "mode": mode or None, "route": route})
    return parse_bundle({**bundle.model_dump(), "routes": [*bundle.routes, *rules]}, where="--route")


def with_learnt(bundle: Bundle, engine: EngineState) -> Bundle:
    """The bundle with what a running server measured and learnt: its step costs and its drafters' calibrations.

    Raises:
        BundleError: the server's drafters are not the bundle's.
    """
    served = {drafter.name: (drafter.family, drafter.mode, drafter.depth) for drafter in engine.drafters}
    ours = {drafter.name: (drafter.family, drafter.mode, drafter.depth) for drafter in bundle.drafters}
    if served != ours:
        theirs = "; ".join(
            f"{name} ({family}, {mode}, depth {depth})" for name, (family, mode, depth) in served.items()
        )
        raise BundleError(
            f"the server has other drafters than the bundle: {theirs}", mend="name the bundle that it was started with"
        )
    there = engine.target_digest
    if bundle.target.digest is not None and there is not None and there != bundle.target.digest:
        raise BundleError(
            f"the server's target has the content {there[:16]}, the bundle's {bundle.target.digest[:16]}",
            mend="name the bundle that it was started with",
        )
    learnt = {name: one.model_dump() for name, one in (bundle.calibrations | engine.calibrations).items()}
    costs = engine.costs or bundle.costs
    return parse_bundle(
        {**bundle.model_dump(), "costs": costs.model_dump() if costs else None, "calibrations": learnt},
        where="the server's state",
    )


def with_acceptance(bundle: Bundle, measured: Sequence[WorkloadAcceptance]) -> Bundle:
    """The bundle with measurements in place of those of the same drafter and workload."""
    new = {(item.drafter, item.workload): item for item in measured}
    kept = [item for item in bundle.acceptance if (item.drafter, item.workload) not in new]
    return parse_bundle({**bundle.model_dump(), "acceptance": [*kept, *measured]}, where="the measurement")
