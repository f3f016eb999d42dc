"""Starts a planned server, proves that it works, runs it in the foreground, and ends it with nothing left behind."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from angelspec.core.bundle import Bundle
from angelspec.core.fingerprint import fingerprint
from angelspec.core.locations import cache_folder
from angelspec.serving.client import Client
from angelspec.serving.failures import ServerUnreachable, ServingError, StartFailed
from angelspec.serving.flags import flag_value
from angelspec.serving.plan import ServePlan
from angelspec.serving.probe import Probed, probe
from angelspec.serving.process import ServerProcess

Say = Callable[[str], None]
_POLL = 0.2
_HEALTH_POLL = 0.5
_SHOWN_LINES = 25
_DYING_SECONDS = 3.0
"""Between the last connection of a server that dies and its end."""
_TAKEN = "error while attempting to bind on address"
"""What SGLang's web server says before it waits for ever, where another took the port while the model was loaded."""
_EVERY = 10.0
"""Seconds between two lines of progress."""


class Stopped(BaseException):
    """A signal asked for the end. No error: ``except Exception`` must not swallow it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def free_port(host: str) -> int:
    """A port that nothing listens on.

    Raises:
        ServingError: the address can't be listened on.
    """
    return _bound_port(host or "127.0.0.1", 0, mend="give an address of this machine with --host")


def check_port(host: str, port: int) -> None:
    """Refuse a port that is taken or that can't be listened on.

    Raises:
        ServingError: with what the system says.
    """
    _bound_port(host, port, mend="choose another with --port (0 takes a free one), or stop what listens there")


def _bound_port(host: str, port: int, *, mend: str) -> int:
    """The port that a listener there gets (0: any free one); it is closed again."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            return listener.getsockname()[1]
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that can't be one of a host
        what = (error.strerror if isinstance(error, OSError) else None) or error
        raise ServingError(f"{host}:{port} can't be listened on: {what}", mend=mend) from error


def write_bundle(plan: ServePlan) -> Path:
    """The resolved bundle in the cache, named by its content."""
    return keep_bundle(plan.resolved.bundle)


def keep_bundle(bundle: Bundle) -> Path:
    """A bundle in the cache, named by its content."""
    return bundle.save(cache_folder() / "bundles" / f"{fingerprint(bundle.model_dump(mode='json'))}.yaml")


def serve(
    plan: ServePlan,
    *,
    say: Say,
    show_log: Say | None = None,
    start_timeout: float = 900.0,
    grace: float = 30.0,
    probing: bool = True,
    ready: Callable[[list[Probed]], None] | None = None,
) -> None:
    """Start the server, wait until it is healthy, probe it, and run it until a signal or its own end.

    Args:
        plan: what to start.
        say: told what is going on.
        show_log: called with every line of the server's log; None: it goes to its file only.
        start_timeout: seconds until it must be healthy.
        grace: seconds that it has to finish its requests when it is stopped.
        probing: whether speculation is proved.
        ready: called when requests may come.

    Raises:
        ServingError: the port is taken.
        StartFailed: the server ended or did not become healthy in time; with the last lines of its log.
        NotSpeculating: the probe failed. The server is stopped.
    """
    check_port(plan.host, plan.port)
    bundle_file = write_bundle(plan)
    log_file = cache_folder() / "logs" / f"serve-{plan.port}.log"
    say(f"starting; log: {log_file}")
    with _Signals() as signals:
        server = ServerProcess(
            plan.command,
            environment=plan.environment(str(bundle_file)),
            log_file=log_file,
            show=show_log,
            secrets=plan.secrets,
        )
        try:
            signals.arm()
            key = flag_value(plan.flags, "--api-key")
            # its own server, whose certificate is for the address that others know it by
            with Client(plan.url, api_key=key, timeout=max(60.0, start_timeout), verify=False) as client:
                _wait_until_healthy(
                    server, client, plan.port, say=say, timeout=start_timeout, quiet=show_log is not None
                )
                probed = _probed(server, client, plan, say=say) if probing else []
            say(f"serving on {plan.url} (Ctrl-C stops it)")
            if ready is not None:
                ready(probed)
            while server.exit_code is None:
                time.sleep(_POLL)
            raise _ended(server, "the server ended by itself")
        except Stopped as stopped:
            name = signal.Signals(stopped.number).name
            with suppress(OSError):
                say(f"{name}: stopping the server (up to {grace:.0f} s for running requests)")
        finally:
            with _hurried(server, say=say):
                server.stop(grace=grace)
        say("stopped")


def _wait_until_healthy(
    server: ServerProcess, client: Client, port: int, *, say: Say, timeout: float, quiet: bool
) -> None:
    started = time.monotonic()
    next_word = _EVERY
    while True:
        if server.exit_code is not None:
            raise _ended(server, "the server ended while it started")
        if any(_TAKEN in line for line in server.last_lines(_SHOWN_LINES)):  # what answers there is another server
            raise _failed(server, f"{client.url} was taken by another program meanwhile", "choose another with --port")
        if client.healthy() and server.listens_on(port) is not False:  # else another answers there: ours will say so
            say(f"healthy after {time.monotonic() - started:.0f} s")
            return
        seconds = time.monotonic() - started
        if seconds > timeout:
            raise _failed(server, f"the server was not healthy after {timeout:.0f} s", "give more with --start-timeout")
        if seconds > next_word:
            next_word += _EVERY
            if not quiet:
                say(f"  {seconds:.0f} s: {server.last_line[:160]}")
        time.sleep(_HEALTH_POLL)


def _probed(server: ServerProcess, client: Client, plan: ServePlan, *, say: Say) -> list[Probed]:
    try:
        probed = probe(client, plan.resolved)
    except ServerUnreachable:
        if server.ended_within(_DYING_SECONDS):
            raise _ended(server, "the server ended while it was probed") from None
        raise
    for item in probed:
        say(f"  {item}")
    return probed


def _ended(server: ServerProcess, what: str) -> StartFailed:
    code = server.exit_code
    how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
    return _failed(server, f"{what} ({how})", None)


def _failed(server: ServerProcess, what: str, mend: str | None) -> StartFailed:
    lines = "\n".join(f"  | {line}" for line in server.last_lines(_SHOWN_LINES))
    return StartFailed(f"{what}; its last words:\n{lines or '  | (none)'}\n  log: {server.log_file}", mend=mend)


_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end the command, and with it the server: the last one comes when its terminal is closed."""


class _Signals:
    """Signals that end the command raise ``Stopped`` in the main thread, once armed.

    Until then they are kept: between the start of a child and the block that ends it, an exception would leave it
    behind.
    """

    def __init__(self) -> None:
        self._armed = False
        self._pending: int | None = None
        self._context = _handling(self._arrived)

    def __enter__(self) -> _Signals:
        self._context.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(None, None, None)

    def arm(self) -> None:
        """Raise from now on, and what is pending at once."""
        self._armed = True
        if self._pending is not None:
            raise Stopped(self._pending)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self._armed:
            raise Stopped(number)
        self._pending = number


@contextmanager
def _hurried(server: ServerProcess, *, say: Say) -> Iterator[None]:
    """While the server is being stopped, a further signal ends it at once instead of interrupting its end."""

    def hurry(number: int, frame: FrameType | None) -> None:
        server.kill()
        with suppress(OSError):  # a closed terminal
            say("stopping at once")

    with _handling(hurry):
        yield


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in _ENDING}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
