"""The plan: flags refused and completed, parts that do not fit, memory, the exact command, the engine's package."""

import io
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import serving_builders
from hub_builders import manifest_of
from rich.console import Console
from serving_builders import GPU, ROOT, fake_parts, install_fake_sglang, plan_of, resolved_bundle, target_folder

from angelspec.core import engine
from angelspec.core.bundle import load_bundle
from angelspec.core.byte_sizes import byte_size
from angelspec.core.errors import BundleError, MissingRequirement
from angelspec.core.recipe_files import load_recipe
from angelspec.serving.engine_package import check_engine
from angelspec.serving.failures import ServingError
from angelspec.serving.flags import check_flags, flag_value, parse_flags
from angelspec.serving.plan_table import print_bundle, print_plan
from angelspec.serving.resolving import (
    Examined,
    FoundTarget,
    compose_bundle,
    resolve_bundle,
    with_acceptance,
    with_routes,
)

# --------------------------------------------------------------------------------------------------- flags


def test_flags_are_read_in_every_form():
    flags = parse_flags(["--tp-size", "2", "--dtype=bfloat16", "--disable-radix-cache", "--cuda-graph-bs", "1", "2"])
    assert [flag.words for flag in flags] == [
        ["--tp-size", "2"], ["--dtype", "bfloat16"], ["--disable-radix-cache"], ["--cuda-graph-bs", "1", "2"],
    ]  # fmt: skip
    assert flag_value(flags, "--dtype") == "bfloat16"
    assert flag_value(flags, "--page-size") is None
    with pytest.raises(ServingError, match="'8' is no flag"):
        parse_flags(["8"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--enable-hierarchical-cache"], ["--enable-hier"], ["--enable-hicache"], ["--hicache-ratio", "2"],
        ["--enable-lora"], ["--enable-lora-overlap-loading"], ["--lora-paths", "a"], ["--max-lora-rank", "8"],
        ["--max-loaded-loras", "2"], ["--disaggregation-mode", "prefill"], ["--disaggregation-mode=decode"],
        ["--pp-size", "2"], ["--pipeline-parallel-size=4"], ["--enable-dp-attention"],
        ["--speculative-algorithm", "EAGLE"],
        ["--speculative-num-steps", "3"], ["--decoupled-spec-role", "x"], ["--enable-mixed-chunk"],
        ["--enable-custom-logit-processor"], ["--enable-return-hidden-states"], ["--model-path", "x"], ["--model", "x"],
        ["--attention-backend", "triton"], ["--attention-backend=intel_amx"], ["--attention-backend", "torch_native"],
        ["--decode-attention-backend", "triton"], ["--prefill-attention-backend", "flashmla"],
    ],
)  # fmt: skip
def test_what_the_extension_cannot_support_is_refused_by_name(arguments):
    name = arguments[0].partition("=")[0]
    with pytest.raises(ServingError, match=name):
        check_flags(parse_flags(arguments), device="cuda")


@pytest.mark.parametrize(
    ("arguments", "device"),
    [
        (["--pp-size", "1"], "cuda"), (["--attention-backend", "fa3"], "cuda"), (["--tp-size", "2"], "cuda"),
        (["--attention-backend", "trtllm_mha"], "cuda"), (["--attention-backend", "flashinfer"], "cuda"),
        (["--attention-backend", "torch_native"], "cpu"), (["--attention-backend", "fa4"], "cuda"),
        (["--model-impl", "auto"], "cuda"),
        (["--max-running-requests", "64"], "cpu"), (["--enable-metrics"], "cpu"),
    ],
)  # fmt: skip
def test_other_flags_pass(arguments, device):
    check_flags(parse_flags(arguments), device=device)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("smollm2-135m-instruct", "smollm2-135m-instruct"), ("hf:Qwen/Qwen3-8B@abc", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"), ("modelscope:Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
    ],
)  # fmt: skip
def test_users_know_the_target_by_its_name(tmp_path, source, name):
    resolved = resolved_bundle(tmp_path, target_name=source)
    options = dict(zip(plan_of(resolved).command, plan_of(resolved).command[1:], strict=False))
    assert options["--served-model-name"] == name
    mine = plan_of(resolved, arguments=["--served-model-name", "mine"]).command
    assert mine.count("--served-model-name") == 1 and "mine" in mine


