"""What both hubs share: repositories in memory, recorded requests, failures on demand.

A server checks what a hub checks (token, visibility, blobs before commits). ``fail`` makes matching requests go wrong,
as a hub or the road to it does.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

SIGNATURE = "X-Amz-Signature=0123456789abcdefsecret"
"""Part of presigned upload URLs: whoever reads it may write."""


@dataclass
class Request:
    """One recorded request."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""

    def __str__(self) -> str:
        return f"{self.method} {self.path}"

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Fault:
    """How matching requests go wrong: an answer, or a connection that breaks."""

    pattern: str
    status: int | None = None
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    drop: str | None = None
    """"request": while the client still sends; "answer": the work is done but the answer is lost; "middle": half of the
    answer's body comes."""
    times: int | None = None
    """How often; None: always."""


@dataclass
class Repository:
    """One repository: commits are whole trees, branches point at them."""

    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, tree: dict[str, bytes], message: str) -> str:
        oid = hashlib.sha1(f"{len(self.messages)}{message}".encode()).hexdigest()
        self.commits[oid] = tree
        self.branches[branch] = oid
        self.messages.append(message)
        return oid

    def at(self, revision: str) -> str | None:
        return self.branches.get(revision) or (revision if revision in self.commits else None)

    def tree(self, revision: str) -> dict[str, bytes]:
        return self.commits[self.at(revision)]


class LoopbackHub:
    """What both servers share: recording, faults, answers."""

    kind: ClassVar[str]
    default_branch: ClassVar[str]

    def __init__(self) -> None:
        self.token = f"{self.kind}-token-{'x' * 24}"
        self.repositories: dict[str, Repository] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.may_create = True
        self.lies: dict[str, dict[str, Any]] = {}
        """By path: what the listing says instead of the truth."""
        self.corrupt: set[str] = set()
        """Paths whose downloads differ from what is listed."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True
            wbufsize = -1

            def log_message(self, *arguments):
                pass

            def _serve(self):
                hub._serve(self)

            do_GET = do_HEAD = do_POST = do_PUT = _serve

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def fail(self, pattern: str, **how) -> None:
        """Let requests whose "METHOD path" matches go wrong."""
        self.faults.append(Fault(pattern, **how))

    def add(self, name: str, *, private: bool = True, files: dict[str, bytes] | None = None) -> Repository:
        repository = Repository(private)
        repository.commit(self.default_branch, {".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit")
        if files:
            repository.commit(self.default_branch, dict(files), "add files")
        self.repositories[name] = repository
        return repository

    def asked(self, pattern: str) -> list[Request]:
        """Recorded requests that match."""
        return [request for request in self.requests if re.search(pattern, str(request))]

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        request = Request(handler.command, handler.path, {k.lower(): v for k, v in handler.headers.items()})
        self.requests.append(request)
        fault = next((f for f in self.faults if f.times != 0 and re.search(f.pattern, str(request))), None)
        if fault is not None and fault.times is not None:
            fault.times -= 1
        length = int(request.headers.get("content-length") or 0)
        if fault is not None and fault.drop == "request":
            handler.rfile.read(length // 2)
            handler.close_connection = True
            handler.connection.close()
            return
        request.body = self._body(handler, length)
        if fault is not None and fault.status is not None:
            self._send(handler, fault.status, fault.body, fault.headers)
            return
        status, body, headers = self.answer(request)
        if fault is not None and fault.drop == "answer":
            handler.close_connection = True
            handler.connection.close()
            return
        self._send(handler, status, body, headers, cut=fault is not None and fault.drop == "middle")

    @staticmethod
    def _body(handler, length: int) -> bytes:
        if handler.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return handler.rfile.read(length)
        content = b""
        while size := int(handler.rfile.readline().strip() or b"0", 16):
            content += handler.rfile.read(size)
            handler.rfile.readline()
        handler.rfile.readline()
        return content

    @staticmethod
    def _send(handler, status: int, body: Any, headers: dict[str, str], *, cut: bool = False) -> None:
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        handler.send_response(status)
        kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        for name, value in {"Content-Type": kind, "Content-Length": str(len(raw)), **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if handler.command == "HEAD":
            return
        handler.wfile.write(raw[: len(raw) // 2] if cut else raw)
        if cut:
            handler.wfile.flush()
            handler.close_connection = True
            handler.connection.close()

    def answer(self, request: Request) -> tuple[int, Any, dict[str, str]]:
        url = urlsplit(request.path)
        for pattern, route in self.routes().items():
            found = re.fullmatch(pattern, f"{request.method} {unquote(url.path)}")
            if found:
                query = {key: values[0] for key, values in parse_qs(url.query).items()}
                return route(request, query, *found.groups())
        return 404, {"error": "no such route"}, {}

    def routes(self) -> dict[str, Callable]:
        raise NotImplementedError

    def knows(self, request: Request) -> bool | None:
        """Whether the token is right; None: none was sent."""
        sent = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        return None if not sent else sent == self.token

    @staticmethod
    def slice(content: bytes, request: Request) -> tuple[int, bytes, dict[str, str]]:
        """The whole content, or what a Range header asks for."""
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", ""))
        if not asked:
            return 200, content, {"Accept-Ranges": "bytes"}
        start = int(asked[1])
        end = int(asked[2]) if asked[2] else len(content) - 1
        if start >= len(content):
            return 416, b"", {"Content-Range": f"bytes */{len(content)}"}
        part = content[start : end + 1]
        return 206, part, {"Content-Range": f"bytes {start}-{start + len(part) - 1}/{len(content)}"}

    def content(self, name: str, revision: str, path: str) -> bytes | None:
        content = self.repositories[name].tree(revision).get(path)
        return content[:-1] + b"~" if content is not None and path in self.corrupt else content


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
