"""A bundle: one target and the drafters that serve it together, with their routes and what was measured of them.

A bundle is a YAML (or JSON) file. Drafter and target paths in it are relative to the file, so that a folder can be
moved. What a person writes is short; the measured parts are added by ``angelspec bundle create`` and by the server:

    target: {source: ../models/smollm2, mode_family: smollm2}
    drafters:
      - {name: mtp, source: ./mtp, family: mtp, mode: no-think, depth: 3}
      - {name: dfly, source: ./dfly, family: block, mode: no-think, depth: 7}
    routes:
      - {workload: code, route: dfly}     # everything else: chosen by load
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from angelspec.core.acceptance import AcceptanceCounts, pool
from angelspec.core.calibration import Calibration
from angelspec.core.drafter_config import SHORTLIST
from angelspec.core.errors import AngelspecError, BundleError, suggest
from angelspec.core.files import expanded, write_json_atomic, write_text_atomic
from angelspec.core.manifest import DrafterManifest
from angelspec.core.modes import MODE_FAMILIES, Mode, mode_family
from angelspec.core.problems import problems
from angelspec.core.step_costs import MeasuredFor, StepCosts
from angelspec.core.workloads import WORKLOADS, Workload
from angelspec.core.yaml_text import YamlError, parse_yaml

FORMAT_VERSION = 1
"""Raised when a bundle of an earlier version can no longer be read as is."""
Family = Literal["block", "mtp"]
DRAFTER_NAME = r"[a-z0-9][a-z0-9._-]*"
PLAIN, AUTO = "ar", "auto"
"""Routes that are no drafter: plain (autoregressive) decoding, and the choice by load."""

_STRICT = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class BundleTarget(BaseModel):
    """The model that is sped up."""

    model_config = _STRICT

    source: str
    """A path (relative to the bundle, starting with . or /) or a hub id."""
    mode_family: str = "plain"
    """How its chat template switches thinking; see ``core.modes``."""
    digest: str | None = None
    """Content hash that the drafters were trained against; None: not checked."""


def route_names(name: str, *, algorithm: str | None, family: str) -> tuple[str, ...]:
    """Every name by which a route may name a drafter."""
    return tuple(dict.fromkeys([name, *([algorithm] if algorithm else []), family]))


class BundleDrafter(BaseModel):
    """One drafter."""

    model_config = _STRICT

    name: str = Field(pattern=f"^{DRAFTER_NAME}$")
    """What routes and requests call it."""
    source: str
    """A path (relative to the bundle, starting with . or /) or a hub id."""
    family: Family
    """``block`` (DFlash, DFlare, DSpark, DFly) or ``mtp``."""
    algorithm: str | None = None
    """Published name, such as dfly: requests may route by it as by the family."""
    mode: Mode
    """The one thinking mode it was trained for."""
    depth: int = Field(ge=1)
    """Proposals per draft."""
    shortlist: int | None = Field(default=SHORTLIST, ge=1)
    """Candidates per slot that a sequential head rescores; None: the whole vocabulary (exact)."""
    digest: str | None = None
    """Content hash of its checkpoint; None: not checked."""

    @property
    def aliases(self) -> tuple[str, ...]:
        """Every name that a route may use."""
        return route_names(self.name, algorithm=self.algorithm, family=self.family)


class RouteRule(BaseModel):
    """A fixed route for some requests, in place of the choice by load."""

    model_config = _STRICT

    workload: Workload | None = None
    """None: any."""
    mode: Mode | None = None
    """None: any."""
    route: str
    """A drafter's name, ``ar`` or ``auto``."""

    def holds(self, *, workload: Workload, mode: Mode | None) -> bool:
        """Whether the rule is for a request of this workload and mode."""
        return self.workload in (None, workload) and self.mode in (None, mode)


