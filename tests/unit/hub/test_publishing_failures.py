"""Everything that goes wrong on the way to a hub: the message, the exit code, and what is left behind.

``TABLE`` is the table of failures. Each row runs against both hubs through their real clients unless it says otherwise.
``SEVERAL`` is that of publications to both hubs at once. What is wrong with a checkpoint itself is in ``test_refused``.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass, field

import pytest
from hub_builders import FailureRow, run
from hub_servers import SERVERS, SIGNATURE

from angelspec.core.repositories import Repository
from angelspec.hub import hugging_face
from angelspec.hub.failures import HubUnavailable, judge, usable_endpoint
from angelspec.hub.patience import ATTEMPTS
from angelspec.hub.publish import Destination, exit_code, publish
from angelspec.hub.transport import connect

NAME = "alice/tiny"
CREATE = r"POST /api/(repos/create|v1/models)$"
COMMIT = r"POST .*/commit/"
WHO = r"GET .*(whoami-v2|users/me)"
PUT = r"PUT /blob-store/"
SEND = r"(POST|PUT) "


@dataclass
class Row(FailureRow):
    """One failure."""

    private: bool = True
    """Whether it is to be."""
    commits: int = 0
    """Of ours that the repository holds in the end."""
    only: str | None = None
    waited: float | None = None
    """A pause that was made."""
    most_requests: dict[str, int] = field(default_factory=dict)
    """How often a request may be made at most."""


def no_token(hub, monkeypatch):
    monkeypatch.delenv({"hf": "HF_TOKEN", "modelscope": "MODELSCOPE_API_TOKEN"}[hub.kind])


def wrong_token(hub, monkeypatch):
    monkeypatch.setenv({"hf": "HF_TOKEN", "modelscope": "MODELSCOPE_API_TOKEN"}[hub.kind], "wrong" * 8)


def torn_token(hub, monkeypatch):
    monkeypatch.setenv({"hf": "HF_TOKEN", "modelscope": "MODELSCOPE_API_TOKEN"}[hub.kind], "wrong\u2026wrong")


def no_scheme(hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "hub.example")


def may_not_create(hub, monkeypatch):
    hub.may_create = False


def may_not_create_but_exists(hub, monkeypatch):
    hub.may_create = False
    hub.add(NAME)


def public_exists(hub, monkeypatch):
    hub.add(NAME, private=False)


def private_exists(hub, monkeypatch):
    hub.add(NAME)


def other_weights_exist(hub, monkeypatch):
    hub.add(NAME, files={"pytorch_model.bin": b"old"})


def nothing_wrong(hub, monkeypatch):
    pass


def closed(hub, monkeypatch):
    hub.close()


def fault(pattern, **how):
    return lambda hub, monkeypatch: hub.fail(pattern, **how)


def lie(path, **lies):
    return lambda hub, monkeypatch: hub.lies.update({path: lies})


def busy(times=None, after="7"):
    return {"status": 429, "body": {"error": "slow down"}, "headers": {"Retry-After": after}, "times": times}


DENIED = {"status": 403, "body": {"error": "read-only token", "Message": "read-only token"}}
LOST = {"drop": "answer", "times": 1}
CUT = {"drop": "request"}

TABLE = [
    Row("no token", no_token, 3, "no token for http.*mend: set (HF_TOKEN|MODELSCOPE_API_TOKEN)"),
    Row("a token that is not accepted", wrong_token, 3,
        r"asks for a token that it accepts \(401\) while trying to log in", most_requests={WHO: 1}),
    Row("403 on create", may_not_create, 3, r"the token may not create the repository \(403\) \(.+\)",
        most_requests={CREATE: 1}),
    Row("403 on create, but the repository exists", may_not_create_but_exists, 0, "read back and equal", commits=1,
        most_requests={CREATE: 0}),
    Row("403 on commit", fault(COMMIT, **DENIED), 3, r"may not upload the files \(403\) \(read-only token\)",
        most_requests={COMMIT: 1}),
    Row("401 on commit", fault(COMMIT, status=401, body={"error": "expired", "Message": "expired"}), 3,
        r"asks for a token that it accepts \(401\)", most_requests={COMMIT: 1}),
    Row("the repository is public, private was meant", public_exists, 4,
        "is not private, but this is to be published as private; nothing was uploaded", most_requests={SEND: 0}),
    Row("the repository is private, public was meant", private_exists, 4,
        "is private, but this is to be published as public; nothing was uploaded", private=False,
        most_requests={SEND: 0}),
    Row("the repository holds other weights", other_weights_exist, 6,
        "holds other weights too, which loaders might take: pytorch_model.bin", most_requests={SEND: 0}),
    Row("429 with Retry-After, then success", fault(COMMIT, **busy(times=2)), 0, "read back", commits=1, waited=7.0),
    Row("429 without end", fault(COMMIT, **busy()), 5, r"too many requests \(429\) \(slow down\)",
        most_requests={COMMIT: ATTEMPTS}),
    Row("429 that asks for an hour", fault(COMMIT, **busy(after="3600")), 5, "too many requests",
        most_requests={COMMIT: 1}),
    Row("429 on the very first request", fault(WHO, **busy(times=1)), 0, "read back", commits=1, waited=7.0),
    Row("500 twice on commit", fault(COMMIT, status=500, times=2), 0, "read back", commits=1, waited=4.0),
    Row("503 without end", fault(COMMIT, status=503, body={"error": "maintenance", "Message": "maintenance"}), 5,
        r"the hub fails \(503\)", most_requests={COMMIT: ATTEMPTS}),
    Row("502 with a page of HTML", fault(COMMIT, status=502, body=b"<html>bad gateway</html>", times=1), 0, "read back",
        commits=1),
    Row("502 on the check of the card", fault("validate-yaml", status=502, body=b"<html>", times=1), 0, "read back",
        commits=1, only="hf"),
    Row("413 on commit", fault(COMMIT, status=413), 6, r"too large for the hub or for a proxy on the way \(413\)",
        most_requests={COMMIT: 1}),
    Row("413 on a blob", fault(PUT, status=413), 6, r"too large .*\(413\)", most_requests={COMMIT: 0}),
    Row("412 on commit", fault(COMMIT, status=412), 6, r"changed the repository meanwhile \(412\)",
        most_requests={COMMIT: 1}),
    Row("400 on commit", fault(COMMIT, status=400, body={"error": "bad path", "Message": "bad path"}), 6,
        r"refuses to upload the files \(400\) \(bad path\)", most_requests={COMMIT: 1}),
    Row("200 on commit that means no", fault(COMMIT, status=200, body={"Success": False, "Message": "policy"}), 6,
        r"refuses to upload the files \(policy\)", only="modelscope", most_requests={COMMIT: 1}),
    Row("the hub has no room for a large file",
        fault("objects/batch", status=200, body={"objects": [
            {"oid": "0" * 64, "size": 1, "error": {"code": 422, "message": "storage limit reached"}}]}),
        6, "does not take a large file .*storage limit reached", only="hf", most_requests={COMMIT: 0}),
    Row("the hub refuses the card",
        fault("validate-yaml", status=400, body={"errors": [{"message": "license is invalid"}]}),
        6, "refuses the card's metadata|license is invalid", only="hf", most_requests={PUT: 0, COMMIT: 0}),
    Row("the connection breaks in the middle of a large file, twice", fault(PUT, **CUT, times=2), 0, "read back",
        commits=1),
    Row("the connection breaks in every large file", fault(PUT, **CUT), 5, "the connection failed",
        most_requests={COMMIT: 0}),
    Row("the answer to the commit is lost", fault(COMMIT, **LOST), 0, "read back", commits=1,
        most_requests={COMMIT: 1}),
    Row("the answer to the creation is lost", fault(CREATE, **LOST), 0, "read back", commits=1,
        most_requests={CREATE: 1}),
    Row("a wrong hash on read-back", lie("model.safetensors", sha256="0" * 64), 7,
        "not what was sent: model.safetensors has another hash", commits=1),
    Row("a wrong size on read-back", lie("config.json", size=1), 7, "config.json has another size", commits=1),
    Row("nobody listens", closed, 5, r"the connection failed \(.*refused.*\) while trying to log in"),
    Row("a token that was copied with its ellipsis", torn_token, 3, "holds characters that no token can have",
        most_requests={"": 0}),
    Row("an endpoint without a scheme", no_scheme, 5, "HF_ENDPOINT=hub.example is no address", only="hf",
        most_requests={"": 0}),
]  # fmt: skip


CASES = [(row, kind) for row in TABLE for kind in SERVERS if row.only in (None, kind)]


@pytest.mark.parametrize(("row", "hub"), CASES, ids=[f"{kind}: {row.what}" for row, kind in CASES], indirect=["hub"])
def test_table(row, hub, publication, waits, monkeypatch, capfd):
    row.arrange(hub, monkeypatch)
    said: list[str] = []
    before = hub.repositories[NAME].tree(hub.default_branch) if NAME in hub.repositories else {".gitattributes"}
    destination = Destination(Repository(hub.kind, NAME), row.private)
    outcomes = publish(publication, [destination], message="publish", say=said.append)
    (outcome,) = outcomes
    assert exit_code(outcomes) == row.code, outcome.detail
    assert re.search(row.message, " ".join(outcome.detail.split())), outcome.detail
    assert (outcome.state == "failed") == (row.code != 0)
    repository = hub.repositories.get(NAME)
    assert len([m for m in repository.messages if m.startswith("publish")] if repository else []) == row.commits
    if row.waited is not None:
        assert row.waited in waits
    assert max(waits, default=0) < 300
    for pattern, most in row.most_requests.items():
        assert len(hub.asked(pattern)) <= most, [str(request) for request in hub.requests]
    if repository is not None and row.code not in (0, 7):
        assert set(repository.tree(hub.default_branch)) == set(before), "half a publication stands"
    captured = capfd.readouterr()
    shown = captured.out + captured.err + " ".join(said) + outcome.detail
    assert hub.token not in shown and SIGNATURE not in shown and "wrongwrong" not in shown


SEVERAL = [
    ("the first fails", public_exists, nothing_wrong, 4, "failed: .* is not private, but", "published: "),
    ("both fail alike", may_not_create, may_not_create, 3, "failed: .* may not create", "failed: .* may not create"),
    ("they fail in different ways", may_not_create, public_exists, 1, "failed: .* may not create",
     "failed: .* is not private, but"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("first", "second", "code", "of_first", "of_second"), [row[1:] for row in SEVERAL], ids=[row[0] for row in SEVERAL]
)
def test_several_destinations(first, second, code, of_first, of_second, both, tree, monkeypatch):
    first(both["hf"], monkeypatch)
    second(both["modelscope"], monkeypatch)
    result = run("publish", tree, "--to", f"hf:{NAME}", "--to", f"modelscope:{NAME}", "--yes")
    assert result.exit_code == code, result.output
    for kind, message in (("hf", of_first), ("modelscope", of_second)):
        assert re.search(rf"(?m)^{kind}:{NAME} \(private\): {message}", result.output), result.output


def test_a_broken_upload_is_taken_up_where_it_stopped(hub, publication, waits):
    """What arrived before the break is not sent again."""
    destination = Destination(Repository(hub.kind, NAME))
    hub.fail(COMMIT, status=503)
    (outcome,) = publish(publication, [destination], message="publish")
    assert outcome.state == "failed"
    sent = len(hub.asked(PUT))
    assert sent == len(hub.blobs) > 0
    hub.faults.clear()
    (outcome,) = publish(publication, [destination], message="publish")
    assert outcome.state == "published"
    assert len(hub.asked(PUT)) == sent


def test_a_mistake_of_ours_is_not_called_a_failure_of_the_hub(hub, publication, monkeypatch):
    from angelspec.hub import publish as module

    def wrong(files, present):
        raise KeyError("ours")

    monkeypatch.setattr(module, "_differences", wrong)
    with pytest.raises(KeyError, match="ours"):
        publish(publication, [Destination(Repository(hub.kind, NAME))], message="publish")


@pytest.mark.parametrize("text", ["hub.example", "http://[::1", "ftp://h", "http://", ""])
def test_what_is_no_endpoint_is_named(text):
    with pytest.raises(HubUnavailable, match="HF_ENDPOINT=.* is no address"):
        usable_endpoint(text, variable="HF_ENDPOINT")


def test_a_hub_that_never_answers_is_not_waited_for_for_ever(waits, monkeypatch):
    listener = socket.create_server(("127.0.0.1", 0))  # accepts, and says nothing
    try:
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
        monkeypatch.setattr(hugging_face, "WAITS", {"connect": 0.2, "read": 0.2, "write": 0.2})
        hub = connect("hf")
        for ask in (hub.account, lambda: hub.snapshot("a/b", None), lambda: hub.files("a/b", "main")):
            with pytest.raises(Exception, match="(?i)time") as caught:
                ask()
            assert judge(caught.value, doing="ask", place="hf:a/b").retryable
    finally:
        listener.close()