def test_several_ranks_are_said_to_hold_the_drafters_whole(tmp_path):
    assert not any("ranks" in note for note in plan_of(resolved_bundle(tmp_path), arguments=["--tp", "1"]).notes)
    notes = plan_of(resolved_bundle(tmp_path), arguments=["--tp", "2"]).notes
    assert any("each of the 2 tensor-parallel ranks holds the drafters" in note for note in notes)


def test_a_cpu_server_gets_modest_defaults_and_the_users_flags_win(tmp_path):
    plan = plan_of(resolved_bundle(tmp_path), arguments=["--max-running-requests=4", "--dtype", "bfloat16"])
    command = plan.command
    assert command[1:3] == ["-m", "sglang.launch_server"]
    options = dict(zip(command, command[1:], strict=False))
    assert options["--speculative-algorithm"] == "ANGELSPEC"
    assert options["--model-path"] == str(tmp_path / "target")
    assert options["--device"] == "cpu"
    assert options["--attention-backend"] == "torch_native"
    assert options["--max-running-requests"] == "4"
    assert options["--dtype"] == "bfloat16"
    assert command.count("--dtype") == command.count("--max-running-requests") == 1
    assert {"--max-total-tokens", "--mem-fraction-static", "--disable-cuda-graph"} <= set(command)
    assert plan.environment("/b.yaml") == {
        "ANGELSPEC_BUNDLE": "/b.yaml", "PYTHONUNBUFFERED": "1", "SGLANG_PLATFORM": "angelspec_cpu",
        "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("capability", "backend", "eager"),
    [((9, 0), "fa3", False), ((10, 0), "trtllm_mha", False), ((8, 6), "fa3", False), ((12, 0), "flashinfer", True)],
)
def test_a_gpu_server_gets_a_backend_that_verifies_ragged_rows(tmp_path, capability, backend, eager):
    hardware = type(GPU)("cuda", "GPU", capability)
    plan = plan_of(resolved_bundle(tmp_path), hardware=hardware)
    assert flag_value(plan.flags, "--attention-backend") == backend
    assert ("--disable-cuda-graph" in plan.command) == eager
    assert "SGLANG_PLATFORM" not in plan.environment("b")
    assert plan.memory.pool_tokens is None
    assert flag_value(plan.flags, "--max-running-requests") == "256"


def test_states_that_wait_for_entries_are_in_the_estimate(tmp_path):
    plan = plan_of(resolved_bundle(tmp_path), arguments=["--max-running-requests", "3", "--dtype", "bfloat16"])
    config = serving_builders.DFLY
    per_token = (len(config.target_layer_ids) + 1) * config.target_hidden_size * 2
    assert plan.memory.waiting_states == 3 * (7 + 1 + 32) * per_token


@pytest.mark.parametrize("flag", ["--tokenizer-worker-num", "--grpc-mode", "--enable-lmcache"])
def test_what_would_go_unlabelled_or_unasked_is_refused(flag):
    with pytest.raises(ServingError, match=flag):
        check_flags(parse_flags([flag, "2"]), device="cuda")


def test_a_server_with_a_certificate_is_asked_by_https(tmp_path):
    assert plan_of(resolved_bundle(tmp_path)).url == "http://127.0.0.1:30000"
    certified = plan_of(resolved_bundle(tmp_path), arguments=["--ssl-certfile", "c.pem", "--ssl-keyfile", "k.pem"])
    assert certified.url == "https://127.0.0.1:30000"


