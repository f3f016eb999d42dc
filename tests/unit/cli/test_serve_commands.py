"""The commands of serving, with real tiny checkpoints and a fake SGLang: plan, start, stop, bundles, load test."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
from click.testing import CliRunner
from fake_sglang import Behaviour, FakeSGLang, small_bundle
from hub_builders import exported_drafter, manifest_of
from serving_builders import install_fake_sglang

from angelspec.cli import serving_parts
from angelspec.cli.main import cli
from angelspec.cli.serving_parts import target_source
from angelspec.core.bundle import Bundle, load_bundle
from angelspec.core.calibration import Calibration
from angelspec.core.known_targets import KNOWN_TARGETS
from angelspec.core.locations import resource_folder
from angelspec.core.manifest import TargetIdentity
from angelspec.core.model_content import content_digest
from angelspec.core.recipe_files import load_recipe
from angelspec.drafters.checkpoint import save_drafter
from angelspec.drafters.mtp import MtpDrafter
from angelspec.serving import bench
from angelspec.serving.bench_result import BenchResult
from angelspec.serving.launch import free_port
from angelspec.targets.sources import materialise


def run(*arguments):
    return CliRunner().invoke(cli, [str(item) for item in arguments])


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A cache with a tiny target, an MTP and a DFly drafter for it, and an installed fake of SGLang."""
    install_fake_sglang(tmp_path, monkeypatch)
    target = materialise("random:llama")
    recipes = {name: load_recipe(f"tiny-{name}-llama") for name in ("mtp", "dfly")}
    geometry = recipes["dfly"].target.geometry
    identity = TargetIdentity(
        name="tiny-llama", source="random:llama", digest=content_digest(target), mode_family="smollm2",
        geometry=geometry,
    )  # fmt: skip
    exported_drafter(tmp_path / "dfly", recipe=recipes["dfly"], target=identity, acceptance=())
    mtp = MtpDrafter(recipes["mtp"].drafter_config()).initialise(seed=0)
    manifest = manifest_of(recipes["mtp"], target=identity, acceptance=())
    save_drafter(mtp, tmp_path / "mtp", manifest=manifest)
    return tmp_path


def _parts(world):
    return "--target", "tiny-llama", "--drafter", world / "mtp", "--drafter", world / "dfly"


def test_a_dry_run_shows_the_plan_and_the_command(world):
    result = run("serve", *_parts(world), "--port", 31000, "--dry-run", "--max-running-requests", 4, "--tp-size=1")
    assert result.exit_code == 0, result.output
    for words in ("mtp", "dfly", "no-think", "per token beside the target's", "everything else by load",
                  "-m sglang.launch_server --model-path", "--speculative-algorithm ANGELSPEC", "--port 31000",
                  "SGLANG_PLATFORM=angelspec_cpu", "ANGELSPEC_BUNDLE=",
                  "--max-running-requests 4 --tp-size 1"):  # fmt: skip
        assert words in result.output, words
    (file,) = (world / "cache" / "bundles").iterdir()
    assert [drafter.name for drafter in load_bundle(file).drafters] == ["mtp", "dfly"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--enable-lora"], "--enable-lora can't be used here: LoRA"),
        (["--attention-backend", "triton"], "--attention-backend triton can't be used here"),
        (["--speculative-num-steps", "3"], "the extension sets speculation up by itself"),
        (["--bundle", "x.yaml"], "give either --bundle FILE, or --target with --drafter"),
    ],
)
def test_what_cannot_be_served_is_refused(world, arguments, words):
    result = run("serve", *_parts(world), "--dry-run", *arguments)
    assert result.exit_code == 2
    assert words in result.output


def test_a_truncated_file_is_refused(world):
    weights = world / "mtp" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-200])
    result = run("serve", *_parts(world), "--dry-run")
    assert result.exit_code == 2
    assert "drafter '" in result.output
    assert "can't be served beside" in result.output
    assert "truncated" in result.output


