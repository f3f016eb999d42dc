"""The Hugging Face Hub's protocol, as huggingface_hub speaks it."""

from __future__ import annotations

import base64
import hashlib
import json

from hub_servers.loopback import SIGNATURE, LoopbackHub, Request, git_sha1


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