def test_flashinfer_runs_eagerly_and_the_device_can_be_chosen(tmp_path):
    resolved = resolved_bundle(tmp_path)
    chosen = plan_of(resolved, hardware=GPU, arguments=["--attention-backend", "flashinfer"])
    assert "--disable-cuda-graph" in chosen.command
    cpu = plan_of(resolved, hardware=GPU, arguments=["--device", "cpu"])
    assert cpu.hardware.device == "cpu"
    assert flag_value(cpu.flags, "--attention-backend") == "torch_native"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--api-key", "s3cret"], ["--api-k", "s3cret"], ["--api-key=s3cret"], ["--admin-api-key", "s3cret"],
        ["--admin-api", "s3cret"], ["--ssl-keyfile-password", "s3cret"], ["--ssl-keyfile-p=s3cret"],
    ],
)  # fmt: skip
def test_keys_are_shown_nowhere_but_go_to_the_server(tmp_path, arguments):
    plan = plan_of(resolved_bundle(tmp_path), arguments=["--ssl-keyfile", "key.pem", *arguments])
    output = io.StringIO()
    print_plan(plan, console=Console(file=output, width=160))
    shown = plan.shell_line("/b.yaml")
    assert "s3cret" in plan.command and "s3cret" not in shown + output.getvalue()
    assert "***" in shown and "--ssl-keyfile key.pem" in shown and "--host 127.0.0.1" in shown
    assert plan.secrets == ("s3cret",)


# -------------------------------------------------------------------------------------------------- memory


def test_memory_of_the_extra_pools(tmp_path):
    plan = plan_of(resolved_bundle(tmp_path), arguments=["--max-total-tokens", "1000"])
    # layers * keys and values * kv heads * head dim * bytes: MTP has one layer, this DFly two
    assert plan.memory.draft_bytes_per_token == {"mtp": 1 * 2 * 2 * 8 * 4, "dfly": 2 * 2 * 2 * 8 * 4}
    assert plan.memory.draft_pool_bytes_per_token == 384
    assert plan.memory.target_bytes_per_token == 6 * 2 * 2 * 8 * 4
    assert plan.memory.drafter_weights == {"mtp": 4000, "dfly": 4000}
    assert plan.memory.pool_tokens == 1000
    half = plan_of(resolved_bundle(tmp_path), hardware=GPU)  # the target's files are bfloat16
    assert half.memory.draft_pool_bytes_per_token == 192
    eighth = plan_of(resolved_bundle(tmp_path), hardware=GPU, arguments=["--kv-cache-dtype", "fp8_e5m2"])
    assert eighth.memory.draft_pool_bytes_per_token == 96
    assert eighth.memory.drafter_weights["mtp"] == 2000


@pytest.mark.parametrize(("name", "size"), [("bf16", 192), ("bfloat16", 192), ("mxfp8", 99), ("nvfp4", 54)])
def test_every_pool_that_sglang_knows_is_estimated(tmp_path, name, size):
    plan = plan_of(resolved_bundle(tmp_path), hardware=GPU, arguments=["--kv-cache-dtype", name])
    assert plan.memory.draft_pool_bytes_per_token == size


@pytest.mark.parametrize("flag", ["--kv-cache-dtype", "--dtype"])
def test_a_size_that_is_not_known_stops_nothing(tmp_path, flag):
    arguments = [flag, "int3", "--max-total-tokens", "1000", "--tp", "2"]
    plan = plan_of(resolved_bundle(tmp_path), hardware=GPU, arguments=arguments)
    assert plan.memory.draft_pool_bytes_per_token is None
    output = io.StringIO()
    print_plan(plan, console=Console(file=output, width=160))
    assert "not estimated: the size of the pool's numbers is not known" in output.getvalue()


def test_the_plan_is_drawn(tmp_path):
    output = io.StringIO()
    plan = plan_of(resolved_bundle(tmp_path), arguments=["--max-total-tokens", "1024"])
    print_plan(plan, console=Console(file=output, width=160))
    text = output.getvalue()
    for words in ("mtp", "dfly", "no-think", "384 B per token beside the target's 768 B", "384.0 KiB beside 768.0 KiB",
                  "SGLang 0.5.23", "everything else by load", "http://127.0.0.1:30000", "2 cores"):  # fmt: skip
        assert words in text, words
    assert (byte_size(3 * 2**20), byte_size(None), byte_size(5 * 2**30)) == ("3.0 MiB", "?", "5.0 GiB")


