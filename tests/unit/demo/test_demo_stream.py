"""Merging of streams: order, errors, closing, and the figures of a column."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from angelspec.demo.columns import Column, Server
from angelspec.demo.stream import ColumnState, merge
from angelspec.serving.answers import ChatChunk, Piece, Usage
from angelspec.serving.failures import RequestRefused

SERVER = Server("s", "http://127.0.0.1:1")


def state(key: str = "a") -> ColumnState:
    return ColumnState(Column(key, key, "", SERVER, {}))


def source(text: str, *, log: list[str] | None = None, error: Exception | None = None, pause: float = 0.0):
    """Opens a stream of one character each."""
    events = [] if log is None else log

    @asynccontextmanager
    async def opened():
        async def chunks():
            for number, letter in enumerate(text):
                await asyncio.sleep(pause)
                events.append(letter)
                yield ChatChunk(text=letter, seconds=0.1 * (number + 1))
            if error is not None:
                raise error

        events.append("open")
        try:
            yield chunks()
        finally:
            events.append("close")

    return opened


async def drained(lanes, **options) -> list[list[str]]:
    """Texts of all columns at each frame."""
    states = [state for lane in lanes for state, _ in lane]
    return [[s.answer.text for s in states] async for _ in merge(lanes, frame_seconds=0.0, **options)]


def test_columns_of_a_lane_run_in_turn_and_lanes_side_by_side():
    log: list[str] = []
    lane = [(state("a"), source("xy", log=log)), (state("b"), source("z", log=log))]
    frames = asyncio.run(drained([lane]))
    assert log == ["open", "x", "y", "close", "open", "z", "close"]
    assert frames[-1] == ["xy", "z"] and [s.status for s, _ in lane] == ["done", "done"]

    log.clear()
    asyncio.run(drained([[(state("a"), source("xxx", log=log, pause=0.01))], [(state("b"), source("y", log=log))]]))
    assert log.index("y") < log.index("x"), "a fast column was held back by a slow one"


def test_frames_show_the_text_grow():
    frames = asyncio.run(drained([[(state(), source("abc", pause=0.01))]]))
    assert [row[0] for row in frames][-1] == "abc"
    assert {"a", "ab"} <= {row[0] for row in frames}


def test_frames_are_limited_to_what_the_page_can_draw():
    async def run() -> int:
        count = 0
        async for _ in merge([[(state(), source("x" * 100, pause=0.002))]], frame_seconds=0.1):
            count += 1
        return count

    assert asyncio.run(run()) <= 12


@pytest.mark.parametrize("error", [RequestRefused("no such route", status=400, mend="use auto"), ValueError("broken")])
def test_an_error_is_told_in_its_column_and_stops_no_other(error):
    first, second, third = state("a"), state("b"), state("c")
    lanes = [[(first, source("xy", error=error)), (second, source("z"))], [(third, source("w", pause=0.01))]]
    asyncio.run(drained(lanes))
    assert [s.status for s in (first, second, third)] == ["failed", "done", "done"]
    assert first.answer.text == "xy" and str(getattr(error, "message", error)) in first.error and first.mend


def test_closing_ends_every_request_and_says_so():
    log: list[str] = []
    running, waiting = state("a"), state("b")

    async def run() -> None:
        frames = merge([[(running, source("x" * 100, log=log, pause=0.005)), (waiting, source("y", log=log))]])
        async for _ in frames:
            if running.answer.text:
                break
        await frames.aclose()

    asyncio.run(run())
    assert log[-1] == "close" and log.count("open") == 1
    assert (running.status, waiting.status) == ("stopped", "stopped")


# --------------------------------------------------------------------------------------------- figures


def test_speed_counts_the_tokens_behind_the_first_event():
    found = state()
    found.add(ChatChunk(text="a", pieces=(Piece("a", 0),), seconds=1.0))
    assert found.tokens_per_second is None and found.first_token_seconds == 1.0
    found.add(ChatChunk(text="bcd", pieces=(Piece("b", 1), Piece("c", 2), Piece("d", 0)), seconds=1.5))
    found.add(ChatChunk(usage=Usage(prompt_tokens=3, completion_tokens=4), seconds=2.5))
    assert found.tokens == 4
    assert found.tokens_per_second == pytest.approx(3 / 0.5), "the closing event is no token"


def test_a_server_without_pieces_is_counted_by_events_and_then_by_its_usage():
    found = state()
    for number in range(5):
        found.add(ChatChunk(text="word ", seconds=1 + 0.1 * number))
    assert found.tokens == 5 and found.tokens_per_second == pytest.approx(4 / 0.4)
    found.add(ChatChunk(usage=Usage(prompt_tokens=3, completion_tokens=9), seconds=1.5))
    assert found.tokens == 9 and found.tokens_per_second == pytest.approx(8 / 0.4)
    assert found.pieces == (Piece("word " * 5, 0),)


def test_tokens_that_the_server_does_not_show_are_left_out_at_the_end():
    found = state()
    found.add(ChatChunk(text="Hi", pieces=(Piece("Hi", 0), Piece("!<end>", 1)), seconds=1.0))
    assert "".join(piece.text for piece in found.pieces) == "Hi!<end>"
    found.add(ChatChunk(text="!", finish_reason="stop", seconds=1.1))
    assert found.pieces == [Piece("Hi", 0), Piece("!", 1)]