def test_a_drafter_of_another_target_is_refused(world):
    result = run("serve", "--target", "tiny-qwen3", "--drafter", world / "dfly", "--dry-run")
    assert result.exit_code == 2
    assert "it was trained for the target tiny-llama" in result.output


def test_a_port_in_use_is_refused(world):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run("serve", *_parts(world), "--port", taken.getsockname()[1])
    assert result.exit_code == 2
    assert "can't be listened on" in result.output


def test_a_wrong_version_of_sglang_is_refused(world, monkeypatch):
    monkeypatch.setattr("angelspec.serving.engine_package.version", lambda name: "0.5.10")
    result = run("serve", *_parts(world), "--port", 0)
    assert result.exit_code == 2
    assert "SGLang 0.5.10 is installed" in result.output


def _started(world, *arguments, behaviour=None):
    """The command in a process of its own, with everything it says from then on."""
    environment = {**os.environ, "FAKE_SGLANG": json.dumps(behaviour or {})}
    command = [sys.executable, "-m", "angelspec.cli.main", "serve", *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_serving_until_sigterm_leaves_nothing_behind(world):
    port = free_port("127.0.0.1")
    process = _started(world, *_parts(world), "--port", port, "--grace", 5, behaviour={"child": True})
    lines, children = [], []
    try:
        for line in process.stdout:
            lines.append(line)
            if "serving on" in line:
                break
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 2, "".join(lines)
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=30)
    finally:
        if process.poll() is None:  # the test has failed: leave nothing of it
            for member in (process, *children):
                member.kill()
    text = "".join(lines) + rest
    assert process.returncode == 0, text
    assert "dfly: accepted length 3" in text
    assert text.rstrip().endswith("stopped")
    end = time.monotonic() + 5
    while any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children):
        assert time.monotonic() < end, "left behind"
        time.sleep(0.05)
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_nothing_accepted_ends_with_a_code_of_its_own(world):
    process = _started(world, *_parts(world), "--port", 0, "--quiet", behaviour={"committed": {"dfly": 4}})
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 10, text
    assert "error: drafter 'mtp' is trained, but none of its proposals was accepted: accepted length 1.00" in text


# ------------------------------------------------------------------------------------------------- bundles


def test_a_bundle_is_written_shown_checked_and_served(world):
    file = world / "b" / "tiny.yaml"
    made = run("bundle", "create", *_parts(world), "--route", "code=dfly", "--name", "tiny", "--output", file)
    assert made.exit_code == 0, made.output
    bundle = load_bundle(file)
    assert [(d.name, d.family, d.mode) for d in bundle.drafters] == [
        ("mtp", "mtp", "no-think"), ("dfly", "block", "no-think"),
    ]  # fmt: skip
    assert "source: ../mtp" in file.read_text()
    assert bundle.target.source == "tiny-llama"
    shown = run("bundle", "show", file)
    assert "code, any mode: dfly" in shown.output
    assert json.loads(run("bundle", "show", file, "--json").output)["routes"][0]["route"] == "dfly"
    assert run("bundle", "check", file).exit_code == 0
    again = run("bundle", "create", *_parts(world), "--output", file)
    assert again.exit_code == 2 and "--overwrite" in again.output
    assert load_bundle(file).name == "tiny"
    planned = run("serve", "--bundle", file, "--dry-run")
    assert planned.exit_code == 0, planned.output
    assert "code, any mode: dfly" in planned.output


def test_a_bundle_that_cannot_be_served_is_named(world):
    file = world / "tiny.yaml"
    assert run("bundle", "create", *_parts(world), "--output", file).exit_code == 0
    good = file.read_text()
    file.write_text(good + "drafter: []\n")
    unknown = run("bundle", "check", file)
    assert unknown.exit_code == 1
    assert "drafter" in unknown.output
    served = run("serve", "--bundle", file, "--dry-run")
    assert served.exit_code == 2
    assert "drafter" in served.output
    file.write_text(good.replace("mode: no-think", "mode: high-think", 1))
    other = json.loads(run("bundle", "check", file, "--json").output)
    assert not other["ok"]
    assert "it was trained for no-think, not for high-think" in other["problems"][0]
    file.write_text(good.replace("./mtp", "./gone"))
    gone = run("bundle", "check", file)
    assert gone.exit_code == 1
    assert "does not exist" in gone.output


