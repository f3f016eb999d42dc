"""What can be wrong with a drafter checkpoint, as data."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong."""

    code: str
    """A stable short name, e.g. ``missing-tensor``."""
    key: str
    """The tensor, configuration key or file it is about."""
    detail: str
    """What is wrong, as a sentence that names the key."""
    mend: str | None = None
    """What to do about it."""

    def __str__(self) -> str:
        return f"{self.code}: {self.detail}" + (f" (mend: {self.mend})" if self.mend else "")


@dataclass
class Findings:
    """Problems, and notes on what was seen and is no problem."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, code: str, key: str, detail: str, *, mend: str | None = None) -> None:
        """Record a problem."""
        self.problems.append(Problem(code, key, detail, mend))

    def note(self, text: str) -> None:
        """Record a remark."""
        self.notes.append(text)
