"""Everything that goes wrong on the way from a hub: the message, the exit code, and that nothing half is shown.

``TABLE`` is the table of failures. Each row goes through the command, against both hubs through their real clients
unless it says otherwise.
"""

from __future__ import annotations

import json
import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hub_builders import LIST, FailureRow, run
from hub_servers import SERVERS, LoopbackHub

from angelspec.core.repositories import Repository
from angelspec.hub import pull as module
from angelspec.hub.pull import cached

NAME = "alice/tiny"
GET = r"GET .*(/resolve/|FilePath=)"
WEIGHTS = r"GET .*(resolve.*|FilePath=)model\.safetensors"
GATED = {"status": 403, "headers": {"X-Error-Code": "GatedRepo", "X-Error-Message": "access is restricted"}}


@dataclass
class Row(FailureRow):
    """One failure."""

    revision: str = ""
    output: str | None = None
    only: str | None = None
    most_requests: dict[str, int] = field(default_factory=dict)
    """How often a request may be made at most."""


def nothing_wrong(hub, monkeypatch):
    pass


def no_repository(hub, monkeypatch):
    hub.repositories.clear()


def no_token(hub, monkeypatch):
    monkeypatch.delenv({"hf": "HF_TOKEN", "modelscope": "MODELSCOPE_API_TOKEN"}[hub.kind])


def wrong_token(hub, monkeypatch):
    monkeypatch.setenv({"hf": "HF_TOKEN", "modelscope": "MODELSCOPE_API_TOKEN"}[hub.kind], "wrong" * 8)


def fault(pattern, **how):
    return lambda hub, monkeypatch: hub.fail(pattern, **how)


def holds(files):
    return lambda hub, monkeypatch: hub.add(NAME, files=files)


def other_width(hub, monkeypatch):
    files = hub.repositories[NAME].tree(hub.default_branch)
    config = json.loads(files["config.json"])
    files["config.json"] = json.dumps({**config, "hidden_size": 32}).encode()


def no_room(hub, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage)


def something_else(hub, monkeypatch):
    Path("mine").mkdir()
    Path("mine/config.json").write_text("{}")


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file grows beyond ``size``, which fails as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


NOT_FOUND = r"does not exist, or is private|not found while trying to list the files"
TABLE = [
    Row("no such repository", no_repository, 8, NOT_FOUND),
    Row("no such revision", nothing_wrong, 8, "has no revision 'gone'|@gone: not found while trying to list the files",
        revision="@gone"),
    Row("a private repository, and no token", no_token, 8, f"({NOT_FOUND}).* a private (one|repository) needs"),
    Row("a token that is not accepted", wrong_token, 3,
        r"asks for a token that it accepts \(401\) while trying to find the revision", only="hf"),
    Row("a gated repository", fault(GET, **GATED), 3,
        r"the token may not fetch .* \(403\) \(access is restricted\) .* opens to those who agree to its terms",
        only="hf"),
    Row("files that this token may not have", fault(GET, status=403, body={"error": "no", "Message": "no"}), 3,
        r"the token may not fetch .* \(403\) \(no\)", most_requests={GET: 1}),
    Row("a small file that is not what is listed", lambda hub, monkeypatch: hub.corrupt.add("config.json"), 7,
        "what came is not what the hub lists(: config.json has another hash| while trying to fetch config.json)"),
    Row("weights that are not what is listed", lambda hub, monkeypatch: hub.corrupt.add("model.safetensors"), 7,
        "what came is not what the hub lists(: model.safetensors has another hash| while .* fetch model.safetensors)"),
    Row("a connection that breaks and does not come back", fault(WEIGHTS, drop="request"), 5,
        "the connection failed .* while trying to fetch model.safetensors mend: run the same command again later"),
    Row("nobody listens", lambda hub, monkeypatch: hub.close(), 5,
        r"the connection failed .*Errno 111.* while trying to (find the revision|list the files) mend:"),
    Row("a busy hub", fault(LIST, status=429, body={"error": "slow down"}), 5,
        r"too many requests \(429\) \(slow down\) while trying to list the files mend:"),
    Row("a hub that fails", fault(GET, status=503), 5, r"the hub fails \(503\) .*while trying to fetch .* mend:"),
    Row("a repository without weights", holds({"config.json": b"{}"}), 8, "holds no drafter: it has no weights",
        most_requests={GET: 0}),
    Row("a repository without configuration", holds({"model.safetensors": b"x"}), 8,
        "holds no drafter: it has no config.json", most_requests={GET: 0}),
    Row("a repository of something else", holds({"README.md": b"x"}), 8, "holds no drafter: it has no weights",
        most_requests={GET: 0}),
    Row("a drafter that does not load", other_width, 2,
        "came whole but can't be used: .* hidden_size is 32 by public keys but 64 under angelspec"),
    Row("an output folder that holds something else", something_else, 2,
        "here/mine exists and is not (hf|modelscope):alice/tiny: accepted-length-t0.png is missing", output="mine",
        most_requests={GET: 0}),
    Row("an output folder in which one is", nothing_wrong, 2, "--output is the folder where you are", output=".",
        most_requests={GET: 0}),
    Row("no room on the disk", no_room, 2, r"are to be fetched, 0.0 GB are free on the disk of .* mend: make room",
        most_requests={GET: 0}),
]  # fmt: skip

CASES = [(row, kind) for row in TABLE for kind in SERVERS if row.only in (None, kind)]


@pytest.fixture
def offered(hub, tree, tmp_path, monkeypatch) -> LoopbackHub:
    """The hub with a drafter, seen from an empty folder."""
    files = {path.relative_to(tree).as_posix(): path.read_bytes() for path in tree.rglob("*") if path.is_file()}
    hub.add(NAME, files=files)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return hub


@pytest.mark.parametrize(("row", "hub"), CASES, ids=[f"{kind}: {row.what}" for row, kind in CASES], indirect=["hub"])
def test_table(row, hub, offered, waits, monkeypatch):
    row.arrange(hub, monkeypatch)
    name = f"{hub.kind}:{NAME}{row.revision}"
    result = run("pull", name, *(["--output", row.output] if row.output else []))
    assert result.exit_code == row.code, result.output
    assert re.search(row.message, " ".join(result.output.split())), result.output
    assert cached(Repository.parse(name)) is None
    assert max(waits, default=0) < 300
    for pattern, most in row.most_requests.items():
        assert len(hub.asked(pattern)) <= most, [str(request) for request in hub.requests]
    assert hub.token not in result.output and "wrongwrong" not in result.output


def test_a_disk_that_fills_up_meanwhile(offered, waits):
    """Not a row: the limit must end before pytest writes again."""
    with full_disk(60_000):
        result = run("pull", f"{offered.kind}:{NAME}")
    assert result.exit_code == 2, result.output
    message = r"File too large while trying to fetch model.safetensors mend: make room"
    assert re.search(message, " ".join(result.output.split())), result.output
    assert cached(Repository(offered.kind, NAME)) is None
    assert waits == [], "tried again"
