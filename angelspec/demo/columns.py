"""Which columns a page can show: one for each way in which a reachable server can answer.

A server with the extension answers plainly, with each of its drafters (everything verified, or cut by D-cut) and by its
own choice; a server without it answers in one way only.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from angelspec.core.bundle import AUTO, PLAIN
from angelspec.core.drafter_config import ALGORITHM_NAMES
from angelspec.core.errors import AngelspecError, RequestError
from angelspec.core.known_targets import KNOWN_TARGETS
from angelspec.core.modes import MODE_FAMILIES, MODES, Mode, ModeFamily, mode_family
from angelspec.demo.texts import SEEDS_NOT_HEEDED
from angelspec.serving.answers import ServedDrafter, ServerInfo
from angelspec.serving.client import AsyncClient
from angelspec.serving.connection import is_address
from angelspec.serving.failures import RequestRefused

_LOOK_SECONDS = 10.0


@dataclass(frozen=True)
class Server:
    """A server as it was named to the page."""

    name: str
    url: str
    api_key: str | None = field(default=None, repr=False)

    def connect(self, *, timeout: float) -> AsyncClient:
        """A connection to it; ``timeout`` in seconds without a byte."""
        return AsyncClient(self.url, api_key=self.api_key, timeout=timeout)

    @property
    def machine(self) -> str:
        """Servers of one machine distort each other's speed."""
        host = urlsplit(self.url).hostname or self.url
        here = ("localhost", "::1", "0.0.0.0", "::", socket.gethostname())
        return "this machine" if host in here or host.startswith("127.") else host


@dataclass(frozen=True)
class Seen:
    """A server as it was found."""

    server: Server
    info: ServerInfo | None = None
    error: str = ""
    """Why there is no info."""
    mend: str = ""
    refused: bool = False
    """Whether the server answers, but does not say what it is (to us)."""

    @property
    def own_algorithm(self) -> str | None:
        """By which a server without the extension speculates; None: it does not, or nothing is known."""
        if self.info is None or self.info.engine is not None:
            return None
        return str(self.info.arguments.get("speculative_algorithm") or "") or None

    @property
    def heeds_seeds(self) -> bool:
        """Whether a request's seed decides what is drawn; False as well where nothing is known."""
        return self.info is not None and bool(self.info.arguments.get("enable_deterministic_inference"))

    @property
    def family(self) -> ModeFamily:
        """How its chat template switches thinking; ``plain`` where that is not known."""
        if self.info is None:
            return mode_family("plain")
        if self.info.engine is not None:  # of a newer version it may be one that is not known here
            named = self.info.engine.mode_family
            return mode_family(named if named in MODE_FAMILIES else "plain")
        model = self.info.model.rstrip("/").lower()
        for known in KNOWN_TARGETS.values():
            if known.release and model.endswith(known.release.split("/")[-1].lower()):
                return mode_family(known.mode_family)
        return mode_family("plain")


@dataclass(frozen=True)
class Column:
    """One way of answering."""

    key: str
    """Unique on the page."""
    title: str
    subtitle: str
    server: Server
    label: Mapping[str, Any] | None
    """``custom_params`` of its requests; None: the server has no extension."""
    depth: int = 8
    """Most proposals per block that its tokens may come from."""
    plain: bool = False
    """Whether it decodes without drafts."""
    alone: bool = True
    """Whether its server is the only one on the page."""

    @property
    def name(self) -> str:
        """What tells it from all others on the page."""
        return self.title if self.alone or self.title == self.server.name else f"{self.server.name}: {self.title}"


