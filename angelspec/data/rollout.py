"""The frozen target answers the prompts: fixed shards, each written at once, finished ones never done again.

Prompts are ordered by length and cut into shards of a fixed size, so that the rows of a shard are alike and its batch
composition never depends on where a run was interrupted: a resumed rollout ends with the same bytes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch

from angelspec.core.acceptance import repeated_ngram_share
from angelspec.core.errors import DataError, MissingRequirement
from angelspec.core.files import read_json, write_json_atomic, write_text_atomic
from angelspec.core.fingerprint import fingerprint
from angelspec.core.modes import Mode
from angelspec.core.recipe import RolloutSection
from angelspec.data.answers import AnswerRecord, Prompt, read_answers
from angelspec.data.endpoint import ask_endpoint
from angelspec.data.generation import generate
from angelspec.data.rollout_worker import ShardJob, answer_in_processes
from angelspec.data.seeds import row_key
from angelspec.targets.target import Target

_PLAN, _INDEX, _TIMING = "plan.json", "index.json", "timing.json"
_WORTH_PROCESSES = 1e12
"""Floating-point operations below which starting processes costs more time than it saves."""
_PROCESS_BYTES = 10**9
"""What Python, torch and the activations of a step take in each process."""
_NOT_OF_THE_ANSWERS = {"keep_finish_reasons", "concurrency", "retries", "timeout_seconds", "endpoint_key_variable"}
"""Values that do not change what the target answers."""
_UNREAD = {
    "local": ("endpoint_url", "endpoint_model"),
    "endpoint": ("endpoint_url", "dtype", "batch_size", "max_repeated_share"),
}
"""Values that do not where this backend answers; where a server lies is nothing to its answers."""
Messages = Sequence[Mapping[str, Any]]


def what_answers_depend_on(section: RolloutSection) -> dict[str, Any]:
    """The section's values that change what the target answers, as plain data; None for what the backend ignores."""
    return {
        **section.model_dump(mode="json", exclude=_NOT_OF_THE_ANSWERS),
        **dict.fromkeys(_UNREAD[section.backend]),
    }


class RolloutProgress(Protocol):
    """What a rollout reports to."""

    def __call__(self, *, done_tokens: int, done_prompts: int, total_prompts: int) -> None:
        """Tokens generated in this process (not those of shards found finished), answers that exist, answers in all."""


def rollout_shards(
    target: Target,
    prompts: Sequence[Prompt],
    section: RolloutSection,
    *,
    mode: Mode,
    folder: Path,
    progress: RolloutProgress | None = None,
    conversations: Mapping[str, Messages] | None = None,
) -> list[Path]:
    """Answer all prompts into ``folder``, one JSONL file of ``AnswerRecord`` per shard, and return the files in order.

    ``index.json`` counts what they hold; ``timing.json`` says how fast this process was and is no part of the result.

    Args:
        target: the frozen model (its tokenizer and template alone, for the endpoint backend).
        prompts: rendered prompts with distinct ids.
        section: the recipe's rollout section.
        mode: thinking mode the prompts were rendered for; recorded, and sent to an endpoint.
        folder: belongs to this rollout alone.
        progress: see ``RolloutProgress``.
        conversations: messages by prompt id; the endpoint backend sends these.

    Raises:
        DataError: no prompts, ids that repeat, a prompt too long for the target, or a folder of another rollout.
    """
    ordered = _ordered(target, prompts, section)
    shards = [ordered[start : start + section.shard_size] for start in range(0, len(ordered), section.shard_size)]
    threads = _claim(folder, target=target, shards=shards, section=section, mode=mode)
    paths = [folder / f"shard-{number:05d}.jsonl" for number in range(len(shards))]
    todo = [number for number, path in enumerate(paths) if not path.exists()]
    total = len(ordered) * section.samples_per_prompt
    found = total - section.samples_per_prompt * sum(len(shards[number]) for number in todo)
    started = time.perf_counter()

    def report(tokens: int, answers: int) -> None:
        if progress is not None:
            progress(done_tokens=tokens, done_prompts=found + answers, total_prompts=total)

    report(0, 0)
    tokens_done = 0
    if section.backend == "endpoint":
        finished = _ask_endpoint(
            target, shards, todo, section, mode=mode, conversations=conversations, folder=folder, report=report
        )
    else:
        finished = _answer_locally(target, shards, todo, section, mode=mode, threads=threads, report=report)
    for number, records in finished:
        write_text_atomic(paths[number], "".join(record.to_json() + "\n" for record in records))
        tokens_done += sum(len(record.answer_tokens) for record in records)
    seconds = time.perf_counter() - started
    write_json_atomic(folder / _INDEX, _index(paths, target=target, mode=mode))
    if todo:
        timing = {"tokens": tokens_done, "seconds": seconds, "tokens_per_second": tokens_done / max(seconds, 1e-9)}
        write_json_atomic(folder / _TIMING, timing)
    return paths


