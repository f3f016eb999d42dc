"""The plugin works with one version of SGLang, names what changed inside, and never fails silently."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from angelspec.core.errors import CheckpointError
from angelspec.demo.columns import Seen, Server
from angelspec.serving.wire import server_info
from sglang_ext import compat, plugin, settings
from tests.engine_builders import write_tiny_bundle

pytest.importorskip("sglang")


def test_the_installed_sglang_is_what_is_expected() -> None:
    compat.check_contract()


def test_whatever_the_worker_overrides_is_expected() -> None:
    from sglang_ext.worker import AngelSpecWorker

    (above,) = AngelSpecWorker.__bases__
    ours = (name for name, value in vars(AngelSpecWorker).items() if callable(value) or isinstance(value, property))
    overridden = {name for name in ours if hasattr(above, name)}
    expected = {place.rpartition(".")[2] for place in compat.SIGNATURES if f":{above.__name__}." in place}
    assert "prewarm_sampling" in overridden
    assert overridden - expected == set()


@pytest.mark.parametrize(("found", "words"), [("0.5.22", "SGLang 0.5.22 is installed"), (None, "not installed")])
def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch, found: str | None, words: str) -> None:
    monkeypatch.setattr(compat, "installed_version", lambda: found)
    with pytest.raises(compat.CompatibilityError, match=words):
        compat.check_contract()


def test_a_changed_internal_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "INTERNALS", {**compat.INTERNALS, "gone_away": "sglang.srt.speculative.spec_info"})
    monkeypatch.setattr(
        compat,
        "SIGNATURES",
        {"sglang.srt.speculative.ragged_verify:RaggedVerifyLayout.from_verify_lens": ("grid", "not_there")},
    )
    with pytest.raises(compat.CompatibilityError) as error:
        compat.check_contract()
    assert "sglang.srt.speculative.spec_info.gone_away is gone" in str(error.value)
    assert "from_verify_lens has no parameter not_there" in str(error.value)


def test_a_plugin_that_fails_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.setenv(settings.BUNDLE_VARIABLE, "/nowhere/bundle.yaml")
    monkeypatch.setattr(compat, "installed_version", lambda: "0.4.0")
    with pytest.raises(SystemExit, match="could not be loaded.*SGLang 0.4.0 is installed"):
        plugin.register()


def test_what_is_refused_are_arguments_of_sglang() -> None:
    from sglang.srt.server_args import ServerArgs

    from sglang_ext.algorithm import UNSUPPORTED

    assert [name for name in UNSUPPORTED if not hasattr(ServerArgs, name)] == []
    assert not hasattr(ServerArgs, "no_such_argument")


def test_a_server_says_whether_it_heeds_seeds() -> None:
    from sglang.srt.server_args import ServerArgs

    everything_on = server_info(dict.fromkeys(vars(ServerArgs), True))
    assert Seen(Server("a", "http://a"), everything_on).heeds_seeds


def test_nothing_happens_where_nobody_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.delenv(settings.BUNDLE_VARIABLE, raising=False)
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    monkeypatch.setattr(plugin.sys, "argv", ["sglang", "serve"])
    monkeypatch.setattr(plugin, "_register", lambda **_: pytest.fail("registered"))
    plugin.register()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pp_size": 2}, "pipeline parallelism"),
        ({"attn_cp_size": 2}, "context parallelism"),
        ({"enable_lora": True}, "LoRA"),
        ({"enable_hierarchical_cache": True}, "hierarchical cache"),
        ({"disaggregation_mode": "decode"}, "disaggregated"),
        ({"enable_mixed_chunk": True, "enable_unified_memory": True}, "mixed chunks.*unified memory"),
        ({"attention_backend": "triton"}, "attention backend 'triton'"),
        ({"attention_backend": "fa3", "prefill_attention_backend": "triton"}, "'triton' .--prefill-attention-backend"),
        ({"attention_backend": "fa3", "decode_attention_backend": "triton"}, "'triton' .--decode-attention-backend"),
        ({"attention_backend": "flashinfer", "device": "cuda"}, "without CUDA graphs only"),
    ],
)
def test_what_cannot_be_combined_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    from sglang_ext.algorithm import UnsupportedError, refuse_unsupported

    refuse_unsupported(SimpleNamespace(attention_backend="fa3", pp_size=1, enable_lora=None))
    refuse_unsupported(SimpleNamespace(attention_backend="flashinfer", device="cuda", disable_cuda_graph=True))
    with pytest.raises(UnsupportedError, match=words):
        refuse_unsupported(SimpleNamespace(**changes))


def arguments(**changes: Any) -> SimpleNamespace:
    """SGLang's, as they are where nothing is said."""
    import msgspec
    from sglang.srt.server_args import ServerArgs

    return SimpleNamespace(**{item.name: item.default for item in msgspec.structs.fields(ServerArgs)} | changes)


def test_settings_of_other_speculation_are_refused_and_ours_are_not() -> None:
    from sglang_ext.algorithm import UnsupportedError, refuse_speculative

    ours = {"speculative_num_steps": 1, "speculative_num_draft_tokens": 8}
    refuse_speculative(arguments(speculative_algorithm="ANGELSPEC"), ours)
    refuse_speculative(arguments(**ours, speculative_draft_model_quantization="fp8"), ours)
    for changes in (
        {"speculative_num_draft_tokens": 4},
        {"speculative_draft_model_path": "/mine"},
        {"speculative_accept_threshold_single": 0.5},
        {"speculative_dspark_sps_table_path": "table.json"},
    ):
        (name,) = changes
        with pytest.raises(UnsupportedError, match=f"--{name.replace('_', '-')}"):
            refuse_speculative(arguments(**changes), ours)


