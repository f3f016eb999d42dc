"""The platform is chosen by name only, and what it replaces exists in this SGLang."""

import ast
import dataclasses
import importlib
import inspect
from pathlib import Path

import pytest
import torch

pytest.importorskip("sglang")

from angelspec.core.errors import MissingRequirement  # noqa: E402
from sglang_ext.contract import Internal  # noqa: E402
from sglang_ext.cpu import hooks, internals, platform  # noqa: E402
from sglang_ext.cpu.locations import assign_req_to_token, extend_cache_locations  # noqa: E402


def test_activates_only_by_name(monkeypatch):
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    assert platform.activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", "another")
    assert platform.activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", "angelspec_cpu")
    module, _, name = platform.activate().partition(":")
    found = getattr(importlib.import_module(module), name)()
    assert found.is_out_of_tree() and found.device_type == "cpu"
    assert not found.capabilities.supports_triton and not found.capabilities.graph_capture
    assert found.get_kv_pool_cls(kind="mla") is None


def test_nothing_is_missing():
    assert internals.missing() == []


def test_names_what_is_missing(monkeypatch):
    gone = Internal("sglang.srt.plugins.no_such_thing")
    renamed = Internal(internals.ASSIGN_REQ_TO_TOKEN, ("rows",))
    layout = next(internal for internal in internals.USED if internal.path.endswith("RaggedVerifyLayout"))
    poorer = dataclasses.replace(layout, fields=("verify_lens", "no_such_field"))
    monkeypatch.setattr(internals, "USED", (gone, renamed, poorer))
    absent, changed, without = internals.missing()
    assert without == f"{layout.path} has no no_such_field"
    assert absent == f"{gone.path} is gone"
    assert changed.startswith(f"{renamed.path}(req_pool_indices") and "should be (rows)" in changed
    with pytest.raises(MissingRequirement, match="no_such_thing"):
        hooks.register()


def test_stand_ins_take_the_same_parameters():
    assert {internal.path for internal in internals.REPLACED} == set(hooks.STAND_INS)
    for internal in internals.REPLACED:
        assert tuple(inspect.signature(hooks.STAND_INS[internal.path]).parameters) == internal.parameters


def test_every_import_from_sglang_is_listed():
    listed = {internal.path for internal in (*internals.REPLACED, *internals.USED)}
    for file in Path(internals.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang."):
                for name in (f"{node.module}.{alias.name}" for alias in node.names):
                    assert any(path == name or path.startswith(f"{name}.") for path in listed), (file.name, name)


def test_locations_round_trip():
    table = torch.zeros(6, 40, dtype=torch.int32)
    rows, start = torch.tensor([4, 1, 3]), torch.tensor([2, 10, 0])
    end = torch.tensor([5, 10, 7])
    slots = torch.randperm(100)[:10] + 1
    assign_req_to_token(rows, table, start, end, slots, 3)
    assert table[4, 2:5].tolist() == slots[:3].tolist() and table[3, :7].tolist() == slots[3:].tolist()
    assert int((table != 0).sum()) == 10
    read = extend_cache_locations(
        req_pool_indices=rows,
        req_to_token=table,
        start_offset=start,
        end_offset=end,
        batch_size=3,
        draft_token_num=4,
        device="cpu",
    )
    assert read.dtype == torch.int64 and read.tolist() == [*slots.tolist(), 0, 0]