def _ordered(target: Target, prompts: Sequence[Prompt], section: RolloutSection) -> list[Prompt]:
    if not prompts:
        raise DataError("no prompt is left to answer", mend="look at the counts of refused and decontaminated prompts")
    repeated = [name for name, count in Counter(prompt.id for prompt in prompts).items() if count > 1]
    if repeated:
        raise DataError(
            f"prompt ids repeat: {', '.join(sorted(repeated)[:3])}", mend="give every conversation its own id"
        )
    room = target.geometry.max_position_embeddings - section.max_new_tokens
    for prompt in prompts:
        if not prompt.tokens or len(prompt.tokens) > room:
            raise DataError(
                f"prompt {prompt.id} has {len(prompt.tokens)} tokens; 1 to {room} leave room for the answer",
                mend="lower data.max_prompt_tokens or rollout.max_new_tokens",
            )
    return sorted(prompts, key=lambda prompt: (-len(prompt.tokens), prompt.tokens, prompt.id))


def _claim(folder: Path, *, target: Target, shards: list[list[Prompt]], section: RolloutSection, mode: Mode) -> int:
    """Make sure that shards found here are of this very rollout; returns the threads of its processes.

    Threads may change the last bit of a product, so a resumed rollout keeps those that it began with.
    """
    settings = what_answers_depend_on(section)
    del settings["dtype"], settings["endpoint_url"]
    precision = None if section.backend == "endpoint" else str(target.dtype)
    content = [[prompt.id, prompt.workload, list(prompt.tokens)] for shard in shards for prompt in shard]
    plan = {
        "fingerprint": fingerprint([target.digest, precision, mode, settings, fingerprint(content)]),
        "num_shards": len(shards),
        "num_prompts": len(content),
        "mode": mode,
        "settings": settings,
        "threads": 1 if section.backend == "endpoint" else plan_processes(target, section, shards=shards)[1],
    }
    try:
        found = read_json(folder / _PLAN)
    except FileNotFoundError:
        write_json_atomic(folder / _PLAN, plan)
        return plan["threads"]
    if found.get("fingerprint") != plan["fingerprint"]:
        raise DataError(f"{folder} holds another rollout", mend="choose another folder, or delete this one")
    return int(found.get("threads", plan["threads"]))


def _answer_locally(
    target: Target,
    shards: Sequence[Sequence[Prompt]],
    todo: Sequence[int],
    section: RolloutSection,
    *,
    mode: Mode,
    threads: int,
    report: Callable[[int, int], None],
) -> Iterator[tuple[int, list[AnswerRecord]]]:
    """Answer shards, beside each other in processes where that is worth their start."""
    settings = {
        "max_new_tokens": section.max_new_tokens,
        "temperature": section.temperature,
        "top_p": section.top_p,
        "batch_size": section.batch_size,
        "seed": section.seed,
        "max_repeated_share": section.max_repeated_share,
    }
    asked = {number: [(prompt, sample) for prompt in shards[number] for sample in range(section.samples_per_prompt)]
             for number in todo}  # fmt: skip
    jobs = [
        ShardJob(
            number=number,
            prompts=[list(prompt.tokens) for prompt, _ in rows],
            row_keys=[row_key(prompt.id, sample) for prompt, sample in rows],
            settings=settings,
        )
        for number, rows in asked.items()
    ]

    def records(number: int, answers: Iterable[tuple[Sequence[int], str]]) -> list[AnswerRecord]:
        return [
            make_record(prompt, tokens, finish_reason=reason, mode=mode, sample=sample)
            for (prompt, sample), (tokens, reason) in zip(asked[number], answers, strict=True)
        ]

    workers, _ = plan_processes(target, section, shards=shards)
    work = 2.0 * target.geometry.num_parameters * sum(len(rows) for rows in asked.values()) * section.max_new_tokens
    if target.section is not None and workers > 1 and len(todo) > 1 and work >= _WORTH_PROCESSES:
        for number, answers in answer_in_processes(
            jobs,
            section=target.section.model_copy(update={"source": f"folder:{target.folder}"}),
            dtype=str(target.dtype).removeprefix("torch."),
            workers=min(workers, len(todo)),
            threads=threads,
            on_progress=report,
        ):
            yield number, records(number, answers)
        return
    tokens_before = answers_before = 0
    for job in jobs:

        def on_progress(tokens: int, answers: int, base: tuple[int, int] = (tokens_before, answers_before)) -> None:
            report(base[0] + tokens, base[1] + answers)

        with _threads(threads if target.device.type == "cpu" else None):
            answers = generate(target, job.prompts, row_keys=job.row_keys, on_progress=on_progress, **settings)
        tokens_before += sum(len(answer.tokens) for answer in answers)
        answers_before += len(answers)
        yield job.number, records(job.number, ((answer.tokens, answer.finish_reason) for answer in answers))


