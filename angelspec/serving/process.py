"""The server as a child process: its own process group, its log, and its end with nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

_KEPT_LINES = 400
_POLL = 0.05
_CHILDREN_SECONDS = 2.0
"""That what the server started has to end by itself, once the server is gone."""


class ServerProcess:
    """A running server.

    Args:
        command: what to run.
        environment: variables besides those of this process.
        log_file: gets every line that the server prints.
        show: called with every line, from another thread; None: not shown.
        secrets: texts that are replaced by ``***`` in every line.

    Raises:
        OSError: the log can't be written, or the command not be run; nothing runs then.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log_file: Path,
        show: Callable[[str], None] | None = None,
        secrets: Sequence[str] = (),
    ) -> None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        self.log_file = log_file
        self._log = log_file.open("w", encoding="utf-8")
        self.show = show
        # servers print their arguments as Python writes them, too; a longer secret may hold a shorter one
        self._secrets = sorted({text for secret in secrets for text in (secret, repr(secret)[1:-1])}, key=len)[::-1]
        self._tail: deque[str] = deque(maxlen=_KEPT_LINES)
        # A session of its own: Ctrl-C in the terminal reaches this process alone, which then ends the server in order.
        try:
            self._process = subprocess.Popen(
                list(command),
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except BaseException:
            self._log.close()
            raise
        self._members: dict[int, psutil.Process] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Of the server's main process, and of its group."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.poll()

    @property
    def last_line(self) -> str:
        """The newest line of the log."""
        return self._tail[-1] if self._tail else ""

    def last_lines(self, count: int) -> list[str]:
        """The newest lines of the log."""
        if self.exit_code is not None:
            self._reader.join(timeout=2.0)  # what it said last may still be in the pipe
        return list(self._tail)[-count:]

    def listens_on(self, port: int) -> bool | None:
        """Whether a process of this server listens there, or another one's does; None: it can't be told."""
        try:
            sockets = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        except psutil.AccessDenied:
            return None
        pids = {one.pid for one in sockets if one.laddr[1] == port}
        if not pids - {None}:
            return None
        try:
            main = psutil.Process(self.pid)
            return bool(pids & {self.pid, *(child.pid for child in main.children(recursive=True))})
        except psutil.NoSuchProcess:
            return False

    def stop(self, *, grace: float) -> None:
        """End the server and all that it started: politely, then firmly, then by force.

        SIGTERM goes to the main process first, which finishes running requests and ends its children itself.

        Args:
            grace: seconds that it has for this.
        """
        self._remember()
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            self.ended_within(grace)
        self._wait(min(grace, _CHILDREN_SECONDS))
        for number, seconds in ((signal.SIGTERM, min(grace, _CHILDREN_SECONDS)), (signal.SIGKILL, 3.0)):
            if self._wait(0.0):
                break
            for member in self._alive():
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.send_signal(number)
            self._wait(seconds)
        self._reader.join(timeout=2.0)

    def ended_within(self, seconds: float) -> bool:
        """Wait for the end of the main process; False: it still runs."""
        end = time.monotonic() + seconds
        while self.exit_code is None and time.monotonic() < end:
            time.sleep(_POLL)
        return self.exit_code is not None

    def kill(self) -> None:
        """End everything by force, now."""
        self._remember()
        for member in self._alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()

    def _wait(self, seconds: float) -> bool:
        """Wait until nothing of the server is left; False: something is."""
        end = time.monotonic() + seconds
        while True:
            if self.exit_code is not None and not self._alive():
                return True
            if time.monotonic() >= end:
                return False
            time.sleep(_POLL)

    def _remember(self) -> None:
        """Note every process that the server started, while their ancestry can still be seen."""
        with contextlib.suppress(psutil.NoSuchProcess):
            main = psutil.Process(self.pid)
            for member in (main, *main.children(recursive=True)):
                self._members.setdefault(member.pid, member)

    def _alive(self) -> list[psutil.Process]:
        found = []
        for member in [*self._members.values(), *self._group()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                # is_running compares start times too: another process may have got the number since
                if member.is_running() and member.status() != psutil.STATUS_ZOMBIE and member not in found:
                    found.append(member)
        return found

    def _group(self) -> list[psutil.Process]:
        """Members of the process group, also those whose parent is gone."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess, PermissionError):
                if os.getpgid(process.pid) == self.pid:
                    found.append(process)
        return found

    def _read(self) -> None:
        assert self._process.stdout is not None, "the server's output is a pipe"
        with self._log as log:
            for raw in self._process.stdout:
                line = raw.decode("utf-8", "replace").rstrip("\n")
                for secret in self._secrets:
                    line = line.replace(secret, "***")
                self._tail.append(line)
                # a full disk or a closed terminal must not stop this loop: a server whose pipe fills up hangs
                with contextlib.suppress(OSError, ValueError):
                    log.write(line + "\n")
                    log.flush()
                try:
                    if self.show is not None:
                        self.show(line)
                except OSError:
                    self.show = None
