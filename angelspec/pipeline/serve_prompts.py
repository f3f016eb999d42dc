"""Prompt sources as the traffic of a load test."""

from __future__ import annotations

from collections.abc import Sequence

from angelspec.data.prompt_items import prompt_source, read_questions
from angelspec.serving.bench import LoadPrompt, Traffic, mixed_traffic


def traffics_of(items: Sequence[str], *, limit: int | None = None, mixed: bool = True) -> list[Traffic]:
    """One traffic per source, and one of all in turns.

    Args:
        items: ``[NAME=]SOURCE``.
        limit: prompts per source.
        mixed: whether several sources are measured together, too.

    Raises:
        DataError: a source can't be read.
    """
    questions = read_questions(items, limit=limit)
    sources = {prompt_source(item).name: item for item in items}
    traffics = [
        Traffic(
            name,
            sources[name],
            tuple(
                LoadPrompt(item.id, item.workload, tuple(message.to_template() for message in item.messages))
                for item in conversations
            ),
        )
        for name, conversations in questions.items()
    ]
    return [*traffics, mixed_traffic(traffics)] if mixed and len(traffics) > 1 else traffics
