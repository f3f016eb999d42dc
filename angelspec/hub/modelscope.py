"""ModelScope through its official client, modelscope 1.40 (which hands all hub work to modelscope_hub).

The client's ``upload_folder`` is not used: it asks for a *public* repository before it uploads and swallows the answer,
commits in batches, and reports how many files failed but not why. Its parts below do one step each and raise what
happened: which blobs are missing, one blob up, one commit.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

from angelspec.core.errors import MissingRequirement
from angelspec.core.installing import install_hint
from angelspec.core.repositories import HubKind
from angelspec.hub.failures import AccessDenied, NotOnHub, usable_endpoint, usable_token
from angelspec.hub.redaction import redact
from angelspec.hub.staging import StagedFile
from angelspec.hub.transport import RemoteFile

try:
    from modelscope_hub import HubApi
    from modelscope_hub.config import HubConfig
    from modelscope_hub.constants import (
        MODEL_LFS_SUFFIX,
        UPLOAD_INLINE_METADATA_PATHS,
        UPLOAD_LFS_FORCE_THRESHOLD_BYTES,
        Visibility,
    )
    from modelscope_hub.errors import NotExistError
except ImportError as error:
    raise MissingRequirement(
        "ModelScope needs the package 'modelscope', 1.40 or newer", mend=install_hint("modelscope")
    ) from error

_MODEL = "model"


class ModelScope:
    """See ``transport.Hub``."""

    kind: HubKind = "modelscope"
    default_branch = "master"

    def __init__(self) -> None:
        config = HubConfig()  # reads MODELSCOPE_ENDPOINT, MODELSCOPE_API_TOKEN and the stored log-in now
        self.endpoint = usable_endpoint(config.endpoint, variable="MODELSCOPE_ENDPOINT")
        self._token = usable_token(config.token, variable="MODELSCOPE_API_TOKEN")
        self._api = HubApi(config=config)

    @property
    def tokens(self) -> tuple[str, ...]:
        return (self._token,) if self._token else ()

    def account(self) -> str:
        if self._token is None:  # the client itself would go on without one
            raise AccessDenied(
                f"no token for {self.endpoint}", mend="set MODELSCOPE_API_TOKEN, or log in once with `modelscope login`"
            )
        return str(self._api.whoami().username)

    def is_private(self, name: str) -> bool | None:
        try:
            visibility = self._api.get_repo(name, _MODEL).visibility
        except NotExistError:
            return None
        return visibility == Visibility.PRIVATE  # internal, protected and what is not told are seen by others

    def create(self, name: str, *, private: bool, license: str) -> None:
        visibility = Visibility.PRIVATE if private else Visibility.PUBLIC
        self._api.create_repo(name, _MODEL, visibility=visibility, license=license)

    def need_branch(self, name: str, branch: str) -> None:
        known = [item.get("Revision") for item in self._api.list_repo_revisions(name, _MODEL)]
        if branch not in known:
            raise NotOnHub(
                f"modelscope:{name} has no branch '{branch}', and its client can't create one",
                mend="create the branch on the site, or publish without --revision",
            )

    def snapshot(self, name: str, revision: str | None) -> str:
        return revision or self.default_branch

    def files(self, name: str, revision: str) -> dict[str, RemoteFile]:
        listed = self._api.list_repo_files(name, _MODEL, revision=revision)
        return {
            item.path: RemoteFile(int(item.size or 0), sha256=item.sha256 or None)
            for item in listed
            if item.type != "tree"
        }

    def commit(
        self, name: str, files: Sequence[StagedFile], *, remove: Sequence[str], branch: str, message: str
    ) -> str:
        blobs = [file for file in files if _is_blob(file)]
        if blobs:
            objects = [{"oid": file.sha256, "size": file.size} for file in blobs]
            places = self._api.legacy.validate_blobs(name, _MODEL, objects)
            for file in blobs:
                place = places.get(file.sha256)
                if place is not None:  # None: the hub has it already, of an earlier attempt
                    with file.source.open("rb") as stream:
                        self._api.legacy.upload_blob(place, stream, file.size)
        actions = [*map(_action, files), *map(_removal, remove)]
        self._api.legacy.create_commit(name, _MODEL, actions, message, branch)
        return branch

    def download(self, name: str, path: str, *, revision: str, into: Path, expected: RemoteFile) -> Path:
        return self._api.download_file(
            name,
            _MODEL,
            path,
            revision=revision,
            local_dir=into,
            expected_sha256=expected.sha256,
            file_size=expected.size,
        )

    def url(self, name: str) -> str:
        return redact(f"{self.endpoint}/models/{name}")


def _is_blob(file: StagedFile) -> bool:
    """Whether the file goes to the blob store rather than into the commit, by the client's own rule."""
    path = Path(file.path)
    if path.name.upper() in UPLOAD_INLINE_METADATA_PATHS:
        return False
    return file.size > UPLOAD_LFS_FORCE_THRESHOLD_BYTES or path.suffix.lower() in MODEL_LFS_SUFFIX


def _removal(path: str) -> dict[str, object]:
    """The end of one file in a commit, in the hub's words."""
    return {"action": "delete", "path": path, "type": "normal", "size": 0, "sha256": "", "content": "", "encoding": ""}


def _action(file: StagedFile) -> dict[str, object]:
    """One file of a commit, in the hub's words ("create" replaces as well)."""
    action: dict[str, object] = {"action": "create", "path": file.path, "size": file.size}
    if _is_blob(file):
        return {**action, "type": "lfs", "sha256": file.sha256, "content": "", "encoding": ""}
    content = base64.b64encode(file.source.read_bytes()).decode("ascii")
    return {**action, "type": "normal", "sha256": "", "content": content, "encoding": "base64"}