# ------------------------------------------------------------------------------------------------- fitting


def _recipe():
    return load_recipe("tiny-dfly-llama")


def test_names_follow_the_algorithm_and_stay_apart(tmp_path):
    parts = fake_parts(tmp_path)
    target = target_folder(tmp_path / "target")
    places = [str(tmp_path / name) for name in ("dfly-a", "dfly-b", "dfly-c")]
    bundle = compose_bundle(str(target), [*places, f"fast={tmp_path / 'mtp'}"], parts=parts)
    assert [drafter.name for drafter in bundle.drafters] == ["dfly", "dfly-no-think", "dfly-2", "fast"]
    later = compose_bundle(str(target), [places[0], f"dfly={places[1]}"], parts=parts)
    assert [drafter.name for drafter in later.drafters] == ["dfly-no-think", "dfly"]
    assert bundle.target.digest == "d" * 64
    assert bundle.target.mode_family == "smollm2"


def test_paths_in_a_file_are_relative_to_it(tmp_path):
    parts = fake_parts(tmp_path)
    target = target_folder(tmp_path / "models" / "target")
    folder = tmp_path / "bundles"
    bundle = compose_bundle(str(target), [str(tmp_path / "bundles" / "mtp")], parts=parts, relative_to=folder)
    assert bundle.target.source == "../models/target"
    assert bundle.drafters[0].source == "./mtp"
    loaded = load_bundle(bundle.save(folder / "b.yaml"))
    assert loaded.target.source == str(target)


def test_a_drafter_for_another_shape_is_refused(tmp_path):
    parts = fake_parts(tmp_path)
    target = target_folder(tmp_path / "target", vocab_size=51)
    with pytest.raises(BundleError, match="vocab_size is 50 but the target has 51"):
        compose_bundle(str(target), [str(tmp_path / "mtp")], parts=parts)


def test_a_drafter_with_broken_files_is_refused(tmp_path):
    parts = fake_parts(tmp_path, problems=("truncated: model.safetensors ends early",))
    with pytest.raises(BundleError, match="model.safetensors ends early"):
        compose_bundle(str(target_folder(tmp_path / "target")), [str(tmp_path / "mtp")], parts=parts)


def test_a_drafter_of_another_target_is_refused(tmp_path):
    manifests = {"dfly": manifest_of(_recipe())}
    parts = fake_parts(tmp_path, manifests=manifests)
    with pytest.raises(BundleError, match=r"trained for the target tiny-llama \(ab12ab12"):
        compose_bundle(str(target_folder(tmp_path / "target")), [str(tmp_path / "dfly")], parts=parts)
    fits = fake_parts(tmp_path, manifests=manifests, digest="ab12" * 16)
    assert compose_bundle(str(tmp_path / "target"), [str(tmp_path / "dfly")], parts=fits).acceptance
    other = fake_parts(tmp_path, release="org/other")
    with pytest.raises(BundleError, match="drafts for org/other, not for org/tiny"):
        compose_bundle(str(tmp_path / "target"), [str(tmp_path / "mtp")], parts=other)


def test_a_drafter_whose_mode_is_unknown_is_refused(tmp_path):
    parts = fake_parts(tmp_path, mode=None)
    target, drafter = str(target_folder(tmp_path / "target")), str(tmp_path / "mtp")
    with pytest.raises(BundleError, match="the thinking mode it was trained for is unknown") as refused:
        compose_bundle(target, [drafter], parts=parts)
    assert "--mode" in refused.value.mend
    assert compose_bundle(target, [drafter], parts=parts, mode="high-think").drafters[0].mode == "high-think"