def test_acceptance_is_measured_with_the_reference_loop(world):
    file = world / "measured.json"
    prompts = world / "prompts.jsonl"
    rows = [{"id": str(i), "workload": w, "prompt": f"say {w}"} for i, w in enumerate(["code", "chat", "code"])]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = run(
        "bundle", "create", *_parts(world), "--measure", prompts, "--max-new-tokens", 12, "--output", file, "--quiet"
    )
    assert made.exit_code == 0, made.output
    bundle = load_bundle(file)
    measured = {(item.drafter, item.workload): item for item in bundle.acceptance}
    assert set(measured) == {("mtp", "code"), ("mtp", "chat"), ("dfly", "code"), ("dfly", "chat")}
    assert all(len(item.cumulative) == bundle.depths[item.drafter] for item in bundle.acceptance)
    assert measured["dfly", "code"].steps > 0


# -------------------------------------------------------------------------------------------------- bench


@pytest.fixture
def prompt_files(tmp_path):
    files = []
    for workload in ("code", "math"):
        file = tmp_path / f"{workload}.jsonl"
        rows = [{"id": str(i), "workload": workload, "prompt": f"{workload} {i}"} for i in range(4)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        files.append(file)
    return files


def test_a_load_test_writes_result_report_and_pictures(prompt_files, tmp_path):
    output = tmp_path / "bench"
    with FakeSGLang(behaviour=Behaviour(step_seconds=0.001)) as server:
        result = run(
            "bench", "serve", "--url", server.url, "--prompts", prompt_files[0], "--prompts", f"sums={prompt_files[1]}",
            "--concurrency", 2, "--route", "mtp", "--route", "dfly:off", "--requests", 2,
            "--repeats", 2, "--max-tokens", 8, "--mode", "no-think", "--minimum-seconds", 0.001, "--output", output,
            "--api-key", "s3cret",
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    saved = json.loads((output / "serve-bench.json").read_text())
    assert [item["name"] for item in saved["prompt_sets"]] == ["code", "sums", "mixed"]
    assert [choice["name"] for choice in saved["choices"]] == ["ar", "mtp", "dfly, cut off"]
    assert len(saved["windows"]) == 3 * 3 * 2
    report = (output / "serve-bench.md").read_text()
    for words in ("### Throughput: mixed", "| concurrency | ar | mtp | dfly, cut off |", "paired logarithms",
                  "SGLang 0.5.23", "×", "throughput.png"):  # fmt: skip
        assert words in report, words
    for picture in ("throughput.png", "speedup.png"):
        assert (output / picture).read_bytes().startswith(b"\x89PNG")
    assert "[18/18]" in result.output
    again = run("bench", "serve", "--url", "http://127.0.0.1:9", "--prompts", prompt_files[0], "--output", output)
    assert again.exit_code == 2
    assert "serve-bench.json exists" in again.output and "--overwrite" in again.output


def test_failed_requests_are_shown_and_end_with_a_code_of_their_own(prompt_files, tmp_path):
    with FakeSGLang(behaviour=Behaviour(step_seconds=0.002, break_after=1)) as server:
        result = run(
            "bench", "serve", "--url", server.url, "--prompts", prompt_files[0], "--concurrency", 1, "--requests", 3,
            "--repeats", 1, "--output", tmp_path / "bench", "--quiet",
        )  # fmt: skip
    assert result.exit_code == 12, result.output
    assert "requests failed" in result.output
    report = (tmp_path / "bench" / "serve-bench.md").read_text()
    assert "## Faults" in report
    assert "‡" in report


def test_a_load_test_that_is_stopped_keeps_what_it_measured(prompt_files, tmp_path, monkeypatch):
    window = bench._window
    calls = []

    async def stopped(*arguments, **named):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return await window(*arguments, **named)

    monkeypatch.setattr(bench, "_window", stopped)
    with FakeSGLang(behaviour=Behaviour(step_seconds=0.001)) as server:
        result = run(
            "bench", "serve", "--url", server.url, "--prompts", prompt_files[0], "--concurrency", 1, "--requests", 2,
            "--repeats", 2, "--max-tokens", 8, "--minimum-seconds", 0.001, "--output", tmp_path / "bench",
        )  # fmt: skip
    assert result.exit_code == 130, result.output
    saved = BenchResult.load(tmp_path / "bench" / "serve-bench.json")
    assert len(saved.windows) == 2
    assert "broken off after 2 of 4 windows" in (tmp_path / "bench" / "serve-bench.md").read_text()


def test_a_server_out_of_reach_is_said(prompt_files, tmp_path):
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    result = run("bench", "serve", "--url", url, "--prompts", prompt_files[0], "--output", tmp_path / "bench")
    assert result.exit_code == 11
    assert "is the server running" in result.output


def test_a_result_tells_its_command_without_keys_and_places():
    from angelspec.cli.bench_commands import told_command

    for given, told in (
        (["--api-key", "a", "--api-key=b", "--url", "c"], "--api-key ... --api-key=... --url c"),
        (["--url", "http://u:pw@h:1", "--control=http://u@h"], "--url http://h:1 --control=http://h"),
        (["--output", "/home/me/x", "--url", "c", "--quiet", "--output=/home/me/x", "--overwrite"], "--url c"),
    ):
        assert told_command(given) == f"angelspec {told}"


def test_a_bundle_learns_from_a_server(tmp_path):
    bundle = small_bundle()
    file = bundle.save(tmp_path / "bundle.yaml")
    with FakeSGLang(bundle) as server:
        server.calibrations = {"dfly": Calibration(slope=0.5, outcomes=40).model_dump()}
        result = run("bundle", "learn", file, "--url", server.url)
    assert result.exit_code == 0, result.output
    assert "dfly: learnt from 40 verified proposals" in result.output
    assert "mtp: nothing verified yet" in result.output
    learnt = load_bundle(file)
    assert learnt.calibrations == {"dfly": Calibration(slope=0.5, outcomes=40)}
    assert learnt.model_copy(update={"calibrations": {}}) == bundle


def test_a_server_with_a_key_is_asked_with_it(tmp_path, prompt_files, monkeypatch):
    file = small_bundle().save(tmp_path / "bundle.yaml")
    with FakeSGLang(behaviour=Behaviour(api_key="s3cret")) as server:
        asked = ("bundle", "learn", file, "--url", server.url)
        without = run(*asked)
        assert without.exit_code == 2
        assert "--api-key KEY, or ANGELSPEC_SERVER_KEY" in without.output
        assert run(*asked, "--api-key", "s3cret").exit_code == 0
        monkeypatch.setenv("ANGELSPEC_SERVER_KEY", "s3cret")
        assert run(*asked).exit_code == 0


@pytest.mark.parametrize("url", ["http://x:abc", "http://[::1", "127.0.0.1:30000", "http://h/?api_key=S"])
def test_what_is_no_address_is_named(tmp_path, url):
    result = run("bundle", "learn", small_bundle().save(tmp_path / "bundle.yaml"), "--url", url)
    assert result.exit_code == 2
    assert f"{url} is no address of a server" in result.output


def test_a_bundle_learns_from_no_other_server(tmp_path):
    file = small_bundle(drafters=("dfly",)).save(tmp_path / "bundle.yaml")
    before = file.read_text()
    with FakeSGLang() as server:
        result = run("bundle", "learn", file, "--url", server.url)
        assert result.exit_code == 2
        assert "the server has other drafters than the bundle: mtp (mtp, no-think, depth 3)" in result.output
        server.behaviour = Behaviour(extension=False)
        result = run("bundle", "learn", file, "--url", server.url)
        assert result.exit_code == 2
        assert "runs without angelspec's extension" in result.output
    assert file.read_text() == before


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("qwen3-8b", "hf:Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B", "hf:Qwen/Qwen3-8B"),
        ("modelscope:Qwen/Qwen3-8B", "modelscope:Qwen/Qwen3-8B"),
        ("models/mine", "folder:models/mine"),
        ("models/deeper/mine", "folder:models/deeper/mine"),
        ("./mine", "folder:./mine"),
        ("smollm2-135m-instruct", KNOWN_TARGETS["smollm2-135m-instruct"].source),
    ],
)
def test_a_target_is_named_as_other_launchers_name_it(text, source, tmp_path, monkeypatch):
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert target_source(text) == source


