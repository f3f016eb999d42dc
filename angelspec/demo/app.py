"""The page: layout and what each control does. Nothing is shared between visitors but the servers' addresses."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from importlib.resources import files
from typing import Any

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before gradio is imported: it asks home when it is

import gradio as gr  # noqa: E402

from angelspec.core.modes import Mode
from angelspec.demo import charts, plots, render, texts
from angelspec.demo.columns import Server, look, offered_columns, offered_modes, seed_note
from angelspec.demo.comparing import Visit, Wishes, compare
from angelspec.demo.load import MOST_REQUESTS
from angelspec.demo.stream import stop
from angelspec.serving.bench_result import BenchResult
from angelspec.serving.wire import Sampling

_MOST_VISITORS = 16
"""Comparisons at a time; more visitors wait in the queue."""
_MOST_WAITING = 64
_MOST_CHOSEN = 6
_IN_TURN, _TOGETHER = "One after the other", "Together"
_JOINED = "${value.map(card => card.join('')).join('')}"
# never a Handlebars {{...}} around model text: Gradio evaluates its output once more as a JavaScript template


def build_page(servers: Sequence[Server], results: Sequence[BenchResult] = ()) -> gr.Blocks:
    """The page over these servers; ``results`` are load tests to draw."""
    with gr.Blocks(title="angelspec demo", analytics_enabled=False, fill_width=True) as page:
        visit = gr.State(Visit())  # copied for each visitor
        gr.Markdown(texts.TITLE, elem_classes="title")
        with gr.Tab("Compare"):
            compare_tab = _CompareTab(visit)
        with gr.Tab("Measured") as measured:
            session_charts = _measured_tab(results)
        with gr.Tab("How it works"), gr.Row(equal_height=False):
            with gr.Column(min_width=320):
                gr.Markdown(texts.EXPLANATION)
            with gr.Column(min_width=320):
                gr.HTML(files("angelspec.demo").joinpath("explain.svg").read_text(encoding="utf-8"))
                gr.Markdown(texts.FIGURES)
        measured.select(_session_charts, [visit], session_charts, show_progress="hidden", api_visibility="private")
        compare_tab.connect(page, servers)
    page.queue(default_concurrency_limit=_MOST_VISITORS, max_size=_MOST_WAITING)
    return page


def launch_page(page: gr.Blocks, *, host: str = "127.0.0.1", port: int | None = None, open_browser: bool = True) -> str:
    """Serve the page from a thread and return its address.

    Args:
        port: None: a free one from 7860 on.
    """
    _, url, _ = page.launch(
        server_name=host,
        server_port=port,
        inbrowser=open_browser,
        prevent_thread_lock=True,
        quiet=True,
        share=False,
        ssr_mode=False,
        enable_monitoring=False,
        run_history=False,
        footer_links=[],
        show_error=True,
        theme=_theme(),
        css=files("angelspec.demo").joinpath("page.css").read_text(encoding="utf-8"),
        favicon_path=str(files("angelspec.demo").joinpath("icon.svg")),
    )
    return url


def _theme() -> gr.Theme:
    theme = gr.themes.Default(
        primary_hue="teal",
        neutral_hue="zinc",
        font=["system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "sans-serif"],
        font_mono=["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace"],
    )
    button = {"button_primary_background_fill": "*primary_700", "button_primary_background_fill_hover": "*primary_800"}
    words = {
        "body_text_color_subdued": "*neutral_500", "block_info_text_color": "*neutral_500",
        "input_placeholder_color": "*neutral_500", "block_title_text_color": "*neutral_600",
        "body_text_color_subdued_dark": "*neutral_400", "block_info_text_color_dark": "*neutral_400",
        "input_placeholder_color_dark": "*neutral_400",
    }  # fmt: skip
    return theme.set(**button, **{f"{key}_dark": value for key, value in button.items()}, **words)


class _CompareTab:
    """The first tab's components and what they do."""

    def __init__(self, visit: gr.State) -> None:
        self.visit = visit
        with gr.Row(elem_classes="status"):
            self.servers = gr.HTML("")
            self.look_again = gr.Button("Look again", size="sm", scale=0, min_width=110)
        self.prompt = gr.Textbox(
            "", label="Prompt", lines=3, max_lines=12, placeholder="Ask for a text, a program or a calculation",
            elem_id="prompt",
        )  # fmt: skip
        with gr.Row(elem_classes="examples"):
            for workload, prompts in texts.EXAMPLES.items():
                with gr.Column(min_width=260):
                    gr.Examples(
                        [[text] for text in prompts.values()], [self.prompt], label=texts.HEADINGS[workload],
                        example_labels=list(prompts), api_visibility="private", elem_id=f"examples-{workload}",
                    )  # fmt: skip
        self.columns = gr.CheckboxGroup(label="Columns", elem_id="columns")
        with gr.Row(elem_classes="actions"):
            self.run = gr.Button("Compare", variant="primary", elem_id="run", scale=0, min_width=180)
            self.stop = gr.Button("Stop", elem_id="stop", scale=0, min_width=110)
        with gr.Accordion("Settings", open=False, elem_id="settings"):
            with gr.Row():
                self.mode = gr.Radio(_mode_choices(("no-think",)), value="no-think", label="Thinking", elem_id="mode")
                self.order = gr.Radio(
                    [_IN_TURN, _TOGETHER], value=_IN_TURN, label="Columns of one machine run", elem_id="order"
                )
            with gr.Row():
                self.temperature = gr.Slider(
                    0, 1.5, value=0, step=0.1, label="Temperature", min_width=200, elem_id="temperature"
                )
                self.length = gr.Slider(
                    16, 2048, value=192, step=16, label="Most tokens", min_width=200, elem_id="length"
                )
                self.load = gr.Slider(
                    0, MOST_REQUESTS, value=0, step=1, label="Background requests", min_width=200,
                    info="on each server while a comparison runs", elem_id="load",
                )  # fmt: skip
            with gr.Row():
                self.seed = gr.Number(value=0, precision=0, minimum=0, label="Seed", min_width=120, elem_id="seed")
                # of two lines, since in a field of one Enter sends, and no second text could be written
                self.stops = gr.Textbox(
                    "", label="Stop texts", placeholder="one per line; an answer ends there", lines=2, max_lines=4,
                    min_width=240, elem_id="stops",
                )  # fmt: skip
        gr.HTML(render.legend())
        self.score = gr.HTML("")
        self.board = gr.HTML(_start(), html_template=_JOINED, elem_classes="board", elem_id="board")

    def connect(self, page: gr.Blocks, servers: Sequence[Server]) -> None:
        """Tie the controls to what they do."""
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}

        async def discover(visit: Visit, mode: Mode) -> tuple[Any, ...]:
            visit.seen = await asyncio.gather(*(look(server) for server in servers))
            modes = offered_modes(visit.seen)
            mode = mode if mode in modes else modes[0]
            return (
                render.server_lines(visit.seen),
                gr.Radio(_mode_choices(modes), value=mode),
                _column_choices(visit, mode),
                gr.Number(info=seed_note(visit.seen)),
            )

        found = [self.servers, self.mode, self.columns, self.seed]
        page.load(discover, [self.visit, self.mode], found, **quiet)
        self.look_again.click(discover, [self.visit, self.mode], found, **quiet)
        self.mode.input(_column_choices, [self.visit, self.mode], [self.columns], **quiet)
        drawn = [self.board, self.score]
        running = gr.on(
            [self.run.click, self.prompt.submit],
            _compared,
            [self.visit, self.prompt, self.columns, self.mode, self.order, self.temperature, self.length, self.load,
             self.seed, self.stops],
            drawn,
            concurrency_limit=_MOST_VISITORS,
            trigger_mode="once",
            **quiet,
        )  # fmt: skip
        self.stop.click(_stopped, [self.visit], drawn, cancels=[running], queue=False, **quiet)


