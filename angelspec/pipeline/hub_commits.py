"""Which commits of hub datasets a run reads: asked once, and remembered for a time when the hub does not answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from angelspec.core.errors import MissingRequirement
from angelspec.core.files import read_json, write_json_atomic
from angelspec.core.recipe import DataSection, PromptSource
from angelspec.data.sources import at_commit, locate

COMMITS_FILE = ".hub-commits.json"
"""In a store of stages: the commit that a dataset, by its name and revision, had when it was last asked for."""


class HubCommits:
    """The commits of one run; what a stage is named by, reads and records is of the same one.

    Args:
        store: folder of the stages.
        say: told where a remembered commit is taken.
    """

    def __init__(self, store: Path, say: Callable[[str], None]) -> None:
        self._path, self._say = store / COMMITS_FILE, say
        self._commits: dict[str, str] = {}

    def pin(self, data: DataSection) -> DataSection:
        """The same sources, those of the hub at the commit that they have now, or had when the hub last answered.

        Raises:
            MissingRequirement: the hub does not answer, and never did.
            DataError: a source that does not exist.
        """
        parts = {part: tuple(map(self._pinned, getattr(data, part))) for part in ("train", "evaluation")}
        return data.model_copy(update=parts)

    def _pinned(self, source: PromptSource) -> PromptSource:
        if not source.source.startswith("hf:"):
            return source
        name = f"{source.source}@{source.revision}" if source.revision else source.source
        if name not in self._commits:
            self._commits[name] = self._asked(source, name)
        return at_commit(source, self._commits[name])

    def _asked(self, source: PromptSource, name: str) -> str:
        known = read_json(self._path) if self._path.is_file() else {}
        try:
            commit = locate(source).commit
        except MissingRequirement:
            if name not in known:
                raise
            self._say(f"  the hub does not answer; {name} is taken at commit {known[name][:8]}, its last known one")
            return known[name]
        if known.get(name) != commit:
            write_json_atomic(self._path, {**known, name: commit})
        return commit
