"""Stages that make training rows: target, prompts, decontaminate, rollout, pack."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from angelspec.core.errors import DataError
from angelspec.core.files import expanded, write_json_atomic
from angelspec.core.fingerprint import file_sha256, fingerprint
from angelspec.core.recipe import DataSection, Recipe
from angelspec.core.recipe_resolution import default_mode_family
from angelspec.data.answers import AnswerRecord, read_answers, select_answers
from angelspec.data.chat import chat_format, prompt_rows, rows_of_given
from angelspec.data.conversation_files import read_conversations, write_conversations
from angelspec.data.dataset import load_rows, pack
from angelspec.data.decontaminate import decontaminate
from angelspec.data.fitting import fit_rows
from angelspec.data.quarantine import require_usable, write_quarantine
from angelspec.data.reading import read_sources
from angelspec.data.reasons import count_reasons, listed, table_below
from angelspec.data.rollout import rollout_shards, what_answers_depend_on
from angelspec.data.rounds import Round, first_round, next_round, visible_answer
from angelspec.data.sources import locate
from angelspec.data.split import split_held_out
from angelspec.data.tokenised import row_from_answer
from angelspec.pipeline.estimates import amounts
from angelspec.pipeline.measuring import suites_of
from angelspec.pipeline.stage import Estimate, Stage, StageOutput, Work
from angelspec.targets.sources import content_of_folder
from angelspec.targets.target import Target, verify_target

_FOR_A_SERVER = 200_000_000
"""Answer tokens from which a plan advises a server."""


def rendering_inputs(recipe: Recipe) -> Mapping[str, Any]:
    """What the recipe says of how prompts are rendered: the mode, and how the chat template switches it.

    The target's digest holds the template, not the switch. A family that is the target's own is left out, so that
    nobody's finished stages lose their names.
    """
    family = recipe.target.mode_family
    return {
        "mode": recipe.mode,
        **({} if family == default_mode_family(recipe.target) else {"mode_family": family}),
    }


# ------------------------------------------------------------------------------------------------ target


def _target_inputs(recipe: Recipe) -> Mapping[str, Any]:
    template = recipe.target.chat_template
    return {
        "target": recipe.target.model_dump(mode="json", exclude={"name", "trust_remote_code"}),
        "layer_ids": list(recipe.drafter_config().target_layer_ids),
        "chat_template": None if template is None else file_sha256(expanded(template)),
        **({} if (content := content_of_folder(recipe.target.source)) is None else {"content": content}),
    }


def _run_target(work: Work) -> StageOutput:
    target = work.session.target(work.recipe.target.dtype)
    verify_target(target, layer_ids=work.recipe.drafter_config().target_layer_ids)
    summary = {
        "name": target.name,
        "source": work.recipe.target.source,
        "revision": target.revision,
        "folder": str(target.folder),
        "digest": target.digest,
        "checked": "taps, last hidden state, head and cache equal a plain transformers forward on one row",
    }
    return StageOutput(target.digest, summary)


TARGET = Stage(
    name="target",
    does="fetch the target once and compare its captured states with a plain forward",
    needs=(),
    inputs=_target_inputs,
    run=_run_target,
    estimate=lambda recipe: Estimate(
        does=f"fetch {recipe.target.source} into the cache and verify "
        + (f"taps {taps}" if (taps := list(recipe.drafter_config().target_layer_ids)) else "its last hidden state"),
        disk_bytes=amounts(recipe).target_bytes,
        memory_bytes=amounts(recipe).target_bytes,
    ),
)


# ----------------------------------------------------------------------------------------------- prompts


def _prompts_inputs(data: DataSection) -> Mapping[str, Any]:
    return {
        "data": data.model_dump(
            mode="json",
            include={"responses", "role_map", "max_bad_fraction", "max_line_bytes", "seed"},
        ),
        **{
            part: [
                {**source.model_dump(mode="json", exclude={"source", "revision"}), "content": locate(source).inputs()}
                for source in getattr(data, part)
            ]
            for part in ("train", "evaluation")
        },
    }


def _run_prompts(work: Work, data: DataSection) -> StageOutput:
    summary: dict[str, Any] = {}
    for part, sources, responses in (
        ("train", data.train, data.responses),
        ("evaluation", data.evaluation, "rollout"),
    ):
        quarantine = work.folder / f"{part}-quarantine.jsonl"
        read = read_sources(sources, data, responses=responses, quarantine=quarantine)
        write_conversations(work.folder / f"{part}.jsonl", read.accepted)
        summary[part] = {
            "accepted": len(read.accepted),
            "refused": read.counts,
            "noted": read.remarks,
            "not_drawn": read.not_drawn,
            "ignored_keys": dict(sorted(read.ignored_keys.items())),
        }
        _say_refused(work, part, len(read.accepted), read.counts, quarantine)
    digest = fingerprint([file_sha256(work.folder / f"{part}.jsonl") for part in ("train", "evaluation")])
    return StageOutput(digest, summary)


def _say_refused(work: Work, what: str, kept: int, counts: Mapping[str, int], where: Path) -> None:
    refused = f"; refused: {listed(counts)} (see {where})" if counts else ""
    work.progress.say(f"  {what}: {kept} conversations{refused}")


def prompts_stage(data: DataSection) -> Stage:
    """Read the sources of a data section."""
    return Stage(
        name="prompts",
        does="read and check the prompts, row by row",
        needs=(),
        inputs=lambda recipe: _prompts_inputs(data),
        run=lambda work: _run_prompts(work, data),
        estimate=lambda recipe: Estimate(
            does="read " + ", ".join(source.name for source in (*data.train, *data.evaluation)),
            note="" if amounts(recipe).prompts is None else f"{amounts(recipe).prompts:,} training prompts",
        ),
    )


# ----------------------------------------------------------------------------------------- decontaminate


def _run_decontaminate(work: Work) -> StageOutput:
    target = work.target(work.recipe.target.dtype)
    prompts = work.before["prompts"].folder
    train, evaluation = (read_conversations(prompts / f"{part}.jsonl") for part in ("train", "evaluation"))
    suites_of(  # now, not when all training is done: too many that can't be asked stop the run
        evaluation,
        target,
        work.recipe,
        names=[source.name for source in work.recipe.data.evaluation],
        limit=None,
        quarantine=work.folder / "evaluation-quarantine.jsonl",
        say=work.progress.say,
    )
    with work.progress.meter("decontaminate", total=len(train), unit="rows") as meter:
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            meter(done)

        result = decontaminate(
            train,
            evaluation,
            tokenise=lambda texts: target.tokenizer(texts, add_special_tokens=False)["input_ids"],
            n=work.recipe.data.decontaminate_tokens,
            on_rows=advance,
        )
    if not result.kept:
        raise DataError("every training prompt shares text with an evaluation example", mend="use other prompts")
    write_conversations(work.folder / "train.jsonl", result.kept)
    write_quarantine(work.folder / "dropped.jsonl", [overlap.rejection() for overlap in result.dropped])
    work.progress.say(f"  {len(result.kept)} conversations kept, {len(result.dropped)} dropped")
    summary = {"kept": len(result.kept), "dropped": len(result.dropped), "hits": result.counts}
    return StageOutput(fingerprint(file_sha256(work.folder / "train.jsonl")), summary)


DECONTAMINATE = Stage(
    name="decontaminate",
    does="drop training prompts that share text with an evaluation example",
    needs=("target", "prompts"),
    inputs=lambda recipe: {"tokens": recipe.data.decontaminate_tokens},
    run=_run_decontaminate,
    estimate=lambda recipe: Estimate(
        does=f"drop prompts that share {recipe.data.decontaminate_tokens} contiguous tokens with an evaluation example"
    ),
)


# ----------------------------------------------------------------------------------------------- rollout


def _rollout_inputs(recipe: Recipe) -> Mapping[str, Any]:
    return {
        "rollout": what_answers_depend_on(recipe.rollout),
        **rendering_inputs(recipe),
        "max_prompt_tokens": recipe.data.max_prompt_tokens,
    }


def _run_rollout(work: Work) -> StageOutput:
    section, mode = work.recipe.rollout, work.recipe.mode
    target = work.target(section.dtype)
    chat = chat_format(target, mode=mode)
    rounds: list[Round] = first_round(read_conversations(work.before["decontaminate"].folder / "train.jsonl"))
    paths: list[Path] = []
    refused: dict[str, int] = {}
    while rounds:
        number = rounds[0].number
        rendered = prompt_rows(
            [item.conversation for item in rounds],
            chat,
            max_prompt_tokens=work.recipe.longest_prompt(section.max_new_tokens),
        )
        write_quarantine(work.folder / f"round-{number}-quarantine.jsonl", rendered.rejected)
        require_usable(
            accepted=len(rendered.prompts) or int(number > 1),
            rejected=rendered.rejected,
            max_bad_fraction=work.recipe.data.max_bad_fraction if number == 1 else 1.0,
            what=f"prompts of round {number}",
        )
        for item in rendered.rejected:
            refused[str(item.reason)] = refused.get(str(item.reason), 0) + 1
        if not rendered.prompts:
            break
        asked = {prompt.id for prompt in rendered.prompts}
        messages = {
            item.conversation.id: [message.to_template() for message in item.conversation.messages]
            for item in rounds
            if item.conversation.id in asked
        }
        total = len(rendered.prompts) * section.samples_per_prompt
        with work.progress.meter(f"rollout, turn {number}", total=total, unit="answers") as meter:

            def report(*, done_tokens: int, done_prompts: int, total_prompts: int, meter=meter) -> None:
                meter(done_prompts, total=total_prompts, note=f"{done_tokens:,} tokens")

            shards = rollout_shards(
                target, rendered.prompts, section, mode=mode, folder=work.folder / f"round-{number}",
                progress=report, conversations=messages,
            )  # fmt: skip
        paths += shards
        answers = {record.id: _shown(record, target, mode) for record in read_answers(shards) if record.sample == 0}
        rounds = next_round([item for item in rounds if item.conversation.id in asked], answers)
    records = list(read_answers(paths))
    reasons: dict[str, int] = {}
    for record in records:
        reasons[record.finish_reason] = reasons.get(record.finish_reason, 0) + 1
    summary = {
        "shards": [str(path.relative_to(work.folder)) for path in paths],
        "answers": len(records),
        "answer_tokens": sum(len(record.answer_tokens) for record in records),
        "finish_reasons": reasons,
        "refused": refused,
    }
    ended = listed(dict(sorted(reasons.items())))
    work.progress.say(f"  {len(records)} answers, {summary['answer_tokens']:,} tokens; ended by: {ended}")
    return StageOutput(fingerprint([file_sha256(path) for path in paths]), summary)


def _shown(record: AnswerRecord, target: Target, mode: str) -> str | None:
    if record.finish_reason != "stop":
        return None
    text = target.tokenizer.decode(record.answer_tokens[:-1], skip_special_tokens=True)
    return visible_answer(text, family=target.mode_family, mode=mode)


def _rollout_note(recipe: Recipe) -> str:
    """For rollouts that a server should do: the readable loop of this project is no inference engine."""
    tokens = amounts(recipe).answer_tokens
    if recipe.rollout.backend != "local" or tokens is None or tokens < _FOR_A_SERVER:
        return ""
    return (
        f"at 1,000 tokens/s {tokens / 1000 / 86400:.0f} days: serve the target (plain SGLang) and set "
        "rollout.backend=endpoint, rollout.endpoint_url"
    )


ROLLOUT = Stage(
    name="rollout",
    does="let the frozen target answer the prompts",
    needs=("target", "decontaminate"),
    inputs=_rollout_inputs,
    run=_run_rollout,
    estimate=lambda recipe: Estimate(
        does=f"answer {amounts(recipe).prompts or 'all'} prompts in mode {recipe.mode}, up to "
        f"{recipe.rollout.max_new_tokens} tokens each, at temperature {recipe.rollout.temperature:g}",
        tokens=amounts(recipe).answer_tokens,
        disk_bytes=None if amounts(recipe).answer_tokens is None else amounts(recipe).answer_tokens * 8,
        memory_bytes=amounts(recipe).target_bytes,
        note=_rollout_note(recipe),
    ),
)


# -------------------------------------------------------------------------------------------------- pack


def _pack_inputs(recipe: Recipe) -> Mapping[str, Any]:
    return {
        "pack": recipe.pack.model_dump(mode="json"),
        "keep": recipe.rollout.model_dump(mode="json", include={"keep_finish_reasons", "max_repeated_share"}),
        "held_out_fraction": recipe.data.held_out_fraction,
        "seed": recipe.data.seed,
        "responses": recipe.data.responses,
        **rendering_inputs(recipe),
        "max_prompt_tokens": recipe.data.max_prompt_tokens,
        "block_size": recipe.verify_width,
        "mask_token_id": _mask_token(recipe),
    }


def _mask_token(recipe: Recipe) -> int | None:
    """The token that no document may hold; None where the drafter masks nothing."""
    return getattr(recipe.drafter_config(), "mask_token_id", None)


def _run_pack(work: Work) -> StageOutput:
    recipe = work.recipe
    dropped: dict[str, int] = {}
    summary: dict[str, Any] = {"dropped": dropped}
    if recipe.data.responses == "given":
        target = work.target(recipe.target.dtype)
        given = rows_of_given(
            read_conversations(work.before["decontaminate"].folder / "train.jsonl"),
            chat_format(target, mode=recipe.mode),
            max_prompt_tokens=recipe.data.max_prompt_tokens,
        )
        write_quarantine(work.folder / "quarantine.jsonl", given.rejected)
        require_usable(
            accepted=len(given.rows),
            rejected=given.rejected,
            max_bad_fraction=recipe.data.max_bad_fraction,
            what="given answers",
            quarantine=work.folder / "quarantine.jsonl",
        )
        rows = given.rows
        dropped.update(count_reasons(item.reason for item in given.rejected))
        summary["noted"] = count_reasons(note.remark for note in given.notes)
        if summary["noted"]:
            work.progress.say(f"  given answers: {listed(summary['noted'])}")
    else:
        rollout = work.before["rollout"]
        shards = [rollout.folder / name for name in rollout.output.summary["shards"]]
        selected = select_answers(
            read_answers(shards),
            keep_finish_reasons=recipe.rollout.keep_finish_reasons,
            max_repeated_share=recipe.rollout.max_repeated_share,
        )
        if not selected.kept:
            raise DataError(
                f"no answer of the rollout is kept{table_below(selected.counts)}",
                mend="raise rollout.max_new_tokens, or let rollout.keep_finish_reasons or rollout.max_repeated_share "
                "keep more",
            )
        dropped.update(selected.counts)
        rows = [row_from_answer(record) for record in selected.kept]
    fitted = fit_rows(rows, max_document_tokens=recipe.pack.max_document_tokens, block_size=recipe.verify_width)
    for reason, count in fitted.counts.items():
        dropped[str(reason)] = dropped.get(str(reason), 0) + count
    split = split_held_out(fitted.kept, fraction=recipe.data.held_out_fraction, seed=recipe.data.seed)
    summary["cut"] = fitted.num_cut
    digests = []
    for name, part in (("train", split.train), ("held-out", split.held_out)):
        packed = pack(part, row_length=recipe.pack.row_length, pad_id=0)
        packed.require_tokens(vocab_size=recipe.target.geometry.vocab_size, mask_token_id=_mask_token(recipe))
        packed.save(work.folder / name)
        summary[name] = packed.summary()
        digests.append(packed.digest)
        facts = summary[name]
        work.progress.say(
            f"  {name}: {facts['documents']} documents in {facts['rows']} rows, {facts['supervised_tokens']:,} "
            f"supervised tokens ({facts['supervised_share']:.0%} of {facts['tokens']:,})"
        )
    if dropped:
        work.progress.say(f"  left out: {listed(dict(sorted(dropped.items())))}")
    write_json_atomic(work.folder / "summary.json", summary)
    return StageOutput(fingerprint(digests), summary)


PACK = Stage(
    name="pack",
    does="choose answers, hold some out, and pack them into rows",
    needs=("target", "rollout"),
    inputs=_pack_inputs,
    run=_run_pack,
    estimate=lambda recipe: Estimate(
        does=f"pack first-fit into rows of {recipe.pack.row_length} tokens; "
        f"{recipe.data.held_out_fraction:.1%} of the conversations held out",
        tokens=amounts(recipe).row_tokens,
        disk_bytes=None if amounts(recipe).row_tokens is None else amounts(recipe).row_tokens * 13,
    ),
)


def packed_rows(work: Work) -> dict[str, Any]:
    """The packed rows of a run, ``train`` and ``held-out``."""
    folder = work.before["pack"].folder
    return {name: load_rows(folder / name) for name in ("train", "held-out")}
