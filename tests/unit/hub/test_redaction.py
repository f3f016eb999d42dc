"""Tokens and signatures are taken out of every text."""

from __future__ import annotations

import pytest

from angelspec.hub.redaction import holds_a_token, redact

HF, MS = "hf_" + "aB3" * 11, "ms-12345678-1234-1234-1234-123456789abc"


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        (f"token {HF} refused", "token *** refused"),
        (f"'{MS}'", "'***'"),
        ("https://s3.example/x?X-Amz-Signature=abc&y=1 failed", "https://s3.example/x failed"),
        ("HTTP 413 on PUT /blob/x?sig=abc", "HTTP 413 on PUT /blob/x"),
        ("Authorization: Bearer abc0123SECRET refused", "Authorization: *** refused"),
        ("authorization=Basic dXNlcjpwdw==", "authorization=***"),
        ("Authorization: abc0123SECRET", "Authorization: ***"),
        ("Proxy-Authorization: NTLM TlRMTVNTUAAB", "Proxy-Authorization: ***"),
        ("""{'Authorization': 'Bearer abc0123SECRET'}""", "{'Authorization': '***"),
        ("Authorization: Bearer abc\nHost: x", "Authorization: ***\nHost: x"),
        ("with bearer abc0123SECRET", "with bearer ***"),
        ("is it so? yes", "is it so? yes"),
        ("mine is plain", "mine is ***"),
        ("https://me:pw@mirror.example/org/name", "https://mirror.example/org/name"),
        ("https://me:p@ss@mirror.example/org/name", "https://mirror.example/org/name"),
        ("a@b at https://mirror.example/@org", "a@b at https://mirror.example/@org"),
    ],
)
def test_redact(text, safe):
    assert redact(text, ["plain"]) == safe
    assert not any(secret in redact(text, ["plain"]) for secret in (HF, MS, "Signature=", "sig=", "plain"))


def test_finds_tokens(monkeypatch):
    assert holds_a_token(f"x {HF}") and holds_a_token(f"x {MS}") and holds_a_token("sk-" + "a" * 24)
    assert holds_a_token("url: http://jane:s3cret@10.0.0.5/v1")
    assert not holds_a_token("http://10.0.0.5:30000/v1, at 12:30 by a:b@c, git@github.com:a/b")
    assert not holds_a_token("hf_short, ms-dos, the hf_transfer package, sk-learn, sha256 " + "a" * 64)
    monkeypatch.setenv("HF_TOKEN", "odd")
    assert holds_a_token("an odd text")