def parse_servers(texts: Sequence[str], *, api_key: str | None = None) -> list[Server]:
    """``NAME=URL``, each.

    Args:
        texts: as on the command line.
        api_key: of all of them.

    Raises:
        RequestError: another form, an address that can't be one, or a name twice.
    """
    found: list[Server] = []
    for text in texts:
        name, _, url = text.partition("=")
        if not name.strip() or not is_address(url):
            raise RequestError(
                f"--server {text}: not of the form NAME=URL", mend="write --server NAME=http://HOST:PORT"
            )
        if name.strip() in [server.name for server in found]:
            raise RequestError(f"--server {text}: the name is taken", mend="give each server a name of its own")
        found.append(Server(name.strip(), url.rstrip("/"), api_key))
    return found


async def look(server: Server) -> Seen:
    """Ask a server what it is; an error becomes part of the answer."""
    try:
        async with server.connect(timeout=_LOOK_SECONDS) as client:
            return Seen(server, await client.server_info())
    except AngelspecError as error:
        refused = isinstance(error, RequestRefused)
        return Seen(server, error=error.message, mend=error.mend or "", refused=refused)


def offered_modes(seen: Sequence[Seen]) -> tuple[Mode, ...]:
    """Thinking modes that at least one server can be asked for."""
    found = {mode for one in seen for mode in one.family.modes}
    return tuple(mode for mode in MODES if mode in found) or ("no-think",)


def seed_note(seen: Sequence[Seen]) -> str:
    """Which servers heed no seeds, and what makes them; empty where every reachable one does."""
    names = [one.server.name for one in seen if one.info is not None and not one.heeds_seeds]
    return SEEDS_NOT_HEEDED.format(", ".join(names)) if names else ""


def offered_columns(seen: Sequence[Seen], mode: Mode) -> list[Column]:
    """Every column for one thinking mode, plain decoding first; a server that is down keeps one, which says so."""
    several = len(seen) > 1
    return [column for one in seen for column in _columns_of(one, mode, several=several)]


def lanes(columns: Sequence[Column], *, together: bool) -> list[list[Column]]:
    """What runs side by side: columns of one lane wait for each other."""
    if together:
        return [[column] for column in columns]
    by_machine: dict[str, list[Column]] = {}
    for column in columns:
        by_machine.setdefault(column.server.machine, []).append(column)
    return list(by_machine.values())


def _columns_of(seen: Seen, mode: Mode, *, several: bool) -> list[Column]:
    server = seen.server
    if seen.info is None or seen.info.engine is None:
        plain = seen.info is not None and seen.own_algorithm is None
        return [Column(f"{server.name}/", server.name, _what_it_is(seen), server, None, plain=plain, alone=not several)]
    drafters = [drafter for drafter in seen.info.engine.drafters if drafter.mode == mode]
    deepest = max((drafter.depth for drafter in drafters), default=8)

    def column(title: str, subtitle: str, route: str, dcut: str, depth: int) -> Column:
        label = {"route": route, "dcut": dcut}
        key = f"{server.name}/{route}/{dcut}"
        return Column(key, title, subtitle, server, label, depth, plain=route == PLAIN, alone=not several)

    found = [column("Plain", "one token per step", PLAIN, "off", 1)]
    for drafter in drafters:
        title = _title(drafter, drafters)
        found.append(column(title, f"{drafter.name}, all verified", drafter.name, "off", drafter.depth))
        if drafter.family == "block":
            found.append(column(f"{title} with D-cut", drafter.name, drafter.name, AUTO, drafter.depth))
    if drafters:
        found.append(column("Automatic", "chosen per step", AUTO, AUTO, deepest))
    return found


def _what_it_is(seen: Seen) -> str:
    """A server of which only one column is known, in a few words."""
    if seen.info is None:
        return "refuses" if seen.refused else "not reachable"
    return "without the extension" + (f", speculates by {seen.own_algorithm}" if seen.own_algorithm else "")


def _title(drafter: ServedDrafter, others: Sequence[ServedDrafter]) -> str:
    kind = drafter.algorithm or drafter.family
    alike = sum((other.algorithm or other.family) == kind for other in others)
    return ALGORITHM_NAMES.get(kind, kind) if alike == 1 else drafter.name
