"""States as HTML: escaping, shades, thinking, code, and only the end of a card grows."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from angelspec.core.request_label import RequestMetadata
from angelspec.demo import texts
from angelspec.demo.columns import Column, Seen, Server
from angelspec.demo.render import Part, board, card, scoreboard, server_lines, shade, split_parts, token_html
from angelspec.demo.stream import ColumnState
from angelspec.serving.answers import ChatChunk, Piece

SERVER = Server("s", "http://127.0.0.1:1")
THINK = ("<think>", "</think>")


def kinds(text: str, tags=THINK) -> list[tuple[str, str]]:
    return [(part.kind, text[part.start : part.end]) for part in split_parts(text, tags)]


def state(*pieces: Piece, title: str = "DFly", plain: bool = False, status="running", **meta) -> ColumnState:
    found = ColumnState(Column(f"s/{title}", title, "sub", SERVER, {}, plain=plain), status=status)
    for number, piece in enumerate(pieces):
        metadata = RequestMetadata(**meta) if meta else None
        found.add(ChatChunk(text=piece.text, pieces=(piece,), metadata=metadata, seconds=1 + number / 10))
    return found


META = {"route": "dfly", "why": "a <b>reason</b>", "workload": "code", "mode": "no-think", "verify_steps": 4,
        "steps_by_route": {"dfly": 3, "ar": 1}, "generated_tokens": 10, "drafted_tokens": 28, "proposed_tokens": 16,
        "accepted_length": 2.5, "kept_ratio": 0.625,
        "speculative_share": 0.75}  # fmt: skip


# ---------------------------------------------------------------------------------------------- parts


def test_thinking_is_told_from_the_answer():
    assert kinds("<think>\nLet me see.\n</think>\n\nYes.") == [("thought", "\nLet me see.\n"), ("text", "Yes.")]
    assert kinds("Let me see.</think>Yes.") == [("thought", "Let me see."), ("text", "Yes.")], "opened in the prompt"
    assert kinds("<think>\n\n</think>\n\nYes.") == [("text", "Yes.")], "empty thinking is none"
    assert kinds("No tags.") == [("text", "No tags.")]
    assert kinds("<think>x</think>y", None) == [("text", "<think>x</think>y")]


def test_thinking_that_is_still_coming_is_open():
    assert kinds("<thi") == [] and kinds("") == []
    (part,) = split_parts("<think>Let me", THINK)
    assert (part.kind, part.closed) == ("thought", False)


def test_fenced_code_is_told_from_prose():
    text = "Look:\n```python\nx = 1\n\ny = 2\n```\nDone."
    assert kinds(text) == [("text", "Look:"), ("code", "x = 1\n\ny = 2"), ("text", "Done.")]
    assert kinds("```\nopen") == [("code", "open")]
    assert kinds("a `b` and ``` in a line") == [("text", "a `b` and ``` in a line")]
    assert kinds("<think>```\nx</think>y") == [("thought", "```\nx"), ("text", "y")]


# --------------------------------------------------------------------------------------------- tokens


def test_accepted_tokens_are_marked_by_position_and_the_models_own_are_not():
    pieces = [Piece("a", 0), Piece("b", 1), Piece("c", 2), Piece("d", 0)]
    assert token_html(pieces, Part("text", 0, 4)) == 'a<i class="a1">b</i><i class="a2">c</i>d'
    assert token_html(pieces, Part("text", 1, 2)) == '<i class="a1">b</i>'
    words = [Piece("one ", 0), Piece("", 1), Piece("two ", 2), Piece("three", 0)]
    assert token_html(words, Part("text", 0, 13)) == 'one <i class="a2">two </i>three'


def test_a_token_across_two_parts_is_split():
    pieces = [Piece("one</think>two", 3)]
    thought, text = split_parts("one</think>two", THINK)
    assert token_html(pieces, thought) == '<i class="a3">one</i>'
    assert token_html(pieces, text) == '<i class="a3">two</i>'


def test_shades_reach_over_deep_blocks():
    assert [shade(k, 7) for k in (1, 4, 7)] == [1, 4, 7]
    assert [shade(k, 16) for k in (1, 2, 8, 16)] == [1, 1, 4, 8]
    assert shade(99, 8) == 8


@pytest.mark.parametrize("evil", ["<script>alert(1)</script>", '" onload="x', "</article>", "<img src=x onerror=y>"])
def test_everything_that_was_written_by_others_is_escaped(evil):
    found = state(Piece(evil, 0), Piece(evil, 3), title=evil, **{**META, "why": evil, "route": evil})
    found.fail(evil, evil)
    down = Seen(Server(evil, "http://x"), error=evil, mend=evil)
    page = "".join("".join(one) for one in board([found, found])) + scoreboard([found, found]) + server_lines([down])
    own = page.count("</article>") if evil == "</article>" else 0
    assert page.count(evil) == own == (2 if own else 0)
    tags = Tags()
    tags.feed(page)
    assert not tags.names & {"script", "img"} and not tags.attributes & {"onload", "onerror"}


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in ("br", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


# ---------------------------------------------------------------------------------------------- cards


def test_every_column_folds_its_own_thinking():
    servers = [Server("甲", "http://127.0.0.1:1"), Server("乙", "http://127.0.0.1:2")]
    states = [ColumnState(Column(f"{one.name}/ar/off", "Plain", "", one, {})) for one in servers]
    for found in states:
        found.add(ChatChunk(text="<think>x</think>y", pieces=(Piece("<think>x</think>y", 0),), seconds=1.0))
    page = ["".join(one) for one in board(states, tags=THINK)]
    ids = [re.search(r'id="([^"]+)"', one)[1] for one in page]
    assert len(set(ids)) == 2 and all(f'for="{key}"' in one for key, one in zip(ids, page, strict=True))


def test_the_explanation_of_figures_holds_for_either_order():
    words = " ".join(texts.FIGURES.split())
    assert "each server then first gets the prompt once" in words
    assert "With *Together* in the settings all columns start at once, and nothing is read before" in words


@pytest.mark.parametrize("text", ["Hi", "<think>a", "<think>a</think>b\n```\ncode\n```\nc", ""])
@pytest.mark.parametrize("status", ["waiting", "running", "done", "stopped", "failed"])
def test_a_card_is_well_formed(text, status):
    found = state(*[Piece(letter, k % 3) for k, letter in enumerate(text)], status=status, **META)
    found.error = "words" if status == "failed" else ""
    tags = Tags()
    tags.feed("".join(card(found, place=0, plain_speed=3.0, tags=THINK)))
    assert tags.open == [] and "article" in tags.names


def test_only_the_end_of_one_string_grows_with_the_text():
    found = state(*[Piece(f"word{k} ", k % 3) for k in range(20)])
    before = card(found, place=0, plain_speed=None)
    found.add(ChatChunk(text="more", pieces=(Piece("more", 1),), seconds=4.0))
    after = card(found, place=0, plain_speed=None)
    assert len(before) == len(after)
    changed = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    assert len(changed) == 2, "the figures and the text"
    assert any(b.startswith(a) for a, b in changed)


def test_figures_and_route_are_told():
    plain = state(Piece("a", 0), Piece("b", 0), Piece("c", 0), title="Plain", plain=True)
    fast = state(Piece("a", 0), Piece("b", 1), Piece("c", 0), **META)
    fast.last_seconds = 1.1
    text = re.sub(r"<[^>]+>", " ", "".join("".join(one) for one in board([plain, fast])))
    for words in ("10.0", "20.0", "2.00×", "1.0 s", "2.50", "62%", "dfly", "dfly 75%, plain 25%", "code, no-think"):
        assert words in text, words
    assert "a &lt;b&gt;reason" in "".join(card(fast, place=0, plain_speed=None))


def test_speed_is_compared_with_the_plain_column_of_the_same_server():
    other = Server("t", "http://127.0.0.1:2")
    states = []
    for server, plain, seconds in ((SERVER, True, 0.1), (other, True, 0.4), (other, False, 0.2)):
        found = ColumnState(Column(f"{server.name}{plain}", "x", "", server, {}, plain=plain), status="done")
        found.add(ChatChunk(text="a", seconds=1.0))
        found.add(ChatChunk(text="b", seconds=1.0 + seconds))
        states.append(found)
    assert ">2.00×<" in "".join(board(states)[2])
    assert "–" in "".join(card(states[2], place=0, plain_speed=None))


def test_the_scoreboard_appears_with_the_first_speed_of_several():
    assert scoreboard([state(Piece("a", 0)), state(Piece("a", 0))]) == ""
    assert scoreboard([state(Piece("a", 0), Piece("b", 0))]) == ""
    rows = scoreboard([state(Piece("a", 0), Piece("b", 0)), state(title="Later", status="waiting")])
    assert rows.count('class="bar') == 2 and "10.0" in rows and "width:100.0%" in rows
