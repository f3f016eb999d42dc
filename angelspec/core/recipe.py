"""The recipe: one frozen, complete description of a run, from the target to the exported drafter.

Every default of the product stands here, once. A field that is left ``None`` in a file is filled by
``angelspec.core.recipe_resolution.resolve`` from the named target and algorithm; a resolved recipe has no ``None``
except where a docstring says what None means.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from angelspec.core.drafter_config import (
    BLOCK_ALGORITHMS,
    SHORTLIST,
    BlockAlgorithm,
    BlockDrafterConfig,
    ContextKind,
    DrafterConfig,
    HeadKind,
    MlpKind,
    MoeConfig,
    MtpDrafterConfig,
)
from angelspec.core.geometry import TargetGeometry
from angelspec.core.modes import Mode, mode_family
from angelspec.core.objective import Objective
from angelspec.core.roles import Role
from angelspec.core.workloads import Workload

FORMAT_VERSION = 1
"""Raised when a stored recipe of an earlier version can no longer be read as is."""


class Section(BaseModel):
    """Base of every recipe section: frozen, unknown keys refused, docstrings are the reference."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )


class TargetSection(Section):
    """The frozen model that is sped up."""

    name: str | None = None
    """A target angelspec knows (they are listed in recipes/README.md); fills source, mode_family and geometry."""
    source: str | None = None
    """Where it comes from: folder:PATH, hf:ORG/NAME[@REVISION], modelscope:ORG/NAME[@REVISION],
    wheel:PACKAGE==VERSION#FILE.gguf, or random:llama|qwen3|hy3 (tiny, for tests)."""
    mode_family: str | None = None
    """How its chat template switches thinking: plain, smollm2, qwen3, hy3."""
    geometry: TargetGeometry | None = None
    """Its shape; read from the folder's config.json for folder: sources."""
    chat_template: str | None = None
    """Path of a Jinja chat template that replaces the tokenizer's own; None keeps the target's."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of its weights where its states are captured for training (rollout.dtype: where it answers)."""
    trust_remote_code: bool = False
    """Whether model code from the source may be run."""


class _DrafterShape(Section):
    intermediate_size: int | None = Field(default=None, gt=0)
    """None: the target's."""
    num_heads: int | None = Field(default=None, gt=0)
    """None: the target's."""
    num_kv_heads: int | None = Field(default=None, gt=0)
    """None: the target's."""
    head_dim: int | None = Field(default=None, gt=0)
    """None: the target's."""


class BlockDrafterSection(_DrafterShape):
    """A block drafter to train. ``algorithm`` names a combination; context and head can be set apart for ablations."""

    algorithm: BlockAlgorithm = "dfly"
    context: ContextKind | None = None
    """None: the algorithm's."""
    head: HeadKind | None = None
    """None: the algorithm's."""
    confidence_head: bool | None = None
    """None: the algorithm's."""
    num_layers: int = Field(default=5, ge=1)
    num_taps: int = Field(default=5, ge=1)
    """How many target layers feed it, evenly spaced from layer 1 to N-3, unless layer_ids are given."""
    layer_ids: tuple[int, ...] | None = None
    """Zero-based target layers, ascending; None: spread by num_taps."""
    block_size: int = 8
    """Slots including the anchor: 8 proposes 7 tokens."""
    mask_token_id: int | None = None
    """None: the known target's first mask token."""
    hidden_size: int | None = Field(default=None, gt=0)
    """None: the target's."""
    markov_rank: int = Field(default=256, gt=0)
    """Used with head 'markov'."""
    correction_intermediate_size: int | None = Field(default=None, gt=0)
    """Used with head 'correction'; None: hidden_size."""
    initial_checkpoint: str | None = None
    """A drafter to start from (weights only); None: fresh weights."""


