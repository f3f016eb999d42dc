"""The front matter of a model card: written from the manifest, and judged before any hub is asked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from angelspec.core.acceptance import AcceptanceCounts, pool
from angelspec.core.manifest import DrafterManifest
from angelspec.core.repositories import is_repository_name

_MARK = "---"
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_PAPERS = {"dflash": "2602.06036", "dspark": "2607.05147"}
_OUR_PAPER = "2607.25852"
_SEVERAL = ("tags", "language", "datasets", "base_model")
"""Keys that hold texts, one or several."""


def card_metadata(
    manifest: DrafterManifest, *, name: str, license: str, base_model: str | None, engine: str | None
) -> dict[str, Any]:
    """The front matter, in the order in which it is written.

    No ``base_model_relation``: the hubs know adapter, merge, quantized and finetune, and a drafter is none of them.

    Args:
        manifest: of the drafter.
        name: of the model, without its organisation.
        license: SPDX identifier of the drafter's licence, in small letters.
        base_model: ORG/NAME of the target; None: it is on no hub.
        engine: the library that loads it, as the hubs know it; None: none does yet.
    """
    papers = [_PAPERS[manifest.algorithm]] if manifest.algorithm in _PAPERS else []
    tags = ["angelspec", "speculative-decoding", "draft-model", manifest.algorithm, manifest.mode]
    metadata: dict[str, Any] = {
        "license": license,
        "base_model": base_model,
        "library_name": engine,
        "pipeline_tag": "text-generation",
        "tags": tags + [f"arxiv:{paper}" for paper in [*papers, _OUR_PAPER]],
        "datasets": sorted({_repository(source.source) for source in manifest.recipe.data.train
                            if source.source.startswith("hf:")}) or None,
        "model-index": _model_index(manifest, name=name),
    }  # fmt: skip
    return {key: value for key, value in metadata.items() if value is not None}


def by_suite(manifest: DrafterManifest) -> dict[tuple[str, float], AcceptanceCounts]:
    """Finished answers by suite and temperature, workloads pooled."""
    counts: dict[tuple[str, float], AcceptanceCounts] = {}
    for item in manifest.acceptance:
        key = (item.suite, item.temperature)
        counts[key] = pool([counts.get(key, AcceptanceCounts()), item.finished])
    return counts


def _model_index(manifest: DrafterManifest, *, name: str) -> list[dict[str, Any]] | None:
    sources = {source.name: source.source for source in manifest.recipe.data.evaluation}
    results = []
    for suite in dict.fromkeys(item.suite for item in manifest.acceptance):
        metrics = [
            {
                "type": "mean_accepted_length",
                "name": f"accepted length, temperature {temperature:g}, finished answers",
                "value": round(counts.mean_accepted_length, 3),
            }
            for (of, temperature), counts in by_suite(manifest).items()
            if of == suite and counts.mean_accepted_length is not None
        ]
        source = sources.get(suite, "")
        dataset = _repository(source) if source.startswith("hf:") else f"angelspec-prompts-{_slug(suite)}"
        if metrics:
            results.append(
                {
                    "task": {"type": "text-generation", "name": "speculative decoding"},
                    "dataset": {"name": suite, "type": dataset},
                    "metrics": metrics,
                }
            )
    return [{"name": name, "results": results}] if results else None


def _repository(source: str) -> str:
    """ORG/NAME of ``hf:ORG/NAME[@REVISION]...``."""
    return source.removeprefix("hf:").partition("@")[0]


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def front_matter(metadata: Mapping[str, Any]) -> str:
    """The metadata between its two marks."""
    text = yaml.safe_dump(dict(metadata), sort_keys=False, allow_unicode=True, width=1000)
    return f"{_MARK}\n{text}{_MARK}\n"


def split_card(text: str) -> tuple[str | None, str]:
    """The YAML of a card and what follows; (None, text) where there is no front matter."""
    lines = text.removeprefix("\ufeff").splitlines(keepends=True)
    if not lines or lines[0].strip() != _MARK:
        return None, text
    end = next((index for index, line in enumerate(lines[1:], 1) if line.strip() == _MARK), None)
    if end is None:
        return None, text
    return "".join(lines[1:end]), "".join(lines[end + 1 :])


def card_problems(text: str, *, base_model: str | None, license: str) -> list[str]:
    """What is wrong with a card, one sentence each (empty: nothing).

    Args:
        text: of README.md.
        base_model: the target's ORG/NAME, which the card must name; None: it is on no hub.
        license: that the publication is made under.
    """
    if text.startswith("\ufeff"):
        return ["README.md begins with a byte-order mark, behind which the hubs find no front matter: save it without"]
    matter, body = split_card(text)
    if matter is None:
        return ["README.md has no front matter between two lines of ---"]
    try:
        metadata = yaml.safe_load(matter)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        place = f" (line {where.line + 2})" if where is not None else ""
        return [f"README.md's front matter is no YAML{place}: {getattr(error, 'problem', None) or error}"]
    if not isinstance(metadata, dict):
        return ["README.md's front matter is no mapping"]
    problems = []
    for key in ("license", "pipeline_tag", "library_name"):
        if key in metadata and not isinstance(metadata[key], str):
            problems.append(f"README.md: {key} must be one text")
    if not _LICENSE.fullmatch(str(metadata.get("license", ""))):
        problems.append("README.md: license must be an identifier in small letters, like apache-2.0")
    elif metadata["license"] != license:
        problems.append(f"README.md: license is {metadata['license']}, but the publication's is {license}")
    for key in _SEVERAL:
        value = metadata.get(key)
        values = value if isinstance(value, list) else [value]
        if value is not None and not all(isinstance(item, str) and item for item in values):
            problems.append(f"README.md: {key} must be a text or a list of texts")
    named = metadata.get("base_model")
    bases = named if isinstance(named, list) else [] if named is None else [named]
    if base_model is not None and base_model not in bases:
        problems.append(f"README.md: base_model must be the target, {base_model}")
    problems += [f"README.md: base_model '{item}' is no ORG/NAME" for item in bases
                 if not is_repository_name(str(item))]  # fmt: skip
    problems += _index_problems(text)
    if not body.strip():
        problems.append("README.md says nothing below its front matter")
    return problems


def _index_problems(text: str) -> list[str]:
    """What the hub's own parser says of the results."""
    from huggingface_hub import ModelCard

    try:
        ModelCard(text)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return [f"README.md: model-index can't be read: {error}"]
    return []
