"""What a recipe will take, from the recipe alone: no model, no network."""

from __future__ import annotations

from dataclasses import dataclass

from angelspec.core.drafter_config import MtpDrafterConfig
from angelspec.core.files import expanded
from angelspec.core.locations import prompt_folder
from angelspec.core.recipe import PromptSource, Recipe
from angelspec.pipeline.requirements import BYTES_OF, target_bytes

KNOWN_ROWS = {
    "hf:mlabonne/open-perfectblend": 1_420_909,
    "hf:nvidia/OpenCodeInstruct": 5_000_000,
    "hf:nvidia/OpenCodeReasoning": 567_850,
    "hf:SynthLabsAI/Big-Math-RL-Verified": 251_122,
    "hf:openai/gsm8k": 1_319,
    "hf:HuggingFaceH4/MATH-500": 500,
    "hf:openai/openai_humaneval": 164,
    "hf:google-research-datasets/mbpp": 500,
    "hf:HuggingFaceH4/mt_bench_prompts": 80,
}
"""Rows of hub datasets named in the shipped recipes, by their cards; the run itself counts."""
TYPICAL_PROMPT_TOKENS = 100
TYPICAL_ANSWER_SHARE = 0.6
"""Mean answer length as a share of the longest allowed, for estimates only."""


@dataclass(frozen=True)
class Amounts:
    """Estimated sizes of a run."""

    prompts: int | None
    answer_tokens: int | None
    row_tokens: int | None
    """Prompt and answer tokens of all training rows."""
    drafter_parameters: int
    feature_bytes_per_token: int
    feature_bytes: int | None
    target_bytes: int
    training_memory_bytes: int
    """Parameters, gradients and optimiser state in float32."""


def count_rows(source: PromptSource) -> int | None:
    """Rows of a source, or None where only its download would tell."""
    if source.source.startswith("builtin:"):
        path = prompt_folder() / (source.source.removeprefix("builtin:") + ".jsonl")
    elif source.source.startswith("file:"):
        path = expanded(source.source.removeprefix("file:"))
    else:
        rows = KNOWN_ROWS.get(source.source)
        return rows if source.limit is None or rows is None else min(rows, source.limit)
    if not path.is_file() or path.suffix != ".jsonl":
        return source.limit
    with path.open("rb") as stream:
        rows = sum(1 for line in stream if line.strip())
    return rows if source.limit is None else min(rows, source.limit)


def drafter_parameters(recipe: Recipe) -> int:
    """Trainable parameters of the recipe's drafter."""
    c = recipe.drafter_config()
    if c.family == "mtp":
        return _mtp_parameters(c)
    attention = c.hidden_size * c.head_dim * 2 * (c.num_heads + c.num_kv_heads)
    if c.context == "fusion":
        attention += 2 * c.target_hidden_size * c.num_kv_heads * c.head_dim
    layers = c.num_layers * (attention + 3 * c.hidden_size * c.intermediate_size)
    taps = len(c.target_layer_ids)
    context = 0 if c.context == "fusion" else taps * c.target_hidden_size * c.hidden_size
    head = 0
    if c.head == "markov":
        head = 2 * c.vocab_size * c.markov_rank
    elif c.head == "correction":
        head = 5 * c.hidden_size * c.correction_intermediate_size
    return layers + context + head


def _mtp_parameters(c: MtpDrafterConfig) -> int:
    fusion = 2 * c.hidden_size * c.hidden_size
    attention = c.hidden_size * c.head_dim * 2 * (c.num_heads + c.num_kv_heads)
    if c.moe is None:
        return fusion + attention + 3 * c.hidden_size * c.intermediate_size
    experts = c.moe.num_experts + c.moe.num_shared_experts
    router = c.hidden_size * c.moe.num_experts
    return fusion + attention + router + 3 * c.hidden_size * c.moe.intermediate_size * experts


def amounts(recipe: Recipe) -> Amounts:
    """Estimate a run."""
    counts = [count_rows(source) for source in recipe.data.train]
    prompts = None if any(count is None for count in counts) else sum(counts) * recipe.rollout.samples_per_prompt
    config = recipe.drafter_config()
    per_answer = int(recipe.rollout.max_new_tokens * TYPICAL_ANSWER_SHARE)
    answer_tokens = None if prompts is None else prompts * per_answer
    row_tokens = None if prompts is None else prompts * (
        min(per_answer + TYPICAL_PROMPT_TOKENS, recipe.pack.max_document_tokens)
    )  # fmt: skip
    per_token = (len(config.target_layer_ids) + 1) * config.target_hidden_size * BYTES_OF[recipe.target.dtype]
    parameters = drafter_parameters(recipe)
    return Amounts(
        prompts=prompts,
        answer_tokens=answer_tokens,
        row_tokens=row_tokens,
        drafter_parameters=parameters,
        feature_bytes_per_token=per_token,
        feature_bytes=None if row_tokens is None else row_tokens * per_token,
        target_bytes=target_bytes(recipe),
        training_memory_bytes=parameters * 16,
    )