class MtpDrafterSection(_DrafterShape):
    """Multi-token prediction to train: one decoder layer, reused at every depth."""

    algorithm: Literal["mtp"]
    num_depths: int = Field(default=3, ge=1)
    """Depths that are unrolled, and tokens that are proposed."""
    mlp: MlpKind = "dense"
    moe: MoeConfig | None = None
    """The experts; with mlp 'moe', and then intermediate_size is not used."""
    qk_norm: bool = True
    """Whether queries and keys are normalised per head."""
    initial_checkpoint: str | None = None
    """A drafter to start from (weights only), or `target`: the target's own MTP layer; None: fresh weights."""


TARGET_LAYER = "target"
"""The ``initial_checkpoint`` that stands for the target's own MTP layer."""
ALGORITHMS: tuple[str, ...] = (*BLOCK_ALGORITHMS, "mtp")
"""What ``drafter.algorithm`` may name."""


def drafter_family(drafter: Any) -> Literal["block", "mtp"]:
    """Family of a drafter section, plain or parsed, by its algorithm."""
    algorithm = drafter.get("algorithm") if isinstance(drafter, dict) else getattr(drafter, "algorithm", None)
    return "mtp" if algorithm == "mtp" else "block"


DrafterSection = Annotated[
    Annotated[BlockDrafterSection, Tag("block")] | Annotated[MtpDrafterSection, Tag("mtp")],
    Discriminator(drafter_family),
]
"""The drafter to train; ``algorithm`` says which kind of section it is."""


SOURCE_KINDS = ("builtin", "file", "hf")
"""What may stand before the colon of ``PromptSource.source``."""


class PromptSource(Section):
    """One set of conversations."""

    name: str
    """Shown in tables and reports."""
    source: str
    """builtin:train/chat and the like (shipped), file:PATH (JSONL, JSON, CSV, Parquet), or hf:ORG/NAME."""
    workload: Workload | None = None
    """None: each row says it (keys `workload` or `domain`)."""
    split: str = "train"
    """Split of a hub dataset."""
    subset: str | None = None
    """Configuration of a hub dataset; None: its default."""
    revision: str | None = None
    """Revision of a hub dataset; None: the newest, recorded in the run."""
    prompt_key: str | None = None
    """Column that holds a bare prompt; None: conversations, messages, turns or prompt are looked for."""
    limit: int | None = Field(default=None, gt=0)
    """At most so many rows, drawn by content hash; None: all."""


class DataSection(Section):
    """Prompts or finished conversations."""

    train: tuple[PromptSource, ...] = Field(min_length=1)
    evaluation: tuple[PromptSource, ...] = Field(min_length=1)
    responses: Literal["rollout", "given"] = "rollout"
    """Train on the target's own answers (rollout) or on those in the rows (given)."""
    role_map: dict[str, Role] = Field(default_factory=dict)
    """Extra role names, mapped to system, user, assistant or tool."""
    max_bad_fraction: float = Field(default=0.05, ge=0, le=1)
    """The run stops when a larger share of the rows is refused."""
    max_line_bytes: int = Field(default=4 * 2**20, gt=0)
    """Longer lines are refused one by one, without being held."""
    max_prompt_tokens: int = Field(default=1024, gt=0)
    """Longer rendered prompts are refused."""
    decontaminate_tokens: int = Field(default=16, ge=4)
    """Training prompts that share so many contiguous tokens with an evaluation example are dropped."""
    held_out_fraction: float = Field(default=0.03, gt=0, lt=0.5)
    """Share of training conversations kept apart to choose the best checkpoint, by content hash."""
    seed: int = 0


_LOCAL_REASONS = ("stop", "length", "loop")


