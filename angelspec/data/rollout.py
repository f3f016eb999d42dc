"""The frozen target answers the prompts: fixed shards, each written at once, finished ones never done again.

Prompts are ordered by length and cut into shards of a fixed size, so that the rows of a shard are alike and its batch
composition never depends on where a run was interrupted: a resumed rollout ends with the same bytes.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from angelspec.core.acceptance import repeated_ngram_share
from angelspec.core.errors import DataError
from angelspec.core.files import read_json, write_json_atomic, write_text_atomic
from angelspec.core.fingerprint import fingerprint
from angelspec.core.modes import Mode
from angelspec.core.recipe import RolloutSection
from angelspec.data.answers import AnswerRecord, Prompt, read_answers
from angelspec.data.generation import generate
from angelspec.targets.target import Target

_PLAN, _INDEX, _TIMING = "plan.json", "index.json", "timing.json"
Messages = Sequence[Mapping[str, Any]]


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
    _claim(folder, target=target, shards=shards, section=section, mode=mode)
    paths = [folder / f"shard-{number:05d}.jsonl" for number in range(len(shards))]
    total = len(ordered) * section.samples_per_prompt
    done_before = tokens_before = 0
    started = time.perf_counter()
    todo = [number for number, path in enumerate(paths) if not path.exists()]
    done_before = sum(len(shards[number]) for number in range(len(shards)) if number not in set(todo))
    done_before *= section.samples_per_prompt

    def report(tokens: int, answers: int) -> None:
        if progress is not None:
            progress(done_tokens=tokens_before + tokens, done_prompts=done_before + answers, total_prompts=total)

    report(0, 0)
    for number in todo:
        if section.backend == "endpoint":
            from angelspec.data.endpoint import answer_shard

            if conversations is None:
                raise DataError("the endpoint backend needs the conversations, not only their tokens")
            records = answer_shard(
                target, shards[number], section, mode=mode, conversations=conversations, folder=folder / "requests",
                report=report,
            )  # fmt: skip
        else:
            records = _answer_shard(target, shards[number], section, mode=mode, report=report)
        write_text_atomic(paths[number], "".join(record.to_json() + "\n" for record in records))
        tokens_before += sum(len(record.answer_tokens) for record in records)
        done_before += len(records)
        report(0, 0)
    seconds = time.perf_counter() - started
    write_json_atomic(folder / _INDEX, _index(paths, target=target, mode=mode))
    if todo:
        timing = {"tokens": tokens_before, "seconds": seconds, "tokens_per_second": tokens_before / max(seconds, 1e-9)}
        write_json_atomic(folder / _TIMING, timing)
    return paths


def row_key(prompt_id: str, sample: int) -> int:
    """The name of an answer's random stream: 62 bits of a hash."""
    return int.from_bytes(hashlib.sha256(f"{sample}/{prompt_id}".encode()).digest()[:8], "big") >> 2


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


def _claim(folder: Path, *, target: Target, shards: list[list[Prompt]], section: RolloutSection, mode: Mode) -> None:
    """Make sure that shards found here are of this very rollout."""
    settings = section.model_dump(
        mode="json",
        include={"backend", "temperature", "top_p", "samples_per_prompt", "max_new_tokens", "batch_size", "shard_size",
                 "seed", "endpoint_model"},
    )  # fmt: skip
    content = [[prompt.id, prompt.workload, list(prompt.tokens)] for shard in shards for prompt in shard]
    plan = {
        "fingerprint": fingerprint([target.digest, str(target.dtype), mode, settings, fingerprint(content)]),
        "num_shards": len(shards),
        "num_prompts": len(content),
        "mode": mode,
        "settings": settings,
    }
    try:
        found = read_json(folder / _PLAN)
    except FileNotFoundError:
        write_json_atomic(folder / _PLAN, plan)
        return
    if found.get("fingerprint") != plan["fingerprint"]:
        raise DataError(f"{folder} holds another rollout", mend="choose another folder, or delete this one")


def _answer_shard(
    target: Target,
    prompts: Sequence[Prompt],
    section: RolloutSection,
    *,
    mode: Mode,
    report: Callable[[int, int], None],
) -> list[AnswerRecord]:
    asked = [(prompt, sample) for prompt in prompts for sample in range(section.samples_per_prompt)]
    answers = generate(
        target,
        [prompt.tokens for prompt, _ in asked],
        max_new_tokens=section.max_new_tokens,
        temperature=section.temperature,
        top_p=section.top_p,
        batch_size=section.batch_size,
        seed=section.seed,
        row_keys=[row_key(prompt.id, sample) for prompt, sample in asked],
        on_progress=report,
    )
    return [
        make_record(prompt, answer.tokens, finish_reason=answer.finish_reason, mode=mode, sample=sample)
        for (prompt, sample), answer in zip(asked, answers, strict=True)
    ]


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
