import shutil
from collections import namedtuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from training_builders import pattern_rows, tiny_target

from angelspec.core.errors import DataError, MissingRequirement
from angelspec.core.files import read_json, write_json_atomic
from angelspec.training import features as module
from angelspec.training.features import (
    DiskFeatures,
    MemoryFeatures,
    OnlineFeatures,
    bytes_per_row,
    write_shards,
)

LAYERS = (1, 2, 3)


def online(rows):
    return OnlineFeatures(tiny_target(), rows, layer_ids=LAYERS)


def on_disk(rows, folder, **settings):
    return write_shards(
        tiny_target(), rows, layer_ids=LAYERS, folder=folder,
        **{"dtype": torch.float32, "rows_per_shard": 4, **settings},
    )  # fmt: skip


class Faulty:
    """The tiny target with a non-finite state in every document that begins with a given token."""

    def __init__(self, *tokens):
        self.tokens, self.real = tokens, tiny_target()
        self.device, self.dtype, self.geometry = self.real.device, self.real.dtype, self.real.geometry
        self.digest = "faulty"

    def forward(self, tokens_BT, **settings):
        states = self.real.forward(tokens_BT, **settings)
        for row, first in enumerate(tokens_BT[:, 0].tolist()):
            if first in self.tokens:
                states.hidden_BTD[row, 3, 0] = float("inf")
        return states


def test_features_of_a_packed_document_are_those_of_the_document_alone():
    rows = pattern_rows(2, row_length=64)
    packed = online(rows).fetch([0, 1])
    compared = 0
    for row in range(2):
        for document in rows.document_RT[row].unique():
            if document < 0:
                continue
            inside = rows.document_RT[row] == document
            alone = tiny_target().forward(rows.tokens_RT[row, inside][None].long(), layer_ids=LAYERS)
            for ours, theirs in ((packed.taps_RTF, alone.taps_BTF), (packed.hidden_RTD, alone.hidden_BTD)):
                torch.testing.assert_close(ours[row, inside], theirs[0], rtol=1e-4, atol=2e-3)
            compared += 1
    assert compared >= 4


def test_one_document_s_tokens_change_no_feature_of_another():
    rows = pattern_rows(1, row_length=64)
    first = rows.document_RT[0] == rows.document_RT[0, 0]
    before = online(rows).fetch([0])
    rows.tokens_RT[0, 0] += 1
    after = online(rows).fetch([0])
    assert torch.equal(before.taps_RTF[0, ~first], after.taps_RTF[0, ~first])
    assert not torch.equal(before.taps_RTF[0, first], after.taps_RTF[0, first])


def test_the_three_sources_agree(tmp_path):
    rows = pattern_rows(10)
    held = MemoryFeatures(tiny_target(), rows, layer_ids=LAYERS, dtype=torch.float32)
    disk = on_disk(rows, tmp_path)
    assert len(list(tmp_path.glob("shard-*"))) == 3
    wanted = [9, 0, 5]
    expected = online(rows).fetch(wanted)
    for source in (held, disk, DiskFeatures(tmp_path, rows, target_digest=tiny_target().digest)):
        found = source.fetch(wanted)
        torch.testing.assert_close(found.taps_RTF, expected.taps_RTF, rtol=1e-4, atol=2e-3)
        torch.testing.assert_close(found.hidden_RTD, expected.hidden_RTD, rtol=1e-4, atol=2e-3)
        assert found.finite_R.tolist() == [True] * 3
    assert torch.equal(held.fetch(wanted).taps_RTF, disk.fetch(wanted).taps_RTF)
    assert held.fetch([0]).taps_RTF.shape == (1, 48, 192)
    half = MemoryFeatures(tiny_target(), rows, layer_ids=LAYERS, dtype=torch.bfloat16)
    assert half.fetch([0]).taps_RTF.dtype == torch.bfloat16


def test_writing_resumes_shard_by_shard_with_the_same_bytes(tmp_path):
    rows = pattern_rows(10)
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    on_disk(rows, straight)

    def stop(done, _):
        if done > 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        on_disk(rows, stopped, progress=stop)
    assert [p.name for p in stopped.glob("shard-*")] == ["shard-00000.safetensors"]
    kept = (stopped / "shard-00000.safetensors").stat().st_mtime_ns
    on_disk(rows, stopped)
    assert (stopped / "shard-00000.safetensors").stat().st_mtime_ns == kept
    for file in straight.iterdir():
        assert file.read_bytes() == (stopped / file.name).read_bytes(), file.name


def test_the_manifest_names_shapes_layers_and_version(tmp_path):
    on_disk(pattern_rows(5), tmp_path)
    manifest = read_json(tmp_path / "manifest.json")
    assert manifest["layer_ids"] == [1, 2, 3] and manifest["format_version"] == 1 and manifest["num_rows"] == 5
    assert manifest["shapes"] == {"taps": [48, 192], "hidden": [48, 64], "finite": []}


