"""Loopback servers that speak the two hubs' protocols to their real clients, and fail on demand.

They hold repositories in memory and check what a hub checks (token, visibility, blobs before commits). Every request is
recorded. ``fail`` makes matching requests go wrong, as a hub or the road to it does.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

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


class HuggingFaceServer(LoopbackHub):
    """https://huggingface.co, as far as models are created, uploaded to, listed and read."""

    kind = "hf"
    default_branch = "main"
    NAME = r"([\w.-]+/[\w.-]+)"

    def routes(self):
        n = self.NAME
        return {
            r"GET /api/whoami-v2": self._whoami,
            r"POST /api/repos/create": self._create,
            r"POST /api/validate-yaml": lambda request, query: (200, {"errors": [], "warnings": []}, {}),
            rf"GET /api/models/{n}": lambda request, query, name: self._info(request, query, name, "main"),
            rf"GET /api/models/{n}/revision/(.+)": self._info,
            rf"GET /api/models/{n}/tree/([^/]+)": self._tree,
            rf"GET /api/models/{n}/commits/([^/]+)": self._commits,
            rf"POST /api/models/{n}/branch/(.+)": self._branch,
            rf"POST /api/models/{n}/preupload/([^/]+)": self._preupload,
            rf"POST /{n}\.git/info/lfs/objects/batch": self._batch,
            r"PUT /blob-store/([0-9a-f]+)": self._put,
            rf"POST /api/models/{n}/commit/([^/]+)": self._commit,
            rf"(?:GET|HEAD) /{n}/resolve/([^/]+)/(.+)": self._resolve,
        }

    @staticmethod
    def is_lfs(path: str) -> bool:
        return path.endswith((".safetensors", ".bin", ".png"))

    def _refused(self, request: Request, name: str) -> tuple | None:
        """The answer to who may not see the repository."""
        if self.knows(request) is False:
            return self._bad_token()
        repository = self.repositories.get(name)
        if repository is None or (repository.private and not self.knows(request)):
            return (404 if self.knows(request) else 401), {"error": "Repository not found"}, {
                "X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found",
            }  # fmt: skip
        return None

    @staticmethod
    def _bad_token() -> tuple:
        message = "Invalid credentials in Authorization header"
        return 401, {"error": message}, {"X-Error-Message": message}

    def _whoami(self, request, query):
        if not self.knows(request):
            return self._bad_token()
        return 200, {"type": "user", "id": "1", "name": "alice", "orgs": []}, {}

    def _create(self, request, query):
        if not self.knows(request):
            return self._bad_token()
        content = request.json()
        name = f"{content.get('organization') or 'alice'}/{content['name']}"
        if not self.may_create:
            message = "You don't have the rights to create a model under this namespace"
            return 403, {"error": message}, {"X-Error-Message": message}
        if name in self.repositories:
            return 409, {"error": "You already created this model repo"}, {}
        private = content.get("visibility") == "private" or content.get("private") is True
        self.add(name, private=private)
        return 200, {"url": f"{self.endpoint}/{name}", "name": name, "id": "1"}, {}

    def _info(self, request, query, name, revision):
        if refused := self._refused(request, name):
            return refused
        repository = self.repositories[name]
        oid = repository.at(revision)
        if oid is None:
            return 404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"}
        siblings = [{"rfilename": path} for path in repository.commits[oid]]
        return 200, {"id": name, "modelId": name, "private": repository.private, "sha": oid, "siblings": siblings,
                     "tags": [], "downloads": 0, "likes": 0}, {}  # fmt: skip

    def _tree(self, request, query, name, revision):
        if refused := self._refused(request, name):
            return refused
        if self.repositories[name].at(revision) is None:
            return 404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"}
        listing = []
        folders = set()
        for path, content in self.repositories[name].tree(revision).items():
            entry = {"type": "file", "path": path, "size": len(content), "oid": git_sha1(content)}
            if self.is_lfs(path):
                entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
            for key, value in self.lies.get(path, {}).items():
                if key == "sha256" and "lfs" in entry:
                    entry["lfs"]["oid"] = value
                elif key != "sha256":
                    entry[key] = value
            listing.append(entry)
            if "/" in path:
                folders.add(path.rsplit("/", 1)[0])
        listing += [{"type": "directory", "path": folder, "size": 0, "oid": "0" * 40} for folder in folders]
        return 200, listing, {}

    def _commits(self, request, query, name, revision):
        if refused := self._refused(request, name):
            return refused
        return 200, [
            {"id": oid, "authors": [], "date": "2026-01-01T00:00:00.000Z", "title": "", "message": ""}
            for oid in self.repositories[name].commits
        ], {}  # fmt: skip

    def _branch(self, request, query, name, branch):
        if refused := self._refused(request, name):
            return refused
        repository = self.repositories[name]
        if branch in repository.branches:
            return 409, {"error": "Reference already exists"}, {}
        repository.branches[branch] = repository.branches["main"]
        return 200, {}, {}

    def _preupload(self, request, query, name, revision):
        if refused := self._refused(request, name):
            return refused
        present = self.repositories[name].tree(revision)
        files = []
        for file in request.json()["files"]:
            path, lfs = file["path"], self.is_lfs(file["path"])
            entry = {"path": path, "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False}
            if path in present:
                entry["oid"] = hashlib.sha256(present[path]).hexdigest() if lfs else git_sha1(present[path])
            files.append(entry)
        return 200, {"files": files}, {}

    def _batch(self, request, query, name):
        if refused := self._refused(request, name):
            return refused
        objects = []
        for item in request.json()["objects"]:
            entry = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in self.blobs:
                href = f"{self.endpoint}/blob-store/{item['oid']}?{SIGNATURE}"
                entry["actions"] = {"upload": {"href": href}}
            objects.append(entry)
        return 200, {"transfer": "basic", "objects": objects}, {}

    def _put(self, request, query, oid):
        if hashlib.sha256(request.body).hexdigest() != oid:
            return 400, {"error": "content does not match its name"}, {}
        self.blobs[oid] = request.body
        return 200, None, {}

    def _commit(self, request, query, name, branch):
        if refused := self._refused(request, name):
            return refused
        if not self.knows(request):
            return self._bad_token()
        repository = self.repositories[name]
        lines = [json.loads(line) for line in request.body.splitlines() if line]
        header = next(line["value"] for line in lines if line["key"] == "header")
        if header.get("parentCommit") not in (None, repository.branches[branch]):
            return 412, {"error": "A commit has happened since. Please refresh and try again."}, {}
        tree = dict(repository.tree(branch))
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                tree[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.blobs:
                    return 400, {"error": f"LFS pointer to a missing object {value['oid']}"}, {}
                tree[value["path"]] = self.blobs[value["oid"]]
            elif line["key"] == "deletedFile":
                del tree[value["path"]]
        oid = repository.commit(branch, tree, header["summary"])
        return 200, {"commitUrl": f"{self.endpoint}/{name}/commit/{oid}", "commitOid": oid}, {}

    def _resolve(self, request, query, name, revision, path):
        if refused := self._refused(request, name):
            return refused
        oid = self.repositories[name].at(revision)
        content = None if oid is None else self.content(name, oid, path)
        if content is None:
            return 404, None, {"X-Error-Code": "EntryNotFound" if oid else "RevisionNotFound"}
        stored = self.repositories[name].tree(oid)[path]
        etag = hashlib.sha256(stored).hexdigest() if self.is_lfs(path) else git_sha1(stored)
        status, part, headers = self.slice(content, request)
        return status, part, {**headers, "X-Repo-Commit": oid, "ETag": f'"{etag}"'}


class ModelScopeServer(LoopbackHub):
    """https://modelscope.cn, as far as models are created, uploaded to, listed and read."""

    kind = "modelscope"
    default_branch = "master"
    NAME = r"([\w.-]+/[\w.-]+)"

    def __init__(self) -> None:
        super().__init__()
        self.tells_hashes = True

    def routes(self):
        n = self.NAME
        return {
            r"GET /openapi/v1/users/me": self._me,
            rf"GET /openapi/v1/models/{n}": self._model,
            r"POST /api/v1/models": self._create,
            rf"GET /api/v1/models/{n}": self._legacy_model,
            rf"GET /api/v1/models/{n}/revisions": self._revisions,
            rf"GET /api/v1/models/{n}/repo/files": self._files,
            rf"GET /api/v1/models/{n}/repo": self._download,
            rf"POST /api/v1/repos/models/{n}/info/lfs/objects/batch": self._batch,
            r"PUT /blob-store/([0-9a-f]+)": self._put,
            rf"POST /api/v1/repos/models/{n}/commit/(.+)": self._commit,
        }

    @staticmethod
    def _ok(data: Any) -> tuple:
        return 200, {"Code": 200, "Success": True, "Message": "success", "Data": data, "data": data}, {}

    @staticmethod
    def _no(status: int, message: str) -> tuple:
        return status, {"Code": status, "Success": False, "Message": message}, {}

    def _visible(self, request: Request, name: str) -> Repository | None:
        repository = self.repositories.get(name)
        return None if repository is None or (repository.private and not self.knows(request)) else repository

    def _me(self, request, query):
        return self._ok({"username": "alice"}) if self.knows(request) else self._no(401, "token is not valid")

    def _model(self, request, query, name):
        repository = self._visible(request, name)
        if repository is None:
            return self._no(404, "model does not exist")
        return self._ok({"id": name, "private": repository.private})

    def _legacy_model(self, request, query, name):
        repository = self._visible(request, name)
        if repository is None:
            return self._no(404, "model does not exist")
        owner, short = name.split("/")
        return self._ok({"Path": owner, "Name": short, "Visibility": 1 if repository.private else 5})

    def _create(self, request, query):
        content = request.json()
        name = f"{content['Path']}/{content['Name']}"
        if not self.knows(request):
            return self._no(401, "user not logged in")
        if not self.may_create:
            return self._no(403, "no permission to create a model in this organisation")
        if name in self.repositories:
            return 400, {"Code": 10010101001, "Success": False, "Message": "already exists"}, {}
        self.add(name, private=content["Visibility"] == 1)
        return self._ok({"Path": content["Path"], "Name": content["Name"]})

    def _revisions(self, request, query, name):
        repository = self._visible(request, name)
        if repository is None:
            return self._no(404, "model does not exist")
        return self._ok({"RevisionMap": {"Branches": [{"Revision": b} for b in repository.branches], "Tags": []}})

    def _files(self, request, query, name):
        repository = self._visible(request, name)
        if repository is None or repository.at(query["Revision"]) is None:
            return self._no(404, "revision does not exist")
        listing = []
        for path, content in repository.tree(query["Revision"]).items():
            entry = {"Path": path, "Name": path.split("/")[-1], "Size": len(content), "Type": "blob",
                     "Sha256": hashlib.sha256(content).hexdigest() if self.tells_hashes else ""}  # fmt: skip
            lies = {{"size": "Size", "sha256": "Sha256"}[key]: value for key, value in self.lies.get(path, {}).items()}
            listing.append({**entry, **lies})
        return self._ok({"Files": listing})

    def _download(self, request, query, name):
        repository = self._visible(request, name)
        if repository is None:
            return self._no(404, "model does not exist")
        content = self.content(name, query["Revision"], query["FilePath"])
        return self._no(404, "no such file") if content is None else self.slice(content, request)

    def _batch(self, request, query, name):
        if not self.knows(request):
            return self._no(401, "user not logged in")
        objects = []
        for item in request.json()["objects"]:
            if item["oid"] not in self.blobs:
                href = f"{self.endpoint}/blob-store/{item['oid']}?{SIGNATURE}"
                objects.append({"oid": item["oid"], "size": item["size"], "actions": {"upload": {"href": href}}})
        return self._ok({"objects": objects})

    def _put(self, request, query, oid):
        if hashlib.sha256(request.body).hexdigest() != oid:
            return self._no(400, "content does not match its name")
        self.blobs[oid] = request.body
        return self._ok({})

    def _commit(self, request, query, name, branch):
        if not self.knows(request):
            return self._no(401, "user not logged in")
        repository = self.repositories.get(name)
        if repository is None or branch not in repository.branches:
            return self._no(404, "no such branch")
        content = request.json()
        tree = dict(repository.tree(branch))
        for action in content["actions"]:
            if action["action"] == "delete":
                del tree[action["path"]]
            elif action["type"] == "lfs":
                if action["sha256"] not in self.blobs:
                    return self._no(400, "blob is missing")
                tree[action["path"]] = self.blobs[action["sha256"]]
            else:
                tree[action["path"]] = base64.b64decode(action["content"])
        return self._ok({"commit_id": repository.commit(branch, tree, content["commit_message"])})


SERVERS = {"hf": HuggingFaceServer, "modelscope": ModelScopeServer}


def start(kind: str, monkeypatch: pytest.MonkeyPatch) -> LoopbackHub:
    """A server of that kind, and its client led to it with its token."""
    if kind == "modelscope":
        pytest.importorskip("modelscope_hub", reason="pip install -e '.[modelscope]'")
    server = SERVERS[kind]()
    endpoint, token = {
        "hf": ("HF_ENDPOINT", "HF_TOKEN"),
        "modelscope": ("MODELSCOPE_ENDPOINT", "MODELSCOPE_API_TOKEN"),
    }[kind]
    monkeypatch.setenv(endpoint, server.endpoint)
    monkeypatch.setenv(token, server.token)
    return server
