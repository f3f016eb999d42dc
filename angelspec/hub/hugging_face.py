"""The Hugging Face hub (or a mirror of it) through huggingface_hub, versions 1.31 to 2.x.

Files go up in one commit, through Xet where hf_xet is installed and as LFS otherwise (HF_HUB_DISABLE_XET=1, needed
behind mirrors that do not speak Xet). Both know by hash what the hub already has, which is how a broken upload resumes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token, set_client_factory
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils._http import default_client_factory

from angelspec.core.repositories import HubKind
from angelspec.hub.failures import AccessDenied, NotOnHub, usable_endpoint, usable_token
from angelspec.hub.redaction import redact
from angelspec.hub.staging import StagedFile
from angelspec.hub.transport import RemoteFile

WAITS = {"connect": 10.0, "read": 120.0, "write": 120.0}
"""Seconds for a connection, and between two parts read or written; the client itself waits for ever."""
_SHORT_COMMIT = re.compile(r"[0-9a-f]{7,39}")


def _bounded_client():
    """The client's own, but that it does not wait for ever for a hub that accepts and never answers.

    Several of its calls ask for no limit by name, so a default would not reach them.
    """

    def bound(request) -> None:
        asked = request.extensions.get("timeout") or {}
        limits = {name: WAITS[name] for name in WAITS if asked.get(name) is None}
        request.extensions["timeout"] = {**asked, **limits}

    client = default_client_factory()
    client.event_hooks = {**client.event_hooks, "request": [*client.event_hooks["request"], bound]}
    return client


class HuggingFace:
    """See ``transport.Hub``."""

    kind: HubKind = "hf"
    default_branch = "main"

    def __init__(self) -> None:
        # the client reads HF_ENDPOINT once, when it is imported; we read it now
        self.endpoint = usable_endpoint(os.environ.get("HF_ENDPOINT") or constants.ENDPOINT, variable="HF_ENDPOINT")
        self._token = usable_token(get_token(), variable="HF_TOKEN")
        set_client_factory(_bounded_client)
        # False: never fall back to a token found elsewhere
        self._api = HfApi(endpoint=self.endpoint, token=self._token or False)

    @property
    def tokens(self) -> tuple[str, ...]:
        return (self._token,) if self._token else ()

    def account(self) -> str:
        if self._token is None:
            raise AccessDenied(
                f"no token for {self.endpoint}", mend="set HF_TOKEN, or log in once with `hf auth login`"
            )
        return str(self._api.whoami()["name"])

    def is_private(self, name: str) -> bool | None:
        try:
            return bool(self._api.model_info(name).private)
        except RepositoryNotFoundError:
            return None

    def create(self, name: str, *, private: bool, license: str) -> None:
        self._api.create_repo(name, private=private, exist_ok=False)

    def need_branch(self, name: str, branch: str) -> None:
        self._api.create_branch(name, branch=branch, exist_ok=True)

    def snapshot(self, name: str, revision: str | None) -> str:
        try:
            found = self._api.model_info(name, revision=revision).sha
        except RepositoryNotFoundError as error:  # also what is answered to who may not see it
            raise NotOnHub(
                f"hf:{name} does not exist, or is private", mend="check the name; a private one needs HF_TOKEN"
            ) from error
        except RevisionNotFoundError as error:
            found = self._commit_beginning_with(name, revision)
            if found is None:
                raise NotOnHub(
                    f"hf:{name} has no revision '{revision}'", mend="name a branch, a tag or a commit"
                ) from error
        return str(found)

    def _commit_beginning_with(self, name: str, revision: str | None) -> str | None:
        if revision is None or not _SHORT_COMMIT.fullmatch(revision):
            return None
        with suppress(RepositoryNotFoundError, RevisionNotFoundError):
            commits = [commit.commit_id for commit in self._api.list_repo_commits(name)]
            matches = [commit for commit in commits if commit.startswith(revision)]
            return matches[0] if len(matches) == 1 else None
        return None

    def files(self, name: str, revision: str) -> dict[str, RemoteFile]:
        tree = self._api.list_repo_tree(name, recursive=True, revision=revision)
        return {
            item.path: RemoteFile(
                item.size, sha256=item.lfs.sha256 if item.lfs else None, git_sha1=None if item.lfs else item.blob_id
            )
            for item in tree
            if isinstance(item, RepoFile)
        }

    def commit(
        self, name: str, files: Sequence[StagedFile], *, remove: Sequence[str], branch: str, message: str
    ) -> str:
        # the parent makes the hub refuse a commit on top of one that we have not seen
        parent = self._api.model_info(name, revision=branch).sha
        info = self._api.create_commit(
            name,
            [
                *(CommitOperationAdd(path_in_repo=file.path, path_or_fileobj=file.source) for file in files),
                *(CommitOperationDelete(path_in_repo=path) for path in remove),
            ],
            commit_message=message,
            revision=branch,
            parent_commit=parent,
        )
        return str(info.oid)

    def download(self, name: str, path: str, *, revision: str, into: Path, expected: RemoteFile) -> Path:
        return Path(self._api.hf_hub_download(name, path, revision=revision, local_dir=into))

    def url(self, name: str) -> str:
        return redact(f"{self.endpoint}/{name}")
