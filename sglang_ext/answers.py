"""What an answer says about how it was made, on its way from the scheduler to the client.

The scheduler attaches one entry to every output token, since SGLang carries such lists and cuts them as it cuts tokens;
the HTTP process folds the entries into ``meta_info["angelspec"]`` and ``meta_info["angelspec_positions"]``.

An entry is the token's position in its draft (0: the target's own), and on the first token of a step and of an answer
a list: the position, and what there is to say of the step or the request. An answer that stops within a step is cut
there, so the tokens of a step are counted as they come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from angelspec.core.bundle import PLAIN
from angelspec.core.request_label import RequestRecord
from sglang_ext.metrics import StepReport

TOKENS_KEY = "angelspec_tokens"
"""Under which the entries travel."""

Entry = int | list[Any] | None
_CONTEXT = 6
"""Tokens before one that may change its text."""


def opening(request: Any) -> Entry:
    """The entry of the token that prefill yields."""
    if request is None:
        return None
    return [0, {"why": request.record.why, "workload": request.workload, "mode": request.mode}]


def step_entries(report: StepReport, row: int) -> list[Entry]:
    """The entries of the tokens that one row of a step committed."""
    committed = report.committed[row]
    name = report.routes[row]
    drafted, verified = (report.drafted[row], report.verified[row]) if name else (0, 0)
    first, *more = [*range(1, committed), 0]
    reason = [report.reasons[row]] if row in report.reasons else []
    return [[first, name or PLAIN, drafted, verified, *reason], *more]


@dataclass
class AnswerState:
    """One answer, as far as it has come, in the HTTP process."""

    record: RequestRecord = field(default_factory=lambda: RequestRecord(why="", workload="chat", mode=None))
    positions: list[int] = field(default_factory=list)
    tokenizer: Any = None
    _received: int = 0
    _waiting: list[int] = field(default_factory=list)
    _window: list[int] = field(default_factory=list)

    def add(self, entries: Sequence[Entry]) -> list[int]:
        """Fold the entries of new tokens; returns their positions in their drafts."""
        new = []
        for entry in entries:
            if entry is None or isinstance(entry, int):
                new.append(entry or 0)
                self.record.extend(0 if entry is None else 1)
                continue
            new.append(entry[0])
            if isinstance(entry[1], dict):
                if not self.record.why:
                    self.record.why, self.record.workload = entry[1]["why"], entry[1]["workload"]
                    self.record.mode = entry[1]["mode"]
            else:
                _, name, drafted, verified, *reason = entry
                self.record.why = reason[0] if reason else self.record.why
                self.record.add(name, committed=1, drafted=drafted, verified=verified)
        self.positions += new
        return new

    def receive(self, output_ids: Sequence[int], *, incremental: bool) -> None:
        """Tokens that are to be shown: of the answer so far, with ``incremental`` only the new ones."""
        new = list(output_ids) if incremental else list(output_ids[self._received :])
        self._received += len(new)
        self._waiting += new

    def pieces(self) -> list[dict[str, Any]]:
        """The texts of the received tokens that were not shown yet, with their positions."""
        new, self._waiting = self._waiting, []
        first = self._received - len(new)
        positions = self.positions[first : self._received]
        positions += [0] * (len(new) - len(positions))
        return [
            {"text": self._text(token), "position": position} for token, position in zip(new, positions, strict=True)
        ]

    def _text(self, token: int) -> str:
        """What a token adds to the text; nothing while a character is incomplete, which the next one then completes."""
        before = self._decode(self._window)
        self._window.append(token)
        after = self._decode(self._window)
        if after.endswith("\ufffd"):
            return ""
        text = after[len(before.rstrip("\ufffd")) :]
        self._window = self._window[-_CONTEXT:]
        return text

    def _decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True) if tokens and self.tokenizer else ""

    def metadata(self) -> dict[str, Any]:
        """``meta_info["angelspec"]``."""
        return self.record.metadata.model_dump(mode="json")
