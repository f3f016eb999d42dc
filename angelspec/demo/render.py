"""Column states as HTML. Everything that a model, a server or a visitor wrote is escaped here.

A card is a list of strings that the page joins. While an answer grows only one of them does, at its end, so that only
what is new travels to the browser.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from angelspec.core.bundle import PLAIN
from angelspec.demo.columns import Seen
from angelspec.demo.stream import ColumnState
from angelspec.demo.texts import SHARED
from angelspec.serving.answers import Piece

SHADES = 8
"""Shades of accepted tokens, one for each position up to the eighth."""
Tags = tuple[str, str] | None
"""What opens and closes thinking in an answer."""
_FENCE = re.compile(r"^```[^\n]*(?:\n|$)", re.MULTILINE)
_BADGES = {"waiting": "waiting", "running": "streaming", "done": "done", "stopped": "stopped", "failed": "failed"}


@dataclass(frozen=True)
class Part:
    """A stretch of an answer, markers left out."""

    kind: Literal["text", "code", "thought"]
    start: int
    end: int
    closed: bool = True
    """False: it may still grow."""


def split_parts(text: str, tags: Tags = None) -> list[Part]:
    """Thinking, prose and fenced code of an answer that may be incomplete."""
    parts, start = [], 0
    if tags is not None:
        thought, start = _thought(text, *tags)
        parts += [thought] if thought is not None and text[thought.start : thought.end].strip() else []
    return parts + _prose(text, start)


def token_html(pieces: Sequence[Piece], part: Part, *, depth: int = SHADES) -> str:
    """The tokens of one part, escaped; accepted ones marked with the shade of their position."""
    out, offset = [], 0
    for piece in pieces:
        begin, offset = offset, offset + len(piece.text)
        shown = piece.text[max(part.start - begin, 0) : max(part.end - begin, 0)]
        if not shown:
            continue
        escaped = html.escape(shown)
        out.append(escaped if piece.position == 0 else f'<i class="a{shade(piece.position, depth)}">{escaped}</i>')
    return "".join(out)


def shade(position: int, depth: int) -> int:
    """Shade 1 .. ``SHADES`` of proposal ``position`` of ``depth``."""
    if depth > SHADES:
        position = -(-position * SHADES // depth)
    return min(max(position, 1), SHADES)


# -------------------------------------------------------------------------------------------------- card


def card(state: ColumnState, *, place: int, plain_speed: float | None, tags: Tags = None) -> list[str]:
    """One column.

    Args:
        place: among the columns of the page, from 0.
        plain_speed: tokens/s of plain decoding with the same prompt; None: not known.
        tags: what opens and closes thinking.
    """
    column, busy = state.column, state.status == "running"
    opening = (
        f'<article class="card {state.status}" aria-label="{html.escape(column.name)}" '
        f'aria-busy="{"true" if busy else "false"}" data-key="{html.escape(column.key)}">'
    )
    where = "" if column.alone or column.title == column.server.name else f"{column.server.name} · "
    names = f'<h3>{html.escape(column.title)}</h3><p class="sub">{html.escape(where + column.subtitle)}</p>'
    head = f'<header><div>{names}</div><span class="badge">{_badge(state)}</span></header>'
    return [
        opening,
        head,
        _figures(state, plain_speed),
        _route(state),
        f'<p class="shared">{SHARED if state.shared else ""}</p>',
        *_body(state, tags, place=place),
        _error(state),
        "</article>",
    ]


def board(states: Sequence[ColumnState], *, tags: Tags = None) -> list[list[str]]:
    """All columns."""
    return [
        card(state, place=place, plain_speed=plain_speed(states, state), tags=tags)
        for place, state in enumerate(states)
    ]


def plain_speed(states: Sequence[ColumnState], state: ColumnState) -> float | None:
    """tokens/s of the plain column that a column is compared with: its own server's, else the first one's."""
    plain = [other for other in states if other.column.plain and other.tokens_per_second]
    own = [other for other in plain if other.column.server == state.column.server]
    return (own or plain)[0].tokens_per_second if plain else None


def scoreboard(states: Sequence[ColumnState]) -> str:
    """The speeds of all columns as bars."""
    speeds = [state.tokens_per_second or 0.0 for state in states]
    if len(states) < 2 or not any(speeds):
        return ""
    rows = []
    for state, speed in zip(states, speeds, strict=True):
        times = _times(state, plain_speed(states, state))
        width = 100 * speed / max(speeds)
        value = f"{speed:.1f}" if speed else "–"
        rows.append(
            f'<div class="bar {"plain" if state.column.plain else ""}"><span>{html.escape(state.column.name)}</span>'
            f'<b><i style="width:{width:.1f}%"></i></b><em>{value}</em><small>{times}</small></div>'
        )
    return f'<section class="score" aria-label="Tokens per second"><h4>Tokens per second</h4>{"".join(rows)}</section>'


def legend() -> str:
    """What the colours mean."""
    shades = "".join(f'<i class="a{level}">{level}</i>' for level in range(1, SHADES + 1))
    return (
        '<p class="legend"><span><i class="own">a</i> the model’s own token</span>'
        f"<span>{shades} accepted from a draft, by its position in the block</span></p>"
    )


def server_lines(seen: Sequence[Seen]) -> str:
    """One line for each server: what it is, or why it does not answer and what to do."""
    return f'<ul class="servers">{"".join(_server_line(one) for one in seen)}</ul>'


def _server_line(seen: Seen) -> str:
    words = [f"<b>{html.escape(seen.server.name)}</b>"]
    if seen.info is None:
        mend = f"<br><small>{html.escape(seen.mend)}</small>" if seen.mend else ""
        what = "refuses" if seen.refused else "is down"
        return (
            f'<li class="down"><i class="dot"></i><span>{words[0]} {what}: {html.escape(seen.error)}{mend}</span></li>'
        )
    engine = seen.info.engine
    target = str(seen.info.arguments.get("served_model_name") or (engine and engine.target) or seen.info.model)
    words += [html.escape(target.rstrip("/").split("/")[-1]), f"SGLang {html.escape(seen.info.version)}"]
    if engine is None:
        words.append("without the extension")
        words += [f"speculates by {html.escape(seen.own_algorithm)}"] if seen.own_algorithm else []
    else:
        words += [f"{html.escape(one.name)} ({html.escape(one.mode)})" for one in engine.drafters] or ["no drafters"]
        words += ["speculation is switched off"] if engine.speculation == "off" else []
    return f'<li class="up"><i class="dot"></i><span>{" · ".join(words)}</span></li>'


# -------------------------------------------------------------------------------------------------- parts


def _thought(text: str, opening: str, closing: str) -> tuple[Part | None, int]:
    """The thinking at the start of an answer, and where the rest begins.

    Some templates open the thinking in the prompt, so that an answer may only close it.
    """
    stripped = text.lstrip()
    lead = len(text) - len(stripped)
    end = text.find(closing)
    if stripped.startswith(opening):
        start = lead + len(opening)
    elif end >= 0:
        start = lead
    elif stripped and opening.startswith(stripped):
        return None, len(text)  # the opening itself is still coming
    else:
        return None, 0
    if end < 0:
        return Part("thought", start, len(text), closed=False), len(text)
    return Part("thought", start, end), end + len(closing)


def _prose(text: str, start: int) -> list[Part]:
    parts: list[Part] = []
    inside, fences = False, list(_FENCE.finditer(text, start))
    for fence in fences:
        _append(parts, text, "code" if inside else "text", start, fence.start(), closed=True)
        start, inside = fence.end(), not inside
    _append(parts, text, "code" if inside else "text", start, len(text), closed=False)
    return parts


def _append(parts: list[Part], text: str, kind: Literal["text", "code"], start: int, end: int, *, closed: bool) -> None:
    """Add a part without the empty lines around it."""
    while start < end and text[start] == "\n":
        start += 1
    while closed and end > start and text[end - 1] == "\n":
        end -= 1
    if end > start:
        parts.append(Part(kind, start, end, closed))


def _body(state: ColumnState, tags: Tags, *, place: int) -> Iterable[str]:
    pieces, reasoning = state.pieces, state.answer.reasoning
    text = "".join(piece.text for piece in pieces)
    parts = split_parts(text, tags)
    yield '<div class="answer">'
    if reasoning and not state.answer.pieces:  # the server separates it, and names no tokens
        yield from _fold(place, html.escape(reasoning), live=not text)
    for part in parts:
        inner = token_html(pieces, part, depth=state.column.depth)
        if part.kind == "thought":
            yield from _fold(place, inner, live=not part.closed and state.status == "running")
        else:
            yield f'<div class="{part.kind}">'
            yield inner
            yield "</div>"
    if state.status == "done" and not parts and not reasoning:
        yield '<p class="empty">The answer is empty.</p>'
    yield "</div>"


def _fold(place: int, inner: str, *, live: bool) -> Iterable[str]:
    # a checkbox, not <details>: the page redraws attributes, and would fold what a reader has opened
    key = f"fold-{place}"
    yield (
        f'<div class="fold {"live" if live else ""}"><input type="checkbox" id="{key}">'
        f'<label for="{key}">{"Thinking …" if live else "Thinking"}</label><div class="thought">'
    )
    yield inner
    yield "</div></div>"


def _badge(state: ColumnState) -> str:
    if state.status == "done" and state.answer.finish_reason == "length":
        return "full length"
    if state.status == "done" and state.answer.finish_reason == "abort":
        return "ended by the server"
    return _BADGES[state.status]


def _figures(state: ColumnState, plain: float | None) -> str:
    meta = state.metadata
    speed, first = state.tokens_per_second, state.first_token_seconds
    shown = [
        ("speed", "tokens/s", f"{speed:.1f}" if speed else None, "tokens behind the first, over the time since it"),
        ("times", "vs plain", _times(state, plain) or None, "speed over that of the plain column, same prompt"),
        ("first", "first token", _duration(first), "from sending the request to the first text"),
        ("accepted", "accepted length", _number(meta and meta.accepted_length, 2), "tokens per verify step"),
        (
            "kept",
            "kept ratio",
            _percent(meta and not state.column.plain and meta.kept_ratio),
            "slots verified over slots drafted, anchors counted",
        ),
        ("tokens", "tokens", str(state.tokens) if state.tokens else None, "length of the answer so far"),
    ]
    cells = "".join(
        f'<div class="{key}" title="{title}"><dt>{name}</dt><dd>{value or "–"}</dd></div>'
        for key, name, value, title in shown
    )
    return f'<dl class="figures">{cells}</dl>'


def _times(state: ColumnState, plain: float | None) -> str:
    speed = state.tokens_per_second
    return f"{speed / plain:.2f}×" if speed and plain else ""


def _route(state: ColumnState) -> str:
    meta = state.metadata
    if meta is None:
        return '<p class="route"></p>'
    names = {PLAIN: "plain"}
    steps = ""
    if len(meta.steps_by_route) > 1:
        total = sum(meta.steps_by_route.values())
        ranked = sorted(meta.steps_by_route.items(), key=lambda item: -item[1])
        steps = ": " + ", ".join(f"{names.get(name, name)} {count / total:.0%}" for name, count in ranked)
    kind = f"{meta.workload}, {meta.mode}" if meta.mode else meta.workload
    route = names.get(meta.route, meta.route)
    return (
        f'<p class="route"><b>{html.escape(route)}</b>{html.escape(steps)} · {html.escape(kind)}'
        f"<br><span>{html.escape(meta.why)}</span></p>"
    )


def _error(state: ColumnState) -> str:
    if state.status != "failed":
        return ""
    mend = f"<span>What to do: {html.escape(state.mend)}</span>" if state.mend else ""
    return f'<p class="error" role="alert"><b>{html.escape(state.error)}</b>{mend}</p>'


def _duration(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _number(value: float | None, digits: int) -> str | None:
    return None if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str | None:
    return None if value is None or value is False else f"{value:.0%}"