class CutSettings(BaseModel):
    """How D-cut chooses what to verify."""

    model_config = _STRICT

    ratio: float | None = Field(default=None, gt=0, le=1)
    """A fixed keep ratio, 1 to verify everything that is drafted; None: the best of the grid, step by step."""
    ratios: tuple[float, ...] | None = None
    """The grid; None: every number of slots (never worse, and as fast)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.ratios is not None and (not self.ratios or not all(0 < r <= 1 for r in self.ratios)):
            raise ValueError("ratios must lie above 0 and at most at 1, and there must be one at least")
        if self.ratio is not None and self.ratios is not None:
            raise ValueError("ratio is fixed, so there is nothing to choose from ratios: give one of them")
        return self


class WorkloadAcceptance(BaseModel):
    """How far one drafter's proposals were accepted on one workload."""

    model_config = _STRICT

    drafter: str
    workload: Workload
    cumulative: tuple[float, ...]
    """p_k: chance that proposals 1..k are all accepted, at full depth."""
    steps: int = Field(ge=1)
    """Verify steps that it was measured on."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        values = (1.0, *self.cumulative)
        if not all(0 <= b <= a for a, b in zip(values, values[1:], strict=False)):
            raise ValueError(f"cumulative {list(self.cumulative)} must lie in 0..1 and never rise")
        return self

    @classmethod
    def of(cls, counts: AcceptanceCounts, *, drafter: str, workload: Workload, depth: int) -> Self | None:
        """What counters say of a drafter that proposes ``depth`` tokens; None: no step was verified to its full depth.

        Raises:
            BundleError: they were counted at a smaller depth.
        """
        if not counts.full_depth_steps:
            return None
        cumulative = counts.cumulative_acceptance[:depth]  # p_k is the same however much deeper it was drafted
        if len(cumulative) < depth:
            raise BundleError(
                f"drafter '{drafter}' proposes {depth} tokens, but was measured on {workload} with {len(cumulative)}",
                mend="measure it again: angelspec bundle create --measure",
            )
        return cls(drafter=drafter, workload=workload, cumulative=cumulative, steps=counts.full_depth_steps)

    @property
    def accepted_length(self) -> float:
        """Committed tokens per verify step, bonus included."""
        return 1 + sum(self.cumulative)


class Bundle(BaseModel):
    """A target, its drafters, routes and measurements."""

    model_config = _STRICT

    format_version: Literal[1] = FORMAT_VERSION
    name: str = ""
    target: BundleTarget
    drafters: tuple[BundleDrafter, ...] = ()
    """In order of preference where nothing was measured."""
    routes: tuple[RouteRule, ...] = ()
    """The first rule that holds decides; where none does, the load decides."""
    dcut: CutSettings = CutSettings()
    costs: StepCosts | None = None
    """Measured on the machine that ``costs.measured_for`` describes; None: the server measures when it starts."""
    acceptance: tuple[WorkloadAcceptance, ...] = ()
    """By drafter and workload."""
    calibrations: dict[str, Calibration] = Field(default_factory=dict)
    """By drafter: what its confidences are worth, learnt from verified proposals."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if wrong := _contradictions(self):
            raise ValueError("; ".join(wrong))
        return self

    # -------------------------------------------------------------------------------------------- lookup

    def drafter(self, name: str) -> BundleDrafter:
        """The drafter of a name.

        Raises:
            BundleError: there is none.
        """
        for drafter in self.drafters:
            if drafter.name == name:
                return drafter
        names = [drafter.name for drafter in self.drafters]
        raise BundleError(
            f"no drafter '{name}'{suggest(name, names)}", mend=f"use one of: {', '.join(names) or 'none'}"
        )

    def of_mode(self, mode: Mode | None) -> tuple[BundleDrafter, ...]:
        """Drafters that were trained for a mode."""
        return tuple(drafter for drafter in self.drafters if drafter.mode == mode)

    @property
    def depths(self) -> dict[str, int]:
        """Proposals per draft, by drafter."""
        return {drafter.name: drafter.depth for drafter in self.drafters}

    @property
    def measured(self) -> dict[tuple[str, Workload], tuple[float, ...]]:
        """p_k by (drafter, workload); a workload that was not measured has the mean of a drafter's others."""
        known = {(item.drafter, item.workload): item.cumulative for item in self.acceptance}
        for drafter in {item.drafter for item in self.acceptance}:
            own = [cumulative for (name, _), cumulative in known.items() if name == drafter]
            mean = tuple(sum(values) / len(own) for values in zip(*own, strict=True))
            for workload in WORKLOADS:
                known.setdefault((drafter, workload), mean)
        return known

    def stale_costs(self, here: MeasuredFor) -> list[str]:
        """Why the bundle's costs do not hold here (empty: they do)."""
        if self.costs is None:
            return ["no costs were measured"]
        if self.costs.measured_for is None:
            return []
        return self.costs.measured_for.differences(here)

    # --------------------------------------------------------------------------------------------- files

    def save(self, path: Path) -> Path:
        """Write the bundle, as JSON where the name ends in .json and as YAML otherwise; paths stay as they are."""
        content = {"format_version": FORMAT_VERSION, **self.model_dump(mode="json", exclude_defaults=True)}
        if path.suffix == ".json":
            write_json_atomic(path, content)
        else:
            write_text_atomic(path, yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120))
        return path

    def located(self, folder: Path) -> Bundle:
        """The same bundle with paths that start with ``.`` or ``~`` made absolute, as seen from ``folder``."""

        def place(source: str) -> str:
            if source.startswith("~"):
                return str(expanded(source))
            return str((folder / source).resolve()) if source.startswith(".") else source

        return self.model_copy(
            update={
                "target": self.target.model_copy(update={"source": place(self.target.source)}),
                "drafters": tuple(d.model_copy(update={"source": place(d.source)}) for d in self.drafters),
            }
        )


