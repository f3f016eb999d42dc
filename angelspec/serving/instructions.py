"""The exact commands that serve an exported drafter, by engine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from angelspec.core.drafter_config import BlockDrafterConfig
from angelspec.core.modes import Mode, mode_family


@dataclass(frozen=True)
class ServeInstruction:
    """One way to serve a drafter."""

    engine: str
    command: str
    note: str


def serve_instructions(
    config: BlockDrafterConfig, *, checkpoint: Path | str, target: str, mode: Mode, family: str
) -> list[ServeInstruction]:
    """Commands that serve ``checkpoint`` beside ``target`` (a model path or hub id).

    Requests must carry the template arguments of the drafter's mode; the note says which.
    """
    arguments = json.dumps(mode_family(family).arguments(mode))
    request = f"send chat_template_kwargs={arguments} with every request: the drafter is trained for {mode} only"
    slots, proposals = config.block_size, config.num_proposals
    if config.algorithm == "dflash":
        return [
            ServeInstruction(
                "SGLang",
                f"sglang serve --model-path {target} --speculative-algorithm DFLASH "
                f"--speculative-draft-model-path {checkpoint} --speculative-num-draft-tokens {slots}",
                f"convert first: angelspec checkpoint convert --to dflash (block_size counts the anchor: {slots} slots "
                f"propose {proposals}); {request}",
            )
        ]
    settings = json.dumps({"method": "dspark", "model": str(checkpoint), "num_speculative_tokens": proposals})
    return [
        ServeInstruction(
            "vLLM with the DFly pull request 50246",
            f"vllm serve {target} --speculative-config '{settings}'",
            f"no released engine serves '{config.algorithm}' yet; {request}",
        )
    ]
