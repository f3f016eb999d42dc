"""What the scheduler attaches to tokens becomes the answer's metadata, positions and pieces of text."""

from __future__ import annotations

from types import SimpleNamespace

from angelspec.core.request_label import RequestRecord
from sglang_ext.answers import AnswerState, opening, step_entries
from sglang_ext.metrics import Counters, StepReport, StepTimes


def report(**changes: object) -> StepReport:
    facts: dict = {
        "routes": ["dfly", None],
        "drafted": [7, 0],
        "verified": [3, 0],
        "committed": [3, 1],
    }
    return StepReport(**{**facts, **changes})


def test_entries_carry_positions_and_the_step_on_its_first_token() -> None:
    assert step_entries(report(), 0) == [[1, "dfly", 7, 3], 2, 0]
    assert step_entries(report(), 1) == [[0, "ar", 0, 0]]


def test_an_answer_adds_up() -> None:
    request = SimpleNamespace(
        record=RequestRecord(why="asked for", workload="code", mode="no-think"), workload="code", mode="no-think"
    )
    answer = AnswerState()
    assert answer.add([opening(request)]) == [0]
    assert answer.add([*step_entries(report(), 0), None]) == [1, 2, 0, 0]
    answer.add(step_entries(report(), 1))
    assert answer.positions == [0, 1, 2, 0, 0, 0]
    metadata = answer.metadata()
    assert metadata["why"] == "asked for"
    assert metadata["workload"] == "code" and metadata["mode"] == "no-think"
    assert metadata["steps_by_route"] == {"ar": 1, "dfly": 1}
    assert metadata["verify_steps"] == 2
    assert metadata["accepted_length"] == 2.0
    assert metadata["kept_ratio"] == (1 + 3 + 1) / (1 + 7 + 1)


def test_an_answer_says_why_it_went_on_plainly() -> None:
    request = SimpleNamespace(
        record=RequestRecord(why="asked for", workload="code", mode="no-think"), workload="code", mode="no-think"
    )
    answer = AnswerState()
    answer.add([opening(request), *step_entries(report(), 0)])
    assert answer.metadata()["why"] == "asked for"
    broken = report(drafted=[0, 0], verified=[0, 0], committed=[1, 1], reasons={0: "not finite"})
    answer.add(step_entries(broken, 0))
    answer.add(step_entries(report(), 1))
    assert answer.metadata()["why"] == "not finite"
    assert step_entries(broken, 1) == [[0, "ar", 0, 0]]


def test_an_answer_that_stops_within_a_step_counts_the_step_and_the_tokens_that_came() -> None:
    answer = AnswerState()
    answer.add([opening(None), *step_entries(report(committed=[5, 1]), 0)[:2]])
    metadata = answer.metadata()
    assert (metadata["route"], metadata["verify_steps"], metadata["generated_tokens"]) == ("dfly", 1, 2)
    assert metadata["accepted_length"] == 2.0


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")


def test_pieces_wait_for_whole_characters_and_add_up_to_the_text() -> None:
    text = "a→ü!"
    ids = list(text.encode())
    answer = AnswerState(tokenizer=Bytes())
    answer.positions = [0, 1, 2, 0, 1, 0, 0]
    answer.receive(ids[:2], incremental=False)
    first = answer.pieces()
    answer.receive(ids[:4], incremental=False)
    answer.receive(ids, incremental=False)
    rest = answer.pieces()
    assert [piece["text"] for piece in first] == ["a", ""]
    assert "".join(piece["text"] for piece in [*first, *rest]) == text
    assert [piece["position"] for piece in [*first, *rest]] == answer.positions
    assert answer.pieces() == []


def test_pieces_of_new_tokens_alone_are_shown_once_whatever_the_number_of_chunks() -> None:
    answer = AnswerState(tokenizer=Bytes())
    answer.positions = [0, 1, 2, 0]
    answer.receive(list(b"ab"), incremental=True)  # a content without a chunk
    answer.receive(list(b"cd"), incremental=True)
    shown = [*answer.pieces(), *answer.pieces()]
    assert [(piece["text"], piece["position"]) for piece in shown] == [("a", 0), ("b", 1), ("c", 2), ("d", 0)]


def test_counters_tell_mixed_and_cut_steps() -> None:
    counters = Counters()
    counters.cost(foretold=0.4, taken=0.5)
    counters.cost(foretold=0.7, taken=0.5)
    assert (counters.costed_seconds, round(counters.misjudged_seconds, 6)) == (1.0, 0.3)
    counters.time(StepTimes(draft=0.1, plan=0.0, verify=0.2, other=0.0))
    counters.step(report())
    counters.step(report(routes=[None, None], drafted=[0, 0], verified=[0, 0], committed=[1, 1]))
    counters.step(report(routes=["dfly", "dfly"], drafted=[7, 7], verified=[7, 7], committed=[8, 1]))
    counted = counters.as_dict()
    assert (counted["steps"], counted["speculative_steps"], counted["mixed_steps"], counted["cut_steps"]) == (
        3,
        2,
        1,
        1,
    )
    assert counted["drafted_slots"] == 2 + 7 + 2 + 2 + 14
    assert counted["verified_slots"] == 2 + 3 + 2 + 2 + 14
    assert counted["committed_tokens"] == 4 + 2 + 9
    assert (counted["draft_seconds"], counted["verify_seconds"]) == (0.1, 0.2)


def test_rows_whose_request_had_ended_are_not_counted() -> None:
    counters = Counters()
    assert counters.step(report().without({0})).routes == [None]
    assert (counters.committed_tokens, counters.speculative_steps) == (1, 0)
    counters.step(report().without({0, 1}))
    assert counters.steps == 1
