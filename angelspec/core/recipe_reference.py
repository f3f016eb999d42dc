"""The reference of recipes, generated from the schema: every key, its type, default and meaning."""

from __future__ import annotations

import re
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from angelspec.core.drafter_config import BLOCK_ALGORITHMS, MoeConfig
from angelspec.core.known_targets import KNOWN_TARGETS
from angelspec.core.modes import MODE_FAMILIES
from angelspec.core.objective import Objective
from angelspec.core.problems import models_in
from angelspec.core.recipe import PromptSource, Recipe, TrainingStage
from angelspec.core.recipe_files import list_recipes

_DRAFTER_KINDS = (f" (algorithm: {', '.join(BLOCK_ALGORITHMS)})", " (algorithm: mtp)")
_INTRODUCTION = """# Recipes

<!-- Written by `angelspec recipe reference`; a test keeps it up to date. Edit the schema instead. -->

A recipe is one YAML file that describes a whole run. `base:` names a recipe whose values it starts from, `presets:`
holds named changes (`--preset quick`), and `--set section.field=value` changes one value on the command line; list
items are reached by index or by their name (`--set training.stages.cold-start.epochs=3`). A key that does not exist
is an error. `angelspec recipe show NAME` prints the resolved recipe: what is written beside the run and into the
exported drafter.
"""


def recipe_reference() -> str:
    """The Markdown text of ``recipes/README.md``."""
    parts = [_INTRODUCTION, _recipes(), _targets(), _modes()]
    parts.append(_section("recipe", Recipe))
    for name, field in Recipe.model_fields.items():
        models = models_in(field.annotation)
        kinds = _DRAFTER_KINDS if name == "drafter" else ("",)
        parts += [_section(name + kind, model) for model, kind in zip(models, kinds, strict=False)]
    parts.append(_section("drafter.moe", MoeConfig))
    parts.append(_section("data.train and data.evaluation items", PromptSource))
    parts.append(_section("training.optimizer", models_in(_field("training", "optimizer").annotation)[0]))
    parts.append(_section("training.stages items", TrainingStage))
    parts.append(_section("training.stages items: objective", Objective))
    parts.append(_section("evaluation.lookup", models_in(_field("evaluation", "lookup").annotation)[0]))
    return "\n".join(parts)


def _field(section: str, name: str) -> FieldInfo:
    return models_in(Recipe.model_fields[section].annotation)[0].model_fields[name]


def _recipes() -> str:
    rows = [f"| `{s.name}` | {s.description} | {', '.join(s.presets)} |" for s in list_recipes()]
    return "\n".join(["## Shipped recipes", "", "| recipe | what it trains | presets |", "|---|---|---|", *rows, ""])


def _targets() -> str:
    rows = [
        f"| `{name}` | `{target.source}` | {', '.join(MODE_FAMILIES[target.mode_family].modes)} |"
        for name, target in KNOWN_TARGETS.items()
    ]
    return "\n".join(["## Targets known by name", "", "| target.name | source | modes |", "|---|---|---|", *rows, ""])


def _modes() -> str:
    rows = []
    for family in MODE_FAMILIES.values():
        arguments = "; ".join(f"{mode}: `{dict(family.template_arguments[mode])}`" for mode in family.modes)
        rows.append(f"| `{family.name}` | {arguments} |")
    head = ["## Thinking modes", "", "| mode_family | chat template arguments by mode |", "|---|---|"]
    return "\n".join([*head, *rows, ""])


def _section(title: str, model: type[BaseModel]) -> str:
    lines = [f"## {title}", ""]
    summary = (model.__doc__ or "").strip().splitlines()
    if summary:
        lines += [" ".join(line.strip() for line in summary).replace("``", "`"), ""]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        meaning = re.sub(r"\s+", " ", field.description or "").replace("``", "`").replace("|", "\\|")
        lines.append(f"| `{name}` | {_type(field.annotation)} | {_default(field)} | {meaning} |")
    return "\n".join([*lines, ""])


def _type(annotation: Any) -> str:
    if isinstance(annotation, type) and not get_args(annotation):
        return "section" if issubclass(annotation, BaseModel) else annotation.__name__
    if len(models_in(annotation)) > 1:
        return "section"
    text = str(annotation).replace("typing.", "").replace("NoneType", "None")
    text = re.sub(r"angelspec\.[\w.]*\.(\w+)", r"\1", text)
    text = re.sub(r"Annotated\[(\w+), FieldInfo\(.*?metadata=\[[^\]]*\]\)\]", r"\1", text)
    return f"`{text}`".replace("|", "\\|")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined or isinstance(value, BaseModel):
        return "see below"
    return f"`{value!r}`".replace("|", "\\|")