def test_the_address_of_the_api_is_told_from_the_servers(tmp_path):
    file = small_bundle().save(tmp_path / "bundle.yaml")
    with FakeSGLang() as server:
        result = run("bundle", "learn", file, "--url", f"{server.url}/v1")
    assert result.exit_code == 2
    assert f"{server.url}/v1/server_info: Not Found" in result.output and "without /v1" in result.output


@pytest.mark.parametrize(("key", "sent"), [("s3cret\r\n", True), ("s3cr\u00e9t", False)])
def test_a_key_that_cannot_be_sent_is_not_shown(tmp_path, key, sent):
    file = small_bundle().save(tmp_path / "bundle.yaml")
    with FakeSGLang(behaviour=Behaviour(api_key="s3cret")) as server:
        result = run("bundle", "learn", file, "--url", server.url, "--api-key", key)
    assert (result.exit_code == 0) == sent, result.output
    assert "s3cr" not in result.output
    assert sent or "the API key holds characters that no key can have" in result.output


@pytest.mark.parametrize(
    ("named", "words"),
    [(("DFly=", "mtp="), "can't be called 'DFly'"), (("a=", "a="), "two are called 'a'"), (("auto=", "b="), "'auto'")],
)
def test_a_drafter_has_a_name_that_routes_can_say(world, named, words):
    first, second = (f"{name}{world / place}" for name, place in zip(named, ("dfly", "mtp"), strict=True))
    result = run("serve", "--target", "tiny-llama", "--drafter", first, "--drafter", second, "--dry-run")
    assert result.exit_code == 2 and words in result.output, result.output


