"""``angelspec serve``: a target and its drafters in one SGLang server, checked, proved and ended in order."""

from __future__ import annotations

from pathlib import Path

import click

from angelspec.cli.options import drafter_mode, served_drafters, served_target
from angelspec.core.modes import Mode

_START_SECONDS, _GRACE_SECONDS = 900.0, 30.0


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True})
@served_target
@served_drafters
@drafter_mode
@click.option(
    "--bundle",
    "bundle_file",
    type=click.Path(path_type=Path),
    help="A bundle file in place of --target and --drafter; see `angelspec bundle`.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=30000, show_default=True, help="0: a free one.")
@click.option(
    "--start-timeout",
    type=click.FloatRange(min=1),
    default=_START_SECONDS,
    show_default=True,
    help="Seconds until the server must be healthy.",
)
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=_GRACE_SECONDS,
    show_default=True,
    help="Seconds that running requests have when the server is stopped.",
)
@click.option("--no-probe", is_flag=True, help="Do not prove that each drafter's proposals are accepted.")
@click.option("--dry-run", is_flag=True, help="Check, show the plan and the exact command, and start nothing.")
@click.option("--quiet", is_flag=True, help="Do not show the server's log (it is always written to a file).")
@click.argument("sglang_flags", nargs=-1, type=click.UNPROCESSED, metavar="[SGLANG FLAGS]")
def serve(
    target: str | None,
    drafters: tuple[str, ...],
    mode: Mode | None,
    bundle_file: Path | None,
    host: str,
    port: int,
    start_timeout: float,
    grace: float,
    no_probe: bool,
    dry_run: bool,
    quiet: bool,
    sglang_flags: tuple[str, ...],
) -> None:
    """Serve a target with its drafters: every request goes to the drafter that pays, or to none.

    Before anything starts, it is checked that drafters, target, mode, vocabulary and tensor shapes fit; then it is
    shown what will run where, and the memory that the drafters' pools take. The server is healthy only when a probe
    has shown that proposals of each trained drafter are accepted. Ctrl-C or SIGTERM ends it with nothing left behind.

    All other flags go to SGLang, for example --max-running-requests 64 or --enable-metrics. Refused, by name: pipeline
    and context parallelism, attention data parallelism, disaggregation, further caches (HiCache, LMCache, FlexKV,
    HiSparse), unified memory, LoRA, mixed chunks, two-batch overlap, multiplexed prefill, several HTTP workers, gRPC,
    returned hidden states, custom logit processors, watermarks, --speculative-* (set up from the bundle), targets with
    recurrent layers, and attention backends that can't verify rows of different widths in one forward. Without a GPU
    it runs on angelspec's CPU platform, with a small pool in float32.

    Requests are OpenAI's (/v1/chat/completions) or SGLang's (/generate). custom_params may label one:
    {"workload": "code", "mode": "no-think", "route": "dfly", "dcut": 0.5}, each optional.

    Exit codes: 0 stopped by a signal; 2 something does not fit, or SGLang is missing; 9 the server did not start or
    ended by itself; 10 it does not speculate; 11 it stopped answering while it was probed.
    """
    from angelspec.cli import serving_parts
    from angelspec.serving.launch import check_port, free_port, write_bundle
    from angelspec.serving.launch import serve as run_server

    serving_parts.check_choice(bundle_file, target=target, drafters=drafters, command="serve")
    port = port or free_port(host)
    if not dry_run:
        check_port(host, port)
    plan = serving_parts.shown_plan(
        bundle_file, target=target, drafters=drafters, mode=mode, arguments=sglang_flags, host=host, port=port
    )
    if dry_run:
        click.echo(f"dry run; the command would be:\n{plan.shell_line(str(write_bundle(plan)))}")
        return

    def say(text: str) -> None:
        click.echo(text, err=True)

    run_server(
        plan,
        say=say,
        show_log=None if quiet else say,
        start_timeout=start_timeout,
        grace=grace,
        probing=not no_probe,
    )