@pytest.mark.parametrize(("architecture", "family"), [("qwen3", "qwen3"), ("hy_v3", "hy3"), ("llama", "plain")])
def test_a_target_in_a_folder_switches_thinking_as_its_architecture_does(tmp_path, architecture, family):
    parts = replace(fake_parts(tmp_path), find_target=lambda text, bare_paths=True: FoundTarget(Path(text)))
    target = target_folder(tmp_path / "target", model_type=architecture)
    bundle = compose_bundle(str(target), [str(tmp_path / "mtp")], parts=parts)
    assert bundle.target.mode_family == family
    notes = plan_of(resolve_bundle(bundle, parts=parts)).notes
    assert any("every request counts as no-think" in note for note in notes) == (family == "plain")


def test_a_bundle_that_says_otherwise_than_its_drafters_is_refused(tmp_path):
    parts = fake_parts(tmp_path)
    target = target_folder(tmp_path / "target")
    good = compose_bundle(str(target), [str(tmp_path / "mtp"), str(tmp_path / "dfly")], parts=parts)
    wrong = good.model_copy(
        update={
            "target": good.target.model_copy(update={"digest": "e" * 64}),
            "drafters": (
                good.drafters[0].model_copy(update={"mode": "high-think", "depth": 5}),
                good.drafters[1].model_copy(update={"family": "mtp", "digest": "c" * 64}),
            ),
        }
    )
    with pytest.raises(BundleError) as refused:
        resolve_bundle(wrong, parts=parts)
    for words in (
        "the bundle was made for eeee",
        "trained for no-think, not for high-think",
        "proposes 3 tokens, not 5",
        "family is block, not mtp",
        "content is dddddddddddddddd, the bundle was made for cccc",
    ):
        assert words in refused.value.message


def test_drafters_that_cannot_share_an_engine_are_refused(tmp_path, monkeypatch):
    parts = fake_parts(tmp_path)
    target = target_folder(tmp_path / "target")
    bundle = compose_bundle(str(target), [str(tmp_path / "mtp"), str(tmp_path / "dfly")], parts=parts)
    shorter = bundle.drafters[1].model_copy(update={"depth": 6})
    with pytest.raises(BundleError, match="proposes 7 tokens, not 6"):
        resolve_bundle(bundle.model_copy(update={"drafters": (shorter,)}), parts=parts)
    with pytest.raises(BundleError, match="there is no drafter"):
        resolve_bundle(bundle.model_copy(update={"drafters": ()}), parts=parts)
    wide = serving_builders.DFLY.model_copy(update={"head_dim": 16})
    monkeypatch.setattr(serving_builders, "DFLY", wide)
    with pytest.raises(BundleError, match="'mtp' and 'dfly' can't be served together: head_dim is 8 and 16"):
        resolve_bundle(bundle, parts=parts)
    monkeypatch.setattr(serving_builders, "DFLY", wide.model_copy(update={"head_dim": 8, "target_layer_ids": (1, 5)}))
    with pytest.raises(BundleError, match="output of the target's last layer"):
        resolve_bundle(bundle, parts=parts)


def test_an_untrained_drafter_is_known_as_such(tmp_path):
    manifest = manifest_of(_recipe(), drafter=serving_builders.DFLY, acceptance=())
    fresh = manifest.model_copy(update={"training": manifest.training.model_copy(update={"steps": 0})})
    resolved = resolved_bundle(tmp_path, ("dfly",), manifests={"dfly": fresh}, digest="ab12" * 16)
    assert not resolved.drafters[0].is_trained
    assert any("is not trained" in note for note in plan_of(resolved).notes)
    (trained,) = resolved_bundle(tmp_path, ("dfly",), manifests={"dfly": manifest}, digest="ab12" * 16).drafters
    assert trained.is_trained