def test_blocks_are_drafted_where_windows_of_different_widths_can_look_both_ways() -> None:
    from sglang_ext.algorithm import UnsupportedError, draft_backend

    assert draft_backend(arguments(attention_backend="fa3")) is None
    assert draft_backend(arguments(attention_backend="trtllm_mha")) == "fa4"
    mixed = {"prefill_attention_backend": "trtllm_mha", "decode_attention_backend": "fa4", "attention_backend": "fa4"}
    assert draft_backend(arguments(**mixed)) == "fa4"
    assert draft_backend(arguments(speculative_draft_attention_backend="fa3", attention_backend="trtllm_mha")) == "fa3"
    for name in ("trtllm_mha", "triton"):
        with pytest.raises(UnsupportedError, match=f"'{name}' .--speculative-draft-attention-backend"):
            draft_backend(arguments(speculative_draft_attention_backend=name))


@pytest.mark.parametrize(
    ("words", "bundle", "wanted"),
    [
        (["serve", "--model-path", "t", "--speculative-algorithm", "ANGELSPEC"], False, True),
        (["serve", "--model-path=t", "--speculative-algorithm=angelspec"], False, True),
        (["serve", "--model-path", "t", "--speculative-algorithm", "EAGLE"], True, False),
        (["serve", "--model-path", "t"], True, False),
        (["serve", "--config", "server.yaml"], True, True),
        (["my_engine.py"], True, True),
        (["my_engine.py"], False, False),
    ],
)
def test_an_engine_without_the_algorithm_stays_sglangs_own(words: list[str], bundle: bool, wanted: bool) -> None:
    assert plugin._is_wanted(words, {settings.BUNDLE_VARIABLE: "b.yaml"} if bundle else {}) is wanted


def test_another_drafters_scheduler_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_ext import engine_hooks

    monkeypatch.delenv(settings.BUNDLE_VARIABLE, raising=False)
    controller, state = SimpleNamespace(scheduler=SimpleNamespace(draft_worker=SimpleNamespace())), {"a": 1}
    assert engine_hooks._add_state(lambda controller, state: "done", controller, state) == "done"
    assert state == {"a": 1}
    assert engine_hooks._update_handlers(lambda controller: {"dspark_force": 1}, controller) == {"dspark_force": 1}


def test_a_hook_that_was_not_applied_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_ext import engine_hooks

    applied = set(engine_hooks.hooks())
    monkeypatch.setattr(compat.HookRegistry, "_patched", applied)
    engine_hooks.check_applied()
    lost = {name for name in applied if name.endswith(("._update_handlers", "._process_messages"))}
    applied -= lost
    with pytest.raises(compat.CompatibilityError, match="did not apply hooks") as error:
        engine_hooks.check_applied()
    assert len(lost) == 2
    assert {name for name in engine_hooks.hooks() if name in str(error.value)} == lost


def test_it_answers_as_dspark_and_is_complete() -> None:
    from sglang_ext.algorithm import AngelSpecAlgorithm

    algorithm = AngelSpecAlgorithm(name="ANGELSPEC", factory=None, supports_overlap=True, validate_server_args=None)
    dspark = compat.SpeculativeAlgorithm.DSPARK
    ours = "supports_prefill_shared_read_done"  # entries are placed after the target's prefill
    assert not algorithm.supports_prefill_shared_read_done()
    for name in vars(compat.SpeculativeAlgorithm):
        if name.startswith(("is_", "supports_", "has_")) and name != ours:
            assert getattr(algorithm, name)() == getattr(dspark, name)(), name
    assert algorithm.need_topk() == dspark.need_topk()


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Builds the draft model of a tiny bundle, as SGLang does."""
    monkeypatch.setenv("ANGELSPEC_CACHE", str(tmp_path / "cache"))
    path = write_tiny_bundle(tmp_path)
    monkeypatch.setenv(settings.BUNDLE_VARIABLE, str(path))
    settings.current_plan.cache_clear()

    def build() -> Any:
        from sglang_ext.models.drafters import AngelSpecDrafters

        plan = settings.current_plan()
        config = SimpleNamespace(angelspec_plan=plan.digest, vocab_size=plan.places[0].config.vocab_size)
        return AngelSpecDrafters(config)

    yield build
    settings.current_plan.cache_clear()


def test_every_drafter_is_loaded(built: Any) -> None:
    model = built()
    assert list(model.served) == ["mtp", "dfly", "dspark"]
    assert [attention.layer_id for served in model.served.values() for attention in served.attention] == [0, 1, 2, 3]
    assert {name: served.depth for name, served in model.served.items()} == {"mtp": 3, "dfly": 7, "dspark": 4}
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_truncated_file_stops_it_by_name(built: Any, tmp_path: Path) -> None:
    weights = tmp_path / "dfly" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="dfly"):
        built()


def test_a_missing_tensor_stops_it_by_name(built: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = tmp_path / "mtp" / "model.safetensors"
    tensors = load_file(weights)
    gone = next(name for name in tensors if "eh_proj" in name)
    del tensors[gone]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="eh_proj"):
        built()


def test_a_tensor_that_is_not_finite_stops_it_by_name(built: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = tmp_path / "dspark" / "model.safetensors"
    tensors = load_file(weights)
    name = next(name for name in tensors if "o_proj" in name)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="o_proj"):
        built()


def test_another_folder_is_not_taken_for_the_draft_model(built: Any) -> None:
    model = built()
    model.load_weights([(settings.MARKER, torch.tensor(list(model.plan.digest.encode()), dtype=torch.uint8))])
    with pytest.raises(CheckpointError, match="marker"):
        model.load_weights([("layers.0.weight", torch.zeros(1))])
