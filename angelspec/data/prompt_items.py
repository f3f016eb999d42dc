"""Prompts as a command line names them, read into first questions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from angelspec.core.errors import RecipeError
from angelspec.core.recipe import DataSection, PromptSource
from angelspec.data.conversation import Conversation
from angelspec.data.reading import read_sources
from angelspec.data.rounds import first_round


def prompt_source(text: str) -> PromptSource:
    """``[NAME=]SOURCE``; a source without a scheme is a file.

    Raises:
        RecipeError: the name is empty.
    """
    name, separator, source = text.partition("=")
    if not separator:
        name, source = Path(text.partition(":")[2] or text).stem, text
    if ":" not in source:
        source = f"file:{source}"
    if not name:
        raise RecipeError(f"prompts '{text}' have no name", mend="write NAME=SOURCE")
    return PromptSource(name=name, source=source)


def read_questions(items: Sequence[str], *, limit: int | None = None) -> dict[str, list[Conversation]]:
    """Conversations that end with their first user turn, by the name of their source, at most ``limit`` of each; one
    that does not say its workload is classified as a server would.

    Raises:
        DataError: a source can't be read, or two share a name.
    """
    sources = [prompt_source(item).model_copy(update={"limit": limit}) for item in items]
    section = DataSection(train=tuple(sources), evaluation=tuple(sources))
    found: dict[str, list[Conversation]] = {source.name: [] for source in sources}
    for item in first_round(read_sources(sources, section, responses="rollout", classify=True).accepted):
        found[item.conversation.source].append(item.conversation)
    return found