# ------------------------------------------------------------------------------------------------ events


async def _compared(
    visit: Visit,
    prompt: str,
    keys: Sequence[str],
    mode: Mode,
    order: str,
    temperature: float,
    length: int,
    load: int,
    seed: int | None,
    stops: str,
) -> AsyncIterator[tuple[Any, str]]:
    chosen = [column for column in offered_columns(visit.seen, mode) if column.key in keys]
    if not prompt.strip() or not chosen:
        gr.Warning("Write a prompt first." if chosen else "Choose at least one column first.")
        yield gr.skip(), gr.skip()
        return
    sampling = Sampling(
        max_tokens=int(length),
        temperature=float(temperature),
        seed=int(seed or 0),
        stop=tuple(line for line in stops.splitlines() if line),
    )
    wishes = Wishes(prompt, chosen, mode, sampling, together=order == _TOGETHER, load=int(load))
    async with contextlib.aclosing(compare(visit, wishes)) as frames:
        async for _ in frames:
            yield _draw(visit)


def _stopped(visit: Visit) -> tuple[Any, Any]:
    stop(visit.states)
    return _draw(visit) if visit.states else (gr.skip(), gr.skip())


def _draw(visit: Visit) -> tuple[list[list[str]], str]:
    return render.board(visit.states, tags=visit.tags), render.scoreboard(visit.states)


def _column_choices(visit: Visit, mode: Mode) -> gr.CheckboxGroup:
    columns = offered_columns(visit.seen, mode)
    up = {one.server for one in visit.seen if one.info is not None}
    chosen = [column.key for column in columns if column.server in up][:_MOST_CHOSEN]
    return gr.CheckboxGroup([(column.name, column.key) for column in columns], value=chosen)


def _mode_choices(modes: Sequence[Mode]) -> list[tuple[str, str]]:
    return [(texts.MODE_NAMES[mode], mode) for mode in modes]


def _start() -> list[list[str]]:
    return [[f'<p class="start">{texts.START}</p>']]


# -------------------------------------------------------------------------------------------- second tab


def _measured_tab(results: Sequence[BenchResult]) -> list[gr.HTML]:
    gr.Markdown(texts.MEASURED)
    with gr.Row(equal_height=False):
        with gr.Column(min_width=320):
            acceptance = gr.HTML(plots.line_chart(charts.acceptance_chart([])), elem_id="acceptance")
            gr.Markdown(texts.ACCEPTANCE_NOTE, elem_classes="note")
        with gr.Column(min_width=320):
            kept = gr.HTML(plots.line_chart(charts.kept_chart([])), elem_id="kept")
            gr.Markdown(texts.KEPT_NOTE, elem_classes="note")
    gr.HTML(plots.line_chart(charts.throughput_chart(results)), elem_id="throughput")
    return [acceptance, kept]


def _session_charts(visit: Visit) -> tuple[str, str]:
    return plots.line_chart(charts.acceptance_chart(visit.past)), plots.line_chart(charts.kept_chart(visit.past))
