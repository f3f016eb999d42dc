"""A suite: named prompts, rendered to token ids exactly as a server renders them, reported together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from angelspec.core.errors import DataError
from angelspec.core.fingerprint import fingerprint
from angelspec.data.answers import Prompt


@dataclass(frozen=True)
class Suite:
    """Prompts that are reported together."""

    name: str
    prompts: tuple[Prompt, ...]
    refused: Mapping[str, int] = field(default_factory=dict)
    """Prompts of its source that can't be asked, by reason."""

    def __post_init__(self) -> None:
        if not self.prompts:
            raise DataError(f"evaluation suite '{self.name}' holds no prompts", mend="add prompts or drop the suite")
        empty = [prompt.id for prompt in self.prompts if not prompt.tokens]
        if empty:
            raise DataError(f"evaluation suite '{self.name}': prompt '{empty[0]}' has no tokens", mend="drop it")

    @property
    def digest(self) -> str:
        """Content hash of the prompts."""
        return fingerprint([[prompt.id, list(prompt.tokens)] for prompt in self.prompts])

    def first(self, count: int | None) -> Suite:
        """The suite's first ``count`` prompts; None: all."""
        return self if count is None else replace(self, prompts=self.prompts[:count])


def check_names(suites: Sequence[Suite]) -> None:
    """Raise a ``DataError`` if two suites share a name: their results could not be told apart."""
    names = [suite.name for suite in suites]
    doubles = sorted({name for name in names if names.count(name) > 1})
    if doubles:
        raise DataError(f"evaluation suites share the name {', '.join(doubles)}", mend="name each suite differently")
