"""``angelspec demo``: a page on which anyone sees what each drafter does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import click

from angelspec.cli.options import drafter_mode, served_drafters, served_target, server_key
from angelspec.core.errors import BundleError, MissingRequirement
from angelspec.core.installing import install_hint
from angelspec.core.modes import Mode

if TYPE_CHECKING:
    from gradio import Blocks

SHIPPED_BUNDLE = "bundle.yaml"
"""The bundle of the shipped drafters, in the folder ``checkpoints``."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@click.command()
@click.option(
    "--server",
    "servers",
    multiple=True,
    metavar="NAME=URL",
    help="A server that runs already; may repeat. With and without angelspec's extension.",
)
@server_key
@served_target
@served_drafters
@drafter_mode
@click.option(
    "--bundle",
    "bundle_file",
    type=click.Path(path_type=Path),
    help="A bundle file in place of --target and --drafter (default: that of the drafters in the folder checkpoints).",
)
@click.option(
    "--results",
    "result_files",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A result of `angelspec bench serve` to draw, file or folder; may repeat (default: that beside the bundle).",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of the page.")
@click.option("--port", type=click.IntRange(0, 65535), default=7860, show_default=True, help="0: a free one.")
@click.option("--no-browser", is_flag=True, help="Do not open the page in a browser.")
@click.option("--quiet", is_flag=True, help="Do not show the log of the server that is started.")
def demo(
    servers: tuple[str, ...],
    api_key: str | None,
    target: str | None,
    drafters: tuple[str, ...],
    mode: Mode | None,
    bundle_file: Path | None,
    result_files: tuple[Path, ...],
    host: str,
    port: int,
    no_browser: bool,
    quiet: bool,
) -> None:
    """Compare drafters in the browser: one prompt, answered side by side, with live figures.

    Without --server one engine is started with the shipped drafters (or those of --bundle, or --target with --drafter)
    and ended with the page. With --server the page compares servers that run already. Nothing is sent anywhere but to
    these servers.

    Exit codes: 0 stopped by Ctrl-C; 2 something does not fit or is missing; 9, 10 and 11 as of `angelspec serve`.
    """
    if importlib.util.find_spec("gradio") is None:
        raise MissingRequirement("the demo needs Gradio", mend=install_hint("demo" if servers else "serve"))
    from angelspec.cli import serving_parts

    chosen = bundle_file is not None or target is not None or bool(drafters)
    if servers and chosen:
        raise BundleError("--server, --bundle and --target with --drafter exclude each other", mend="give one of them")
    if chosen:
        serving_parts.check_choice(bundle_file, target=target, drafters=drafters, command="demo")
    elif not servers:
        bundle_file = _shipped_bundle()
    from angelspec.demo.app import build_page, launch_page
    from angelspec.demo.columns import Server, parse_servers
    from angelspec.serving.bench_result import RESULT_FILE, BenchResult
    from angelspec.serving.launch import check_port, free_port
    from angelspec.serving.launch import serve as run_server

    if not result_files and bundle_file is not None and (bundle_file.parent / RESULT_FILE).is_file():
        result_files = (bundle_file.parent,)
    results = [BenchResult.load(path / RESULT_FILE if path.is_dir() else path) for path in result_files]
    port = port or free_port(host)
    check_port(host, port)

    def say(text: str) -> None:
        click.echo(text, err=True)

    def show(page: Blocks) -> None:
        url = launch_page(page, host=host, port=port, open_browser=not no_browser)
        say(f"demo on {url} (Ctrl-C stops it)")
        if host not in _LOOPBACK:
            say("anyone who reaches this address can use the page and, through it, the servers")
        if servers:
            page.block_thread()

    if servers:
        show(build_page(parse_servers(servers, api_key=api_key), results))
        return
    plan = serving_parts.shown_plan(
        bundle_file,
        target=target,
        drafters=drafters,
        mode=mode,
        host="127.0.0.1",
        port=free_port("127.0.0.1"),
    )
    page = build_page([Server("embedded", plan.url)], results)
    try:
        run_server(plan, say=say, show_log=None if quiet else say, ready=lambda _: show(page))
    finally:
        page.close(verbose=False)


def _shipped_bundle() -> Path:
    """The bundle of the shipped drafters.

    Raises:
        BundleError: none ship with this version.
    """
    from angelspec.core.locations import resource_folder

    path = resource_folder("checkpoints") / SHIPPED_BUNDLE
    if not path.is_file():
        raise BundleError(
            f"no drafters ship with this version ({path} is missing)",
            mend="give --bundle FILE (see `angelspec bundle create`), --target with --drafter, or --server NAME=URL",
        )
    return path