def plan_processes(target: Target, section: RolloutSection, *, shards: Sequence[Sequence[Prompt]]) -> tuple[int, int]:
    """Processes of a rollout and threads of each, from the machine and the whole rollout (not from what is left).

    A decoding step's products are too small to gain from threads, so every core gets a process as long as there are
    shards and memory for it. An accelerator is one process's.

    Raises:
        MissingRequirement: the accelerator's memory is too small for the batch.
    """
    geometry, size = target.geometry, target.embedding_VD.element_size()
    longest = max(len(prompt.tokens) for shard in shards for prompt in shard) + section.max_new_tokens
    row = longest * geometry.num_layers * 2 * geometry.num_kv_heads * geometry.head_dim * size
    cache = section.batch_size * row
    if target.device.type == "cuda":
        _require_room(cache, row=row, free=torch.cuda.mem_get_info(target.device)[0], section=section, longest=longest)
    if target.device.type != "cpu":
        return 1, 1
    weights = sum(parameter.numel() * parameter.element_size() for parameter in target.model.parameters())
    affordable = int(0.8 * psutil.virtual_memory().available // (weights + cache + _PROCESS_BYTES))
    cores = torch.get_num_threads()
    workers = max(1, min(cores, len(shards), affordable))
    return workers, max(1, cores // workers)


def _require_room(cache: int, *, row: int, free: int, section: RolloutSection, longest: int) -> None:
    """Stop before hours of work where the keys and values of the longest rows would not fit beside the target."""
    affordable = int(0.85 * free)
    if cache > affordable:
        raise MissingRequirement(
            f"rollout.batch_size {section.batch_size} with up to {longest} tokens a row takes {cache / 2**30:.0f} GiB "
            f"of keys and values; {free / 2**30:.0f} GiB of the accelerator's memory are free",
            mend=f"set rollout.batch_size to at most {affordable // row}, shorten rollout.max_new_tokens, or let a "
            "server answer (rollout.backend=endpoint)",
        )


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _ask_endpoint(
    target: Target,
    shards: Sequence[Sequence[Prompt]],
    todo: Sequence[int],
    section: RolloutSection,
    *,
    mode: Mode,
    conversations: Mapping[str, Messages] | None,
    folder: Path,
    report: Callable[[int, int], None],
) -> Iterator[tuple[int, list[AnswerRecord]]]:
    if conversations is None:
        raise DataError("the endpoint backend needs the conversations, not only their tokens")
    tokens_before = answers_before = 0
    for number in todo:
        answers = ask_endpoint(
            target,
            [(prompt.id, sample) for prompt in shards[number] for sample in range(section.samples_per_prompt)],
            section,
            mode=mode,
            conversations=conversations,
            folder=folder / "requests",
            on_progress=lambda tokens, count, base=(tokens_before, answers_before): report(
                base[0] + tokens, base[1] + count
            ),
        )
        rows = [(prompt, sample) for prompt in shards[number] for sample in range(section.samples_per_prompt)]
        records = [
            make_record(prompt, answer.tokens, finish_reason=answer.finish_reason, mode=mode, sample=sample)
            for (prompt, sample), answer in zip(rows, answers, strict=True)
        ]
        tokens_before += sum(len(record.answer_tokens) for record in records)
        answers_before += len(records)
        yield number, records


def make_record(prompt: Prompt, tokens: Iterable[int], *, finish_reason: str, mode: Mode, sample: int) -> AnswerRecord:
    """The record of one answer."""
    tokens = tuple(tokens)
    return AnswerRecord(
        id=prompt.id,
        workload=prompt.workload,
        prompt_tokens=tuple(prompt.tokens),
        answer_tokens=tokens,
        finish_reason=finish_reason,
        repeated_share=round(repeated_ngram_share(tokens), 6),
        mode=mode,
        sample=sample,
        group=prompt.group,
    )


def _index(paths: Sequence[Path], *, target: Target, mode: Mode) -> dict[str, Any]:
    reasons: Counter[str] = Counter()
    workloads: dict[str, Counter[str]] = {}
    answer_tokens = prompt_tokens = answers = 0
    for record in read_answers(paths):
        answers += 1
        reasons[record.finish_reason] += 1
        answer_tokens += len(record.answer_tokens)
        prompt_tokens += len(record.prompt_tokens)
        workloads.setdefault(record.workload, Counter()).update(
            {"answers": 1, "answer_tokens": len(record.answer_tokens), record.finish_reason: 1}
        )
    return {
        "target": target.name,
        "target_digest": target.digest,
        "mode": mode,
        "shards": [path.name for path in paths],
        "answers": answers,
        "answer_tokens": answer_tokens,
        "prompt_tokens": prompt_tokens,
        "finish_reasons": dict(sorted(reasons.items())),
        "workloads": {name: dict(sorted(counts.items())) for name, counts in sorted(workloads.items())},
    }