def test_routes_and_measurements_are_added(tmp_path):
    bundle = resolved_bundle(tmp_path).bundle
    routed = with_routes(bundle, ["code=dfly", "math/no-think=mtp", "=ar"])
    assert [(r.workload, r.mode, r.route) for r in routed.routes] == [
        ("code", None, "dfly"), ("math", "no-think", "mtp"), (None, None, "ar"),
    ]  # fmt: skip
    with pytest.raises(BundleError, match=r"did you mean 'dfly'"):
        with_routes(bundle, ["code=dflyy"])
    with pytest.raises(BundleError, match="is no rule"):
        with_routes(bundle, ["code"])

    from angelspec.core.bundle import WorkloadAcceptance

    def measured(value):
        return WorkloadAcceptance(drafter="mtp", workload="code", cumulative=(value, 0.2, 0.1), steps=9)

    twice = with_acceptance(with_acceptance(bundle, [measured(0.5)]), [measured(0.6)])
    assert [item.cumulative[0] for item in twice.acceptance] == [0.6]
    output = io.StringIO()
    print_bundle(twice, console=Console(file=output, width=160))
    assert "1.90" in output.getvalue()  # 1 + 0.6 + 0.2 + 0.1


# ------------------------------------------------------------------------------------------------- package


def test_the_engines_package(tmp_path, monkeypatch):
    install_fake_sglang(tmp_path, monkeypatch)
    assert check_engine() == "0.5.23"


def test_the_package_installs_the_engine_that_is_checked_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["serve"] == [f"sglang=={engine.SGLANG_VERSION}"]
    assert list(project["entry-points"]["sglang.srt.platforms"]) == [engine.CPU_PLATFORM]


def test_another_version_of_the_engine_is_refused(tmp_path, monkeypatch):
    install_fake_sglang(tmp_path, monkeypatch, version="0.5.24")
    with pytest.raises(MissingRequirement, match=r"SGLang 0\.5\.24 is installed; the extension works inside 0\.5\.23"):
        check_engine()


def test_an_engine_that_would_not_find_the_extension_is_refused(tmp_path, monkeypatch):
    install_fake_sglang(tmp_path, monkeypatch, plugin=False)
    monkeypatch.setattr("angelspec.serving.engine_package.entry_points", lambda group: [])
    with pytest.raises(MissingRequirement, match="its entry point is not installed"):
        check_engine()


def test_a_missing_engine_says_how_to_install_it(monkeypatch):
    def nothing(name):
        from importlib.metadata import PackageNotFoundError

        raise PackageNotFoundError(name)

    monkeypatch.setattr("angelspec.serving.engine_package.version", nothing)
    with pytest.raises(MissingRequirement) as missing:
        check_engine()
    assert "pip install -e '.[serve,demo]'" in str(missing.value)


def test_brackets_in_paths_and_flags_are_no_markup(tmp_path):
    output = io.StringIO()
    resolved = resolved_bundle(tmp_path / "drafters[old]")
    plan = plan_of(resolved, arguments=["--json-model-override-args", '{"a": [true]}'])
    print_plan(plan, console=Console(file=output, width=400))
    assert str(tmp_path / "drafters[old]" / "mtp") in output.getvalue()
    assert "[true]" in output.getvalue()


def test_the_template_that_a_drafter_was_trained_with_travels_with_it(tmp_path):
    recipe = _recipe()
    target = recipe.target.model_copy(update={"chat_template": "/trainers/own.jinja"})
    manifest = manifest_of(recipe.model_copy(update={"target": target}))
    examined = Examined((), config=manifest.drafter, manifest=manifest)
    parts = replace(fake_parts(tmp_path, digest="ab12" * 16), examine=lambda found, geometry: examined)
    named = (str(target_folder(tmp_path / "target")), [str(tmp_path / "dfly")])
    with pytest.raises(BundleError, match="trained with, /trainers/own.jinja, is missing"):
        compose_bundle(*named, parts=parts)
    (tmp_path / "dfly" / "chat_template.jinja").write_text("{{ messages }}")
    resolved = resolve_bundle(compose_bundle(*named, parts=parts), parts=parts)
    assert resolved.drafters[0].chat_template == tmp_path / "dfly" / "chat_template.jinja"
    assert str(tmp_path / "dfly" / "chat_template.jinja") in plan_of(resolved).command
