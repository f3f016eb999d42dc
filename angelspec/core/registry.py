"""The registry of released drafters, ``checkpoints/registry.yaml``: where each lies, and what loading it takes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from angelspec.core.drafter_config import BlockAlgorithm
from angelspec.core.errors import CheckpointError, HubError, suggest
from angelspec.core.locations import resource_folder
from angelspec.core.modes import Mode
from angelspec.core.problems import problems
from angelspec.core.repositories import Repository
from angelspec.core.yaml_text import YamlError, parse_yaml

REGISTRY_FILE = "registry.yaml"
SCHEMA_FILE = "registry.schema.json"

_STRICT = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class RegisteredDrafter(BaseModel):
    """One released drafter."""

    model_config = _STRICT

    name: str = Field(pattern=r"^[\w.-]+(/[\w.-]+)?$")
    """What commands call it: ORG/NAME of a hub, or the name of a drafter that ships with angelspec."""
    repository: str | None = None
    """hf:ORG/NAME[@REVISION] or modelscope:ORG/NAME[@REVISION]. A revision is pinned where the newest is wrong."""
    mirrors: tuple[str, ...] = ()
    """The same files elsewhere, tried in this order when the repository can't be reached."""
    folder: str | None = Field(default=None, pattern=r"^[\w.-]+$")
    """Its folder beside the registry, if it ships with angelspec."""
    target: str
    """The target it drafts for: ORG/NAME on the Hugging Face hub."""
    algorithm: BlockAlgorithm | Literal["mtp"]
    mode: Mode
    """The thinking mode it was trained for."""
    mode_is: Literal["stated", "inferred"] = "stated"
    """Whether its publisher states the mode, or it follows from the data and figures that he names."""
    proposals: int = Field(ge=1)
    """Tokens proposed per step."""
    block_size: int | None = Field(default=None, ge=2)
    """Slots with the anchor; of block drafters only."""
    license: str
    """Of the weights, as an SPDX identifier, or the name of the licence text that lies beside them."""
    pinned_because: str | None = None
    """What is wrong with the newest revision."""
    loading: str
    """What is peculiar about its files, and what angelspec's loader does about it."""
    config_overrides: dict[str, Any] = Field(default_factory=dict)
    """Fields of the drafter's configuration that its config.json lacks or may lack."""
    evidence: str
    """Where these facts come from, and which of them could not be verified."""

    @field_validator("repository", "mirrors")
    @classmethod
    def _is_repository(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        for place in (value,) if isinstance(value, str) else value or ():
            try:
                Repository.parse(place)
            except HubError as error:
                raise ValueError(f"{error.message}; {error.mend}") from error
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.repository is None and self.folder is None:
            raise ValueError("give repository, folder or both")
        if (self.algorithm == "mtp") != (self.block_size is None):
            raise ValueError("block_size belongs to block drafters and to them alone")
        if self.block_size is not None and self.proposals != self.block_size - 1:
            raise ValueError(f"a block of {self.block_size} slots proposes {self.block_size - 1}, not {self.proposals}")
        pinned = bool(self.places) and self.places[0].revision is not None
        if pinned != (self.pinned_because is not None):
            raise ValueError("a pinned revision and pinned_because belong together")
        return self

    @property
    def places(self) -> tuple[Repository, ...]:
        """Where it can be fetched, in the order in which that is tried."""
        return tuple(Repository.parse(place) for place in (self.repository, *self.mirrors) if place is not None)


class Registry(BaseModel):
    """All released drafters that angelspec knows."""

    model_config = _STRICT

    format_version: Literal[1] = 1
    drafters: tuple[RegisteredDrafter, ...]

    @model_validator(mode="after")
    def _unique(self) -> Self:
        names = [drafter.name for drafter in self.drafters]
        doubles = sorted({name for name in names if names.count(name) > 1})
        if doubles:
            raise ValueError(f"registered twice: {', '.join(doubles)}")
        return self

    def find(self, name: str) -> RegisteredDrafter | None:
        """The drafter of that name, or that lies in the repository of that name (hub and revision do not count)."""
        for drafter in self.drafters:
            if name == drafter.name or name in [place.name for place in drafter.places]:
                return drafter
        return None

    def need(self, name: str) -> RegisteredDrafter:
        """As ``find``.

        Raises:
            CheckpointError: no such drafter, with a suggestion.
        """
        found = self.find(name)
        if found is None:
            known = [drafter.name for drafter in self.drafters]
            raise CheckpointError(
                f"'{name}' is neither a folder nor a registered drafter{suggest(name, known)}",
                mend="give a folder, hf:ORG/NAME, modelscope:ORG/NAME, or a name from `angelspec checkpoint show`",
            )
        return found

    def for_target(self, target: str) -> Sequence[RegisteredDrafter]:
        """The drafters of one target."""
        return [drafter for drafter in self.drafters if drafter.target == target]


def parse_registry(text: str) -> Registry:
    """Read a registry from YAML.

    Raises:
        CheckpointError: no YAML, or everything that is wrong with its entries (by name and key).
    """
    try:
        content = parse_yaml(text)
        return Registry.model_validate(content)
    except YamlError as error:
        raise CheckpointError(f"{REGISTRY_FILE} is no YAML: {error}", mend="correct the YAML there") from error
    except ValidationError as error:
        found = [_by_name(problem, content) for problem in problems(error, Registry)]
        lines = "\n".join(f"  {problem}" for problem in found)
        raise CheckpointError(
            f"{REGISTRY_FILE}: {len(found)} problem(s)\n{lines}", mend=f"mend them; see {SCHEMA_FILE}"
        ) from error


def _by_name(problem: str, content: Any) -> str:
    """A problem whose entry is called by its name rather than by its place in the list."""
    found = re.match(r"drafters\.(\d+)(?:\.|: )", problem)
    entry = content["drafters"][int(found[1])] if found else None
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        return problem
    return f"{entry['name']}: {problem[found.end() :]}"


def load_registry() -> Registry:
    """The registry that ships with angelspec."""
    return parse_registry((resource_folder("checkpoints") / REGISTRY_FILE).read_text(encoding="utf-8"))


def registry_schema() -> str:
    """The JSON schema of the registry, as ``checkpoints/registry.schema.json`` holds it."""
    return json.dumps(Registry.model_json_schema(), indent=2, ensure_ascii=False) + "\n"
