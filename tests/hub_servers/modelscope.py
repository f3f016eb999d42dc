"""ModelScope's protocol, as modelscope_hub speaks it."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

from hub_servers.loopback import SIGNATURE, LoopbackHub, Repository, Request


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