def test_features_of_something_else_are_refused(tmp_path):
    rows = pattern_rows(5)
    on_disk(rows, tmp_path)
    with pytest.raises(DataError, match="target_digest"):
        DiskFeatures(tmp_path, rows, target_digest="another")
    with pytest.raises(DataError, match="rows_digest"):
        DiskFeatures(tmp_path, pattern_rows(5, seed=3), target_digest=tiny_target().digest)
    with pytest.raises(DataError, match="something else"):
        on_disk(rows, tmp_path, dtype=torch.bfloat16)
    write_json_atomic(tmp_path / "manifest.json", read_json(tmp_path / "manifest.json") | {"format_version": 0})
    with pytest.raises(DataError, match="format version 0"):
        DiskFeatures(tmp_path, rows, target_digest=tiny_target().digest)


def test_damaged_and_exchanged_shards_are_named(tmp_path):
    rows = pattern_rows(8)
    disk = on_disk(rows, tmp_path)
    first, second = sorted(tmp_path.glob("shard-*"))
    shutil.copy(first, second)
    with pytest.raises(DataError, match=r"shard-00001\.safetensors holds other rows"):
        disk.fetch([5])
    first.write_bytes(first.read_bytes()[:-8])
    with pytest.raises(DataError, match=r"shard-00000\.safetensors can't be read"):
        disk.fetch([0])


def test_space_is_estimated_before_anything_is_written(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage(0, 0, 100_000))
    with pytest.raises(MissingRequirement, match=r"need 0\.00 GiB more on disk; .* 0\.00 GiB free"):
        on_disk(pattern_rows(5), tmp_path)
    assert not list(tmp_path.glob("shard-*"))
    memory = namedtuple("memory", "available")
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: memory(100_000))
    with pytest.raises(MissingRequirement, match="training.features=disk"):
        MemoryFeatures(tiny_target(), pattern_rows(5), layer_ids=LAYERS)
    assert bytes_per_row(512, hidden_size=576, num_taps=3, dtype=torch.bfloat16) == 512 * 576 * 4 * 2


def test_non_finite_rows_are_refused_one_by_one_and_many_stop_the_run(tmp_path):
    rows = pattern_rows(60)
    bad = 251
    rows.tokens_RT[rows.position_RT == 0] = 250
    rows.tokens_RT[7, 0] = bad
    settings = {"layer_ids": LAYERS, "dtype": torch.float32}
    held = MemoryFeatures(Faulty(bad), rows, **settings)
    disk = write_shards(Faulty(bad), rows, folder=tmp_path / "a", **settings)
    for source in (held, disk):
        found = source.fetch([6, 7])
        assert found.finite_R.tolist() == [True, False] and not found.hidden_RTD[1].any()
        assert found.taps_RTF.isfinite().all()
    with pytest.raises(DataError, match="non-finite features for 60 of 60 rows"):
        MemoryFeatures(Faulty(bad, 250), rows, **settings)
    with pytest.raises(DataError, match="non-finite features for 60 of 60 rows"):
        write_shards(Faulty(bad, 250), rows, folder=tmp_path / "b", **settings)


def test_shards_carry_rows_in_order(tmp_path):
    rows = pattern_rows(6)
    on_disk(rows, tmp_path)
    file = tmp_path / "shard-00001.safetensors"
    tensors = load_file(file)
    torch.testing.assert_close(tensors["taps"], online(rows).fetch([4, 5]).taps_RTF, rtol=1e-4, atol=2e-3)
    save_file(tensors, file)  # without the rows' fingerprints
    with pytest.raises(DataError, match="other rows"):
        on_disk(rows, tmp_path)


def test_a_drafter_without_taps_gets_the_last_hidden_states_from_every_source(tmp_path):
    rows = pattern_rows(6)
    sources = {
        "online": OnlineFeatures(tiny_target(), rows, layer_ids=()),
        "memory": MemoryFeatures(tiny_target(), rows, layer_ids=(), dtype=torch.float32),
        "disk": write_shards(tiny_target(), rows, layer_ids=(), folder=tmp_path, dtype=torch.float32, rows_per_shard=4),
    }
    reopened = DiskFeatures(tmp_path, rows, target_digest=tiny_target().digest)
    wanted = online(rows).fetch([5, 0, 3])
    for name, source in {**sources, "reopened": reopened}.items():
        found = source.fetch([5, 0, 3])
        assert found.taps_RTF.shape == (*wanted.hidden_RTD.shape[:2], 0), name
        torch.testing.assert_close(found.hidden_RTD, wanted.hidden_RTD, msg=lambda t, n=name: f"{n}: {t}")
        assert found.finite_R.all()
