"""Rollout shards: the same bytes however often a run is interrupted and however many processes take part."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from target_builders import tiny_cache, tiny_target, user

from angelspec.core.errors import AngelspecError, DataError, MissingRequirement
from angelspec.core.recipe import RolloutSection
from angelspec.data import rollout
from angelspec.data.answers import Prompt, read_answers
from angelspec.data.generation import generate
from angelspec.data.rollout import plan_processes, rollout_shards, what_answers_depend_on
from angelspec.data.rollout_worker import ShardJob, answer_in_processes

SECTION = RolloutSection(max_new_tokens=24, batch_size=4, shard_size=5)


def asked(target, count=12):
    texts = ["x" * (7 * index % 31) + f" {index}" for index in range(count)]
    kinds = ("chat", "code", "math")
    return [
        Prompt(
            id=f"p{index}",
            workload=kinds[index % 3],
            tokens=tuple(target.render(user(text), mode="no-think", add_generation_prompt=True)),
        )
        for index, text in enumerate(texts)
    ]


def run(target, folder, section=SECTION, **options):
    return rollout_shards(target, asked(target), section, mode="no-think", folder=folder, **options)


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "timing.json"}


def test_answers_and_index(tmp_path):
    target = tiny_target("llama")
    paths = run(target, tmp_path)
    assert [path.name for path in paths] == ["shard-00000.jsonl", "shard-00001.jsonl", "shard-00002.jsonl"]
    records = list(read_answers(paths))
    prompts = {prompt.id: prompt for prompt in asked(target)}
    assert sorted(record.id for record in records) == sorted(prompts)
    lengths = [len(record.prompt_tokens) for record in records]
    assert lengths == sorted(lengths, reverse=True)
    for record in records:
        prompt = prompts[record.id]
        assert (record.prompt_tokens, record.workload, record.group) == (prompt.tokens, prompt.workload, prompt.group)
        answer = generate(target, [prompt.tokens], max_new_tokens=24)[0]
        assert (record.answer_tokens, record.finish_reason) == (answer.tokens, answer.finish_reason)
        assert record.mode == "no-think"
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["answers"] == 12
    assert index["answer_tokens"] == sum(len(record.answer_tokens) for record in records)
    assert index["finish_reasons"] == dict(Counter(record.finish_reason for record in records))
    assert set(index["finish_reasons"]) == {"stop", "length"}
    assert {name: counts["answers"] for name, counts in index["workloads"].items()} == {"chat": 4, "code": 4, "math": 4}
    assert json.loads((tmp_path / "timing.json").read_text())["tokens"] == index["answer_tokens"]


def test_resumed_runs_end_with_the_same_bytes(tmp_path):
    target = tiny_target("llama")
    section = SECTION.model_copy(update={"temperature": 1.0, "samples_per_prompt": 2, "seed": 3})
    whole = tmp_path / "whole"
    run(target, whole, section)
    before = contents(whole)

    class Interrupted(Exception):
        pass

    def interrupt(*, done_tokens, done_prompts, total_prompts):
        assert total_prompts == 24
        if done_prompts > 12:  # inside the second shard
            raise Interrupted

    parts = tmp_path / "parts"
    with pytest.raises(Interrupted):
        run(target, parts, section, progress=interrupt)
    assert sorted(path.name for path in parts.iterdir()) == ["plan.json", "shard-00000.jsonl"]
    stamp = (parts / "shard-00000.jsonl").stat().st_mtime_ns
    seen = []
    run(target, parts, section, progress=lambda **done: seen.append(done["done_prompts"]))
    assert seen[0] == 10
    assert seen[-1] == 24
    assert (parts / "shard-00000.jsonl").stat().st_mtime_ns == stamp
    assert contents(parts) == before
    samples = {}
    for record in read_answers([parts / "shard-00001.jsonl"]):
        samples.setdefault(record.id, []).append((record.sample, record.answer_tokens))
    assert all([sample for sample, _ in rows] == [0, 1] for rows in samples.values())
    assert any(rows[0][1] != rows[1][1] for rows in samples.values())


def test_order_of_prompts_does_not_matter(tmp_path):
    target = tiny_target("llama")
    run(target, tmp_path / "a")
    rollout_shards(target, asked(target)[::-1], SECTION, mode="no-think", folder=tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_processes_give_the_same_bytes(tmp_path, monkeypatch):
    target = tiny_target("llama")
    monkeypatch.setenv("ANGELSPEC_CACHE", str(tiny_cache()))
    monkeypatch.setattr(rollout, "_WORTH_PROCESSES", 0)
    monkeypatch.setattr(rollout.torch, "get_num_threads", lambda: 2)
    seen = []
    run(target, tmp_path / "beside", progress=lambda **done: seen.append((done["done_tokens"], done["done_prompts"])))
    assert seen[-1][1] == 12
    monkeypatch.setattr(rollout, "_WORTH_PROCESSES", 1e30)
    run(target, tmp_path / "alone")
    assert contents(tmp_path / "beside") == contents(tmp_path / "alone")
    tokens = json.loads((tmp_path / "alone" / "index.json").read_text())["answer_tokens"]
    assert seen[-1][0] == tokens


def test_what_a_process_raises_arrives(tmp_path):
    target = tiny_target("llama")
    section = target.section.model_copy(update={"source": f"folder:{tmp_path / 'none'}"})
    job = ShardJob(number=0, prompts=[[65]], row_keys=[0], settings={"max_new_tokens": 2})
    with pytest.raises(AngelspecError, match="does not exist") as caught:
        list(answer_in_processes([job], section=section, dtype="float32", workers=1, threads=1, on_progress=print))
    assert "target.source" in caught.value.mend


def test_processes_follow_cores_shards_and_memory(monkeypatch):
    target = tiny_target("llama")
    shards = [asked(target)[start : start + 3] for start in range(0, 12, 3)]
    memory = type("Memory", (), {"available": 100 * 2**30})
    monkeypatch.setattr(rollout.psutil, "virtual_memory", lambda: memory)
    for cores, few, expected in ((2, 4, (2, 1)), (16, 4, (4, 4)), (1, 4, (1, 1)), (8, 1, (1, 8))):
        monkeypatch.setattr(rollout.torch, "get_num_threads", lambda cores=cores: cores)
        assert plan_processes(target, SECTION, shards=shards[:few]) == expected
    memory.available = 3 * 2**30
    monkeypatch.setattr(rollout.torch, "get_num_threads", lambda: 16)
    assert plan_processes(target, SECTION, shards=shards) == (2, 8)


def test_a_batch_that_an_accelerator_can_not_hold_is_refused_before_it_runs(monkeypatch):
    real = tiny_target("llama")
    target = SimpleNamespace(
        device=torch.device("cuda"), geometry=real.geometry, embedding_VD=real.embedding_VD, model=real.model
    )
    shards = [asked(real)[:3]]
    geometry = real.geometry
    longest = max(len(prompt.tokens) for prompt in shards[0]) + SECTION.max_new_tokens
    row = longest * 2 * geometry.num_layers * geometry.num_kv_heads * geometry.head_dim * 4
    free = {"bytes": int(row * SECTION.batch_size / 0.85) + 100}
    monkeypatch.setattr(rollout.torch.cuda, "mem_get_info", lambda device: (free["bytes"], 0))
    assert plan_processes(target, SECTION, shards=shards) == (1, 1)
    free["bytes"] = int(2.5 * row / 0.85)
    with pytest.raises(MissingRequirement, match="keys and values") as caught:
        plan_processes(target, SECTION, shards=shards)
    assert "rollout.batch_size to at most 2," in caught.value.mend


def test_threads_are_given_back(tmp_path):
    target = tiny_target("llama")
    before = torch.get_num_threads()
    run(target, tmp_path)
    assert torch.get_num_threads() == before


def test_a_resumed_rollout_keeps_its_threads(tmp_path, monkeypatch):
    """Less memory is free by now, so fewer processes would take more threads each."""
    target, used = tiny_target("llama"), []
    inner = rollout.generate
    monkeypatch.setattr(rollout, "generate", lambda *a, **k: used.append(torch.get_num_threads()) or inner(*a, **k))
    monkeypatch.setattr(rollout, "plan_processes", lambda *a, **k: (2, 1))
    run(target, tmp_path)
    (tmp_path / "shard-00001.jsonl").unlink()
    monkeypatch.setattr(rollout, "plan_processes", lambda *a, **k: (1, 2))
    run(target, tmp_path)
    assert set(used) == {1}
    run(target, tmp_path / "other")
    assert set(used) == {1, 2}


def test_a_folder_holds_one_rollout(tmp_path):
    target = tiny_target("llama")
    run(target, tmp_path)
    for change in ({"max_new_tokens": 25}, {"batch_size": 5}, {"seed": 1}, {"max_repeated_share": 0.5}):
        with pytest.raises(DataError, match="holds another rollout"):
            run(target, tmp_path, SECTION.model_copy(update=change))
    with pytest.raises(DataError, match="holds another rollout"):
        rollout_shards(target, asked(target)[1:], SECTION, mode="no-think", folder=tmp_path)
    with pytest.raises(DataError, match="holds another rollout"):
        run(tiny_target("qwen3"), tmp_path)
    run(target, tmp_path, SECTION.model_copy(update={"concurrency": 3, "keep_finish_reasons": ("length",)}))


def test_answers_depend_on_what_their_backend_reads():
    server = RolloutSection(backend="endpoint", endpoint_url="http://a/v1")
    for section, ignored, read in (
        (SECTION, {"endpoint_url": "http://b/v1", "endpoint_model": "m", "retries": 1}, {"batch_size": 5}),
        (server, {"endpoint_url": "http://b/v1", "batch_size": 5, "dtype": "float32"}, {"endpoint_model": "m"}),
    ):
        known = what_answers_depend_on(section)
        for key, value in ignored.items():
            assert what_answers_depend_on(section.model_copy(update={key: value})) == known
        assert what_answers_depend_on(section.model_copy(update=read)) != known


def test_refusals(tmp_path):
    target = tiny_target("llama")
    one = asked(target)[0]
    too_long = Prompt(id="long", workload="chat", tokens=(65,) * 1001)
    for prompts, said in (([], "no prompt"), ([one, one], "ids repeat: p0"), ([one, too_long], "prompt long has 1001")):
        with pytest.raises(DataError, match=said):
            rollout_shards(target, prompts, SECTION, mode="no-think", folder=tmp_path)
    assert not list(tmp_path.iterdir())
