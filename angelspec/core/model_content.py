"""The content of a model's folder: which files hold its weights, and a hash of all that is loaded."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from angelspec.core.files import read_json, write_json_atomic
from angelspec.core.fingerprint import file_sha256, fingerprint
from angelspec.core.locations import cache_folder

_DIGESTED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
             "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
             "chat_template.json")  # fmt: skip


def weight_files(folder: Path) -> tuple[list[Path], list[str]]:
    """Weight files that exist, and names that an index promises but are not there; in the order in which transformers
    looks for them."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return [folder / name], []
        index = folder / f"{name}.index.json"
        if index.is_file():
            try:
                names = sorted(set(read_json(index)["weight_map"].values()))
            except (ValueError, KeyError, TypeError, AttributeError):
                return [], [f"{index.name} (unreadable)"]
            present = [folder / item for item in names if (folder / item).is_file()]
            return present, [item for item in names if not (folder / item).is_file()]
    return [], []


def content_digest(folder: Path, *, extra: Any = None) -> str:
    """SHA-256 of what is loaded: configuration, weights, tokenizer and chat template.

    File hashes are remembered in the cache folder by size and modification time, so that large weights are read once.
    Facts that do not change the model (the transformers version that wrote it) are left out.
    """
    weights, _ = weight_files(folder)
    names = [folder / name for name in _DIGESTED if (folder / name).is_file()]
    memory = cache_folder() / "digests" / f"{fingerprint(str(folder.resolve()))}.json"
    try:
        known = read_json(memory)
    except (OSError, ValueError):
        known = {}
    hashes: dict[str, list[Any]] = {}
    for path in [*names, *weights]:
        status = path.stat()
        entry = known.get(path.name)
        if not (isinstance(entry, list) and entry[:2] == [status.st_size, status.st_mtime_ns]):
            entry = [status.st_size, status.st_mtime_ns, _content_sha256(path)]
        hashes[path.name] = entry
    if hashes != known:
        with suppress(OSError):  # a read-only cache only costs the time to hash again
            write_json_atomic(memory, hashes)
    return fingerprint({"files": {name: entry[2] for name, entry in hashes.items()}, "extra": extra}, length=64)


def _content_sha256(path: Path) -> str:
    if path.name != "config.json":
        return file_sha256(path)
    config = {
        key: value for key, value in read_json(path).items() if key not in ("transformers_version", "_name_or_path")
    }
    return fingerprint(config, length=64)
