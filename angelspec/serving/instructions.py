"""The exact commands that serve an exported drafter, by engine."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from angelspec.core.drafter_config import BlockDrafterConfig, DrafterConfig, MtpDrafterConfig
from angelspec.core.modes import Mode, mode_family
from angelspec.core.repositories import is_repository_name

_SGLANG_ALGORITHMS = {"dflash": "DFLASH", "dspark": "DSPARK"}
"""Block drafters that SGLang serves by itself, under their names there."""
_VLLM = "vllm serve {target} --speculative-config {settings}"


@dataclass(frozen=True)
class ServeInstruction:
    """One way to serve a drafter."""

    engine: str
    command: str
    note: str


def serve_instructions(
    config: DrafterConfig, *, checkpoint: Path | str, target: str, mode: Mode, family: str
) -> list[ServeInstruction]:
    """Commands that serve ``checkpoint`` beside ``target`` (a model path or hub id), ours first.

    Requests must carry the template arguments of the drafter's mode; the note says which.
    """
    arguments = json.dumps(mode_family(family).arguments(mode))
    request = f"send chat_template_kwargs={arguments} with every request: the drafter is trained for {mode} only"
    named = f"hf:{target}" if is_repository_name(target) and not Path(target).exists() else target
    ours = ServeInstruction(
        "SGLang with angelspec",
        _command("angelspec serve --target {named} --drafter {checkpoint}", named=named, checkpoint=checkpoint),
        f"requests with chat_template_kwargs={arguments} use the drafter, others are decoded plainly; --drafter may "
        "repeat; angelspec is installed from its repository",
    )
    if isinstance(config, MtpDrafterConfig):
        return [ours, *_mtp_instructions(config, checkpoint=checkpoint, target=target, family=family, request=request)]
    return [ours, *_block_instructions(config, checkpoint=checkpoint, target=target, request=request)]


def _command(template: str, **values: object) -> str:
    """A command line from its template, with every value quoted for a shell."""
    return template.format_map({name: shlex.quote(str(value)) for name, value in values.items()})


def _block_instructions(
    config: BlockDrafterConfig, *, checkpoint: Path | str, target: str, request: str
) -> list[ServeInstruction]:
    if config.algorithm in _SGLANG_ALGORITHMS:
        command = _command(
            "angelspec checkpoint convert {checkpoint} {served} --to {format} && "
            "sglang serve --model-path {target} --speculative-algorithm {name} --speculative-draft-model-path {served}",
            checkpoint=checkpoint,
            served=f"{checkpoint}-{config.algorithm}",
            format=config.algorithm,
            target=target,
            name=_SGLANG_ALGORITHMS[config.algorithm],
        )
        return [ServeInstruction("SGLang", command, request)]
    settings = {"method": "dspark", "model": str(checkpoint), "num_speculative_tokens": config.num_proposals}
    return [
        ServeInstruction(
            "vLLM with the DFly pull request 50246",
            _command(_VLLM, target=target, settings=json.dumps(settings)),
            f"no other released engine serves '{config.algorithm}' yet; {request}",
        )
    ]


def _mtp_instructions(
    config: MtpDrafterConfig, *, checkpoint: Path | str, target: str, family: str, request: str
) -> list[ServeInstruction]:
    served, depths = f"{checkpoint}-{family}", config.num_depths
    folder = target
    convert = ""
    if is_repository_name(target) and not Path(target).exists():  # what is converted beside must lie in a folder
        folder = target.rpartition("/")[2]
        convert = _command("hf download {target} --local-dir {folder} && ", target=target, folder=folder)
    convert += _command(
        "angelspec checkpoint convert {checkpoint} {served} --to {family} --target {folder} && ",
        checkpoint=checkpoint,
        served=served,
        family=family,
        folder=folder,
    )
    if family == "hy3":
        serve = _command(
            "sglang serve --model-path {folder} --speculative-algorithm NEXTN --speculative-draft-model-path {served} "
            "--speculative-num-steps {depths} --speculative-eagle-topk 1 --speculative-num-draft-tokens {tokens}",
            folder=folder,
            served=served,
            depths=depths,
            tokens=depths + 1,
        )
        return [ServeInstruction("SGLang", convert + serve, request)]
    if family == "qwen3":
        settings = {"method": "mtp", "model": served, "num_speculative_tokens": depths}
        return [
            ServeInstruction(
                "vLLM with AngelSpec's Qwen3 MTP plug-in",
                convert + _command(_VLLM, target=served, settings=json.dumps(settings)),
                f"no other released engine serves MTP beside Qwen3 yet; {request}",
            )
        ]
    return []