def test_a_drafter_named_by_its_file_is_known_by_its_content(world):
    found = [serving_parts.find_drafter(str(world / name / "model.safetensors")) for name in ("mtp", "dfly")]
    digests = {serving_parts.model_digest(one.folder, None) for one in found}
    assert len(digests) == 2


def test_what_a_bundle_says_does_not_depend_on_where_one_stands(world, monkeypatch):
    (world / "smollm2-dfly-nothink").mkdir()
    monkeypatch.chdir(world)
    assert serving_parts.find_drafter("smollm2-dfly-nothink").folder.resolve() == world / "smollm2-dfly-nothink"
    listed = serving_parts.find_drafter("smollm2-dfly-nothink", bare_paths=False)
    assert listed.folder == resource_folder("checkpoints") / "smollm2-dfly-nothink"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_named(world):
    (world / "dfly").chmod(0)
    result = run("checkpoint", "check", world / "dfly")
    (world / "dfly").chmod(0o755)
    assert result.exit_code == 2 and "Permission denied" in result.output


def test_a_full_disk_is_no_traceback(world, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device", "somewhere")

    monkeypatch.setattr(Bundle, "save", full)
    result = run("bundle", "create", *_parts(world), "--output", world / "b.yaml")
    assert result.exit_code == 2
    assert result.output.splitlines()[-1] == "error: somewhere: No space left on device"