def load_bundle(path: Path) -> Bundle:
    """Read a bundle and resolve its paths.

    Raises:
        BundleError: no such file, no YAML or JSON, another format version, or every key that is wrong, by name.
    """
    return read_bundle(path).located(path.resolve().parent)


def read_bundle(path: Path) -> Bundle:
    """Read a bundle as it is written, its paths relative to its folder; raises as ``load_bundle``."""
    return parse_bundle(_read(path), where=str(path))


def parse_bundle(document: Any, *, where: str) -> Bundle:
    """Validate a document; raises as ``load_bundle``."""
    if not isinstance(document, Mapping):
        raise BundleError(f"{where}: a bundle is a mapping with a target and drafters", mend=_MEND)
    version = document.get("format_version", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        raise BundleError(
            f"{where}: format version {version!r}; this angelspec reads {FORMAT_VERSION}",
            mend="use the angelspec that wrote it, or create the bundle again",
        )
    try:
        return Bundle.model_validate(document)
    except ValidationError as error:
        lines = problems(error, Bundle)
        raise BundleError(f"{where}:\n" + "\n".join(f"  - {line}" for line in lines), mend=_MEND) from None


def check_bundle(path: Path) -> list[str]:
    """Problems of a bundle file that can be seen without loading a model; empty if none.

    Beyond what ``load_bundle`` checks: every path in it exists.
    """
    try:
        bundle = load_bundle(path)
    except AngelspecError as error:
        return [str(error)]
    places = {"target.source": bundle.target.source}
    places |= {f"drafters.{drafter.name}.source": drafter.source for drafter in bundle.drafters}
    return [
        f"{key}: '{place}' does not exist; give a folder, relative to the bundle if it starts with '.'"
        for key, place in places.items()
        if Path(place).is_absolute() and not Path(place).exists()
    ]


_MEND = "write one: angelspec bundle create --target TARGET --drafter CHECKPOINT"


def _read(path: Path) -> Any:
    if path.is_dir():
        raise BundleError(f"'{path}' is a folder", mend=f"give the bundle's file, such as {path / 'bundle.yaml'}")
    if not path.is_file():
        raise BundleError(f"bundle file '{path}' does not exist", mend="create one: angelspec bundle create")
    try:
        return parse_yaml(path.read_text(encoding="utf-8-sig"))  # JSON is YAML
    except (YamlError, UnicodeDecodeError) as error:
        raise BundleError(f"{path}: not readable as YAML or JSON: {error}", mend=_MEND) from None


def _contradictions(bundle: Bundle) -> list[str]:
    """What no single key shows."""
    names = [drafter.name for drafter in bundle.drafters]
    wrong = [f"drafters: two are called '{name}'" for name in sorted({n for n in names if names.count(n) > 1})]
    wrong += [
        f"drafters: '{drafter.name}' is reserved for a route; call it otherwise"
        for drafter in bundle.drafters
        if drafter.name in (PLAIN, AUTO)
    ]
    if bundle.target.mode_family not in MODE_FAMILIES:
        known = ", ".join(MODE_FAMILIES)
        unknown = bundle.target.mode_family
        return [*wrong, f"target.mode_family: unknown '{unknown}'{suggest(unknown, MODE_FAMILIES)}; allowed: {known}"]
    modes = mode_family(bundle.target.mode_family).modes
    for drafter in bundle.drafters:
        if drafter.mode not in modes:
            wrong.append(
                f"drafters.{drafter.name}.mode: the target has no mode '{drafter.mode}'; allowed: {', '.join(modes)}"
            )
    by_name = {drafter.name: drafter for drafter in bundle.drafters}
    for index, rule in enumerate(bundle.routes):
        if rule.route not in (PLAIN, AUTO) and rule.route not in by_name:
            allowed = [*names, PLAIN, AUTO]
            wrong.append(
                f"routes.{index}.route: no drafter '{rule.route}'{suggest(rule.route, allowed)}; "
                f"allowed: {', '.join(allowed)}"
            )
        elif rule.route in by_name and rule.mode not in (None, by_name[rule.route].mode):
            wrong.append(
                f"routes.{index}: drafter '{rule.route}' is trained for {by_name[rule.route].mode}, not {rule.mode}"
            )
    measured = [(item.drafter, item.workload) for item in bundle.acceptance]
    for index, item in enumerate(bundle.acceptance):
        if item.drafter not in by_name:
            wrong.append(f"acceptance.{index}.drafter: no drafter '{item.drafter}'{suggest(item.drafter, names)}")
        elif len(item.cumulative) != by_name[item.drafter].depth:
            wrong.append(
                f"acceptance.{index}.cumulative: {len(item.cumulative)} numbers, but '{item.drafter}' proposes "
                f"{by_name[item.drafter].depth} tokens"
            )
        if measured.index((item.drafter, item.workload)) != index:
            wrong.append(f"acceptance.{index}: '{item.drafter}' on {item.workload} is given twice")
    for name in bundle.calibrations:
        if name not in by_name:
            wrong.append(f"calibrations.{name}: no drafter '{name}'{suggest(name, names)}")
    for name in bundle.costs.drafting if bundle.costs else ():
        if name not in by_name:
            wrong.append(f"costs.drafting.{name}: no drafter '{name}'{suggest(name, names)}")
    return wrong


def of_checkpoint(
    manifest: DrafterManifest, *, name: str, source: str
) -> tuple[BundleDrafter, list[WorkloadAcceptance]]:
    """A bundle's entries for an exported drafter: what it is, and the acceptance that its evaluation measured.

    Args:
        manifest: of the checkpoint.
        name: what routes and requests are to call it.
        source: where it lies, as the bundle is to say it.

    Measurements are pooled over suites, finished and unfinished answers, at the lowest temperature measured.

    Raises:
        BundleError: they were made at a smaller depth than the drafter's.
    """
    config = manifest.drafter
    drafter = BundleDrafter(
        name=name,
        source=source,
        family=config.family,
        algorithm=manifest.algorithm if manifest.algorithm != config.family else None,
        mode=manifest.mode,
        depth=config.num_proposals,
    )
    coldest = min((item.temperature for item in manifest.acceptance), default=0.0)
    measured = []
    for workload in WORKLOADS:
        cells = [c for c in manifest.acceptance if c.workload == workload and c.temperature == coldest]
        counts = pool(counts for cell in cells for counts in (cell.finished, cell.unfinished))
        item = WorkloadAcceptance.of(counts, drafter=name, workload=workload, depth=drafter.depth)
        measured += [item] if item is not None else []
    return drafter, measured