class RolloutSection(Section):
    """How the frozen target answers the prompts."""

    backend: Literal["local", "endpoint"] = "local"
    temperature: float = Field(default=0.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    samples_per_prompt: int = Field(default=1, ge=1)
    """More than one needs a temperature."""
    max_new_tokens: int = Field(default=256, ge=1)
    batch_size: int = Field(default=64, ge=1)
    """Rows decoded together."""
    shard_size: int = Field(default=256, ge=1)
    """Prompts per shard, the unit of resuming; its batch composition is fixed."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    keep_finish_reasons: tuple[str, ...] = Field(default=("stop",), min_length=1)
    """Answers that ended otherwise are counted and left out of training."""
    max_repeated_share: float = Field(default=1.0, ge=0, le=1)
    """Answers whose share of repeated 12-grams is larger are counted and left out (looping)."""
    endpoint_url: str | None = None
    """Base URL of an OpenAI-compatible server (…/v1), for backend endpoint."""
    endpoint_model: str | None = None
    """Model name sent to it; None: the first that it lists."""
    endpoint_key_variable: str = "OPENAI_API_KEY"
    """Environment variable that holds its key; the key itself is never written."""
    concurrency: int = Field(default=32, ge=1)
    retries: int = Field(default=5, ge=0)
    timeout_seconds: float = Field(default=600.0, gt=0)
    seed: int = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.samples_per_prompt > 1 and self.temperature == 0:
            raise ValueError("samples_per_prompt above 1 repeats the same answer at temperature 0")
        if self.backend == "endpoint" and not self.endpoint_url:
            raise ValueError("backend endpoint needs endpoint_url")
        if self.backend == "local" and (unknown := [r for r in self.keep_finish_reasons if r not in _LOCAL_REASONS]):
            raise ValueError(
                f"keep_finish_reasons: answers of backend local end by {', '.join(_LOCAL_REASONS)}, not '{unknown[0]}'"
            )
        if self.endpoint_url and urlsplit(self.endpoint_url).scheme not in ("http", "https"):
            raise ValueError(f"endpoint_url: '{self.endpoint_url}' begins with neither http:// nor https://")
        if self.endpoint_url and "@" in urlsplit(self.endpoint_url).netloc:
            raise ValueError(
                "endpoint_url holds a login, which the manifest would publish: leave it out, and name the variable "
                f"that holds the key in endpoint_key_variable ({self.endpoint_key_variable})"
            )
        return self


class PackSection(Section):
    """Fixed rows of training tokens."""

    row_length: int = Field(default=512, ge=8)
    max_document_tokens: int | None = Field(default=None, ge=8)
    """Longer conversations are cut; None: row_length."""


_Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSection(Section):
    """The optimiser and its learning rate."""

    name: Literal["adamw", "muon"] = "adamw"
    """Muon takes the matrices inside layers; embeddings, norms, fusion weights and heads stay with AdamW."""
    learning_rate: float = Field(default=6e-4, gt=0)
    min_learning_rate: float = Field(default=6e-5, ge=0)
    muon_learning_rate: float = Field(default=2e-3, gt=0)
    weight_decay: float = Field(default=0.01, ge=0)
    betas: tuple[_Beta, _Beta] = (0.9, 0.999)
    epsilon: float = Field(default=1e-8, gt=0)
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    clip_norm: float = Field(default=1.0, gt=0)
    schedule: Literal["cosine", "linear", "wsd"] = "cosine"
    warmup_fraction: float = Field(default=0.04, ge=0, lt=1)
    decay_fraction: float = Field(default=0.2, gt=0, le=1)
    """Final share of a stage in which wsd falls."""


class TrainingStage(Section):
    """One objective and how long it is followed."""

    name: str = Field(pattern=r"^[a-z][a-z0-9-]*$")
    """Small letters, digits and dashes: its folder is called by it."""
    objective: Objective
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the rows; give epochs or steps."""
    steps: int | None = Field(default=None, gt=0)
    plateau_evaluations: int | None = Field(default=None, gt=0)
    """End the stage early after so many held-out evaluations without a gain; None: run it out."""
    plateau_gain: float = Field(default=0.005, ge=0)
    """The accepted length that counts as a gain."""
    learning_rate_scale: float = Field(default=1.0, gt=0)
    """Multiplies the optimiser's learning rates in this stage."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give exactly one of epochs and steps, and null for the other")
        return self


class TrainingSection(Section):
    """The training loop."""

    features: Literal["online", "memory", "disk"] = "memory"
    """Run the target inside each step, or once: features held in memory, or in shards on disk."""
    rows_per_step: int = Field(default=4, ge=1)
    """Packed rows per optimiser step and rank."""
    rows_per_micro_batch: int = Field(default=2, ge=1)
    anchors_per_row: int = Field(default=64, ge=1)
    """Blocks drawn from each row at each step (block drafters; MTP trains at every position)."""
    workloads: tuple[Workload, ...] | None = Field(default=None, min_length=1)
    """Only answers of these workloads are trained on and held out; None: all."""
    on_policy: bool = True
    """MTP: feed each depth with the token that the depth before it proposed, or else with the data's."""
    optimizer: OptimizerSection = OptimizerSection()
    stages: tuple[TrainingStage, ...] = Field(min_length=1)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the matrix products; parameters, softmaxes and losses stay in float32. auto: bfloat16 where the
    processor has such products."""
    evaluate_every: int = Field(default=200, ge=1)
    """Steps between held-out evaluations."""
    held_out_anchors: int = Field(default=1024, ge=1)
    """Places in the held-out rows at which drafts are compared with the data."""
    save_every: int = Field(default=200, ge=1)
    keep_checkpoints: int = Field(default=2, ge=1)
    """Newest checkpoints kept; the best is kept besides."""
    log_every: int = Field(default=10, ge=1)
    max_nonfinite_steps: int = Field(default=5, ge=0)
    """Skipped steps after which the run stops."""
    tracker: Literal["none", "tensorboard"] = "none"
    """Metrics always go to metrics.jsonl; this adds another sink."""
    sharding: Literal["replicate", "shard"] = "replicate"
    """Across ranks: copies with averaged gradients, or FSDP2 shards."""
    recompute_depths: bool = False
    """MTP: run the depths above the first again in the backward pass instead of holding their activations, so that long
    rows take little more memory than one depth."""
    sequence_parallel: int = Field(default=1, ge=1)
    """MTP: neighbouring ranks that share each row by positions, so that longer rows fit; must divide the drafter's
    heads."""
    seed: int = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.rows_per_step % self.rows_per_micro_batch:
            raise ValueError(
                f"rows_per_step {self.rows_per_step} is no multiple of rows_per_micro_batch {self.rows_per_micro_batch}"
            )
        names = [stage.name for stage in self.stages]
        if len(set(names)) != len(names):
            raise ValueError(f"stage names repeat: {names}")
        return self


class LookupSection(Section):
    """Prompt lookup, the drafter without weights that every table carries."""

    max_match: int = Field(default=3, ge=1)
    num_proposals: int = Field(default=7, ge=1)


class EvaluationSection(Section):
    """Measurement by real speculative decoding."""

    temperatures: tuple[float, ...] = (0.0, 1.0)
    prompts_per_suite: int | None = Field(default=None, gt=0)
    """None: all."""
    max_new_tokens: int = Field(default=256, ge=1)
    batch_size: int = Field(default=16, ge=1)
    dtype: Literal["float32", "bfloat16"] = "float32"
    exactness_prompts: int = Field(default=8, ge=0)
    """Prompts on which the output is compared, token for token, with plain decoding in float32."""
    shortlist: int | None = Field(default=SHORTLIST, ge=1)
    """Candidates per slot that a sequential head rescores; None: the whole vocabulary (exact)."""
    lookup: LookupSection = LookupSection()
    seed: int = 0

    @field_validator("temperatures")
    @classmethod
    def _not_negative(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not value or any(item < 0 for item in value):
            raise ValueError("temperatures needs one or more values of at least 0")
        return tuple(dict.fromkeys(value))  # twice the same would count every answer twice


class ExportSection(Section):
    """The drafter that a server loads."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    include_embedding: bool = False
    """Whether the target's embedding is copied into the checkpoint (servers take it from the target)."""


class RequirementsSection(Section):
    """What a machine must have before anything is downloaded."""

    accelerator: Literal["none", "cuda"] = "none"
    accelerator_memory_gib: float = Field(default=0.0, ge=0)
    """Per run, over all accelerators."""
    feature_engine: Literal["in-process", "streaming"] = "in-process"
    """Streaming: the target is too large to run inside the trainer; an engine sends its features."""


class Recipe(Section):
    """One complete run."""

    format_version: Literal[1] = FORMAT_VERSION
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")
    description: str
    mode: Mode
    """The thinking mode this drafter is trained for."""
    target: TargetSection
    drafter: DrafterSection = BlockDrafterSection()
    data: DataSection
    rollout: RolloutSection = RolloutSection()
    pack: PackSection = PackSection()
    training: TrainingSection
    evaluation: EvaluationSection = EvaluationSection()
    export: ExportSection = ExportSection()
    requirements: RequirementsSection = RequirementsSection()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.drafter.algorithm != "mtp" and self.drafter.block_size < 2:
            raise ValueError(f"drafter.block_size is {self.drafter.block_size}; allowed: 2 or more")
        if self.pack.row_length <= self.verify_width:
            raise ValueError(
                f"pack.row_length is {self.pack.row_length}; allowed: more than "
                + (
                    f"drafter.num_depths + 1 ({self.verify_width})"
                    if self.drafter.algorithm == "mtp"
                    else f"drafter.block_size ({self.verify_width})"
                )
            )
        longest = self.pack.max_document_tokens
        if longest is not None and not self.verify_width < longest <= self.pack.row_length:
            raise ValueError(
                f"pack.max_document_tokens is {longest}; allowed: {self.verify_width + 1} to pack.row_length "
                f"({self.pack.row_length}), or null"
            )
        if self.target.mode_family is not None:
            mode_family(self.target.mode_family)
        return self

    def longest_prompt(self, max_new_tokens: int) -> int:
        """Tokens of the longest prompt that is asked with answers of so many; the recipe is resolved."""
        assert self.target.geometry is not None, "the recipe is resolved"
        return min(self.data.max_prompt_tokens, self.target.geometry.max_position_embeddings - max_new_tokens)

    @property
    def verify_width(self) -> int:
        """Tokens of one verify step: the anchor and the proposals."""
        drafter = self.drafter
        return drafter.num_depths + 1 if drafter.algorithm == "mtp" else drafter.block_size

    def drafter_config(self) -> DrafterConfig:
        """The drafter's configuration, from a resolved recipe.

        Raises:
            ValueError: the recipe is not resolved, or its values contradict each other.
        """
        geometry, drafter = self.target.geometry, self.drafter
        if geometry is None or drafter.intermediate_size is None:
            raise ValueError(f"recipe '{self.name}' is not resolved")
        shape = {
            "intermediate_size": drafter.intermediate_size,
            "num_heads": drafter.num_heads,
            "num_kv_heads": drafter.num_kv_heads,
            "head_dim": drafter.head_dim,
            "vocab_size": geometry.vocab_size,
            "rms_norm_eps": geometry.rms_norm_eps,
            "max_position_embeddings": geometry.max_position_embeddings,
            "rope": geometry.rope,
            "target_hidden_size": geometry.hidden_size,
            "target_num_layers": geometry.num_layers,
        }
        if drafter.algorithm == "mtp":
            return MtpDrafterConfig(
                **shape,
                hidden_size=geometry.hidden_size,
                num_depths=drafter.num_depths,
                mlp=drafter.mlp,
                moe=drafter.moe,
                qk_norm=drafter.qk_norm,
            )
        return BlockDrafterConfig(
            **shape,
            context=drafter.context,
            head=drafter.head,
            confidence_head=bool(drafter.confidence_head),
            num_layers=drafter.num_layers,
            hidden_size=drafter.hidden_size,
            target_layer_ids=drafter.layer_ids,
            block_size=drafter.block_size,
            mask_token_id=drafter.mask_token_id,
            markov_rank=drafter.markov_rank if drafter.head == "markov" else None,
            correction_intermediate_size=(
                drafter.correction_intermediate_size if drafter.head == "correction" else None
            ),
        )
