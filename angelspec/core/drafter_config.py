"""The configuration of a drafter, per family: the one record that trainer, evaluator, exporter and server read."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from angelspec.core.geometry import DecoderShape, TargetGeometry

ContextKind = Literal["projection", "fusion", "hybrid"]
HeadKind = Literal["none", "markov", "correction"]
BlockAlgorithm = Literal["dflash", "dflare", "dspark", "dfly"]
BLOCK_ALGORITHMS: tuple[BlockAlgorithm, ...] = get_args(BlockAlgorithm)
MlpKind = Literal["dense", "moe"]
RouterScore = Literal["sigmoid", "softmax"]

SHORTLIST = 64
"""Candidates per slot that a sequential head rescores, where nothing else is said: the accepted length is within 1 % of
the whole vocabulary's, and drafting takes less than half of its time (recipes/LOG.md)."""
ALGORITHM_PARTS: Mapping[BlockAlgorithm, tuple[ContextKind, HeadKind, bool]] = MappingProxyType(
    {
        "dflash": ("projection", "none", False),
        "dflare": ("fusion", "none", False),
        "dspark": ("projection", "markov", True),
        "dfly": ("hybrid", "correction", False),
    }
)
"""What each published name stands for: context variant, head variant, confidence head."""
ALGORITHM_NAMES: Mapping[str, str] = MappingProxyType(
    {"dflash": "DFlash", "dflare": "DFlare", "dspark": "DSpark", "dfly": "DFly", "mtp": "MTP", "block": "Block"}
)
"""How a person writes them; ``block`` stands for a block drafter whose algorithm is not known."""

_STRICT = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class _DrafterShape(DecoderShape):
    """What every drafter has in common: the shape of its decoder layers, and the target that it belongs to."""

    target_hidden_size: int = Field(gt=0)
    target_num_layers: int = Field(gt=0)

    @property
    def cached_layers(self) -> int:
        """Layers that keep keys and values of every token."""
        raise NotImplementedError

    @property
    def cached_numbers_per_token(self) -> int:
        """Numbers of keys and values that a server keeps per token."""
        return 2 * self.cached_layers * self.num_kv_heads * self.head_dim

    def conflicts_with(self, geometry: TargetGeometry) -> list[str]:
        """Facts on which this drafter and a target disagree, one sentence each (empty: they fit)."""
        pairs = {
            "target_hidden_size": (self.target_hidden_size, geometry.hidden_size),
            "hidden_size": (self.hidden_size, geometry.hidden_size),
            "target_num_layers": (self.target_num_layers, geometry.num_layers),
            "vocab_size": (self.vocab_size, geometry.vocab_size),
        }
        return [
            f"{key} is {ours} but the target has {theirs}" for key, (ours, theirs) in pairs.items() if ours != theirs
        ]


class BlockDrafterConfig(_DrafterShape):
    """A block-parallel drafter (DFlash, DFlare, DSpark, DFly): one backbone, a context and a head variant.

    A block holds ``block_size`` slots: slot 0 is the anchor (the last committed token), slots 1.. hold the mask
    token and propose the tokens that follow it, so ``block_size - 1`` tokens are proposed.
    """

    family: Literal["block"] = "block"
    context: ContextKind
    """How target features become context: shared projection, per-layer fusion, or both (hybrid)."""
    head: HeadKind
    """What corrects a slot by the token before it: nothing, a Markov bias on the logits, a hidden correction."""
    confidence_head: bool = False
    """Whether a small head predicts each proposal's acceptance."""
    num_layers: int = Field(ge=1)
    target_layer_ids: tuple[int, ...]
    """Zero-based target layers whose outputs are the features, ascending."""
    block_size: int = Field(ge=2)
    """Slots including the anchor."""
    mask_token_id: int
    sample_from_anchor: bool = False
    """Whether the anchor slot itself predicts (DeepSpec's DSpark); angelspec trains only False."""
    markov_rank: int | None = Field(default=None, gt=0)
    """Rank of the Markov head; only with head 'markov'."""
    correction_intermediate_size: int | None = Field(default=None, gt=0)
    """Width of the hidden correction; only with head 'correction'."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        ids = self.target_layer_ids
        if not ids:
            raise ValueError("target_layer_ids is empty")
        if list(ids) != sorted(set(ids)):
            raise ValueError(f"target_layer_ids {list(ids)} must be ascending without doubles")
        if ids[0] < 0 or ids[-1] >= self.target_num_layers:
            raise ValueError(f"target_layer_ids {list(ids)} must lie in 0..{self.target_num_layers - 1}")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} must lie in 0..{self.vocab_size - 1}")
        if self.context != "projection" and self.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"hidden_size {self.hidden_size} must equal target_hidden_size {self.target_hidden_size} "
                f"for context '{self.context}', which adds target states to the drafter's"
            )
        if (self.head == "markov") != (self.markov_rank is not None):
            raise ValueError("markov_rank belongs to head 'markov' and to it alone")
        if (self.head == "correction") != (self.correction_intermediate_size is not None):
            raise ValueError("correction_intermediate_size belongs to head 'correction' and to it alone")
        return self

    @property
    def cached_layers(self) -> int:
        """All of its layers."""
        return self.num_layers

    @property
    def num_proposals(self) -> int:
        """Tokens proposed per block."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def algorithm(self) -> str:
        """The published name of this combination, or its parts joined by '+'."""
        for name, (context, head, _) in ALGORITHM_PARTS.items():
            if (self.context, self.head) == (context, head):
                return name
        return f"{self.context}+{self.head}"


class MoeConfig(BaseModel):
    """A mixture of experts in place of a layer's MLP, as in Hy3 and DeepSeek-V3 (arXiv 2412.19437, equations 12-16).

    Every token goes to the experts with the highest score (plus bias, which counts for the choice alone) and, besides,
    to the shared experts, which see all tokens.
    """

    model_config = _STRICT

    num_experts: int = Field(ge=1)
    experts_per_token: int = Field(ge=1)
    num_shared_experts: int = Field(default=1, ge=0)
    """Their widths add up to one MLP; 0: none."""
    intermediate_size: int = Field(gt=0)
    """Width of one expert."""
    router_scale: float = Field(default=1.0, gt=0)
    """Multiplies the routed experts' sum."""
    router_score: RouterScore = "sigmoid"
    """How router logits become scores: each for itself, or against the others."""
    normalise_routes: bool = True
    """Whether the chosen scores are divided by their sum."""
    selection_bias: bool = True
    """Whether a bias per expert is added to the scores when experts are chosen."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.experts_per_token > self.num_experts:
            raise ValueError(f"experts_per_token {self.experts_per_token} exceeds num_experts {self.num_experts}")
        return self


class MtpDrafterConfig(_DrafterShape):
    """Multi-token prediction: one decoder layer on [embedding; hidden state], reused at every depth.

    Depth 0 reads the target's last hidden state and the token after it; each further depth reads the depth before it
    and the token that this one proposed. Embedding and head are the target's.
    """

    family: Literal["mtp"] = "mtp"
    mlp: MlpKind = "dense"
    num_depths: int = Field(ge=1)
    """Depths that are trained, and tokens that are proposed."""
    qk_norm: bool = True
    """Whether queries and keys are normalised per head before they are rotated."""
    moe: MoeConfig | None = None
    """Only with mlp 'moe'; intermediate_size is not used then."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.mlp == "moe") != (self.moe is not None):
            raise ValueError("moe belongs to mlp 'moe' and to it alone")
        if self.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"hidden_size {self.hidden_size} must equal target_hidden_size {self.target_hidden_size}: "
                "embedding and vocabulary head are the target's"
            )
        return self

    @property
    def cached_layers(self) -> int:
        """The one layer: only depth 0's keys and values last."""
        return 1

    @property
    def num_proposals(self) -> int:
        """Tokens proposed per draft."""
        return self.num_depths

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """No taps: it reads the last hidden state alone."""
        return ()

    @property
    def algorithm(self) -> str:
        """The published name."""
        return "mtp"


DrafterConfig = Annotated[BlockDrafterConfig | MtpDrafterConfig, Field(discriminator="family")]
"""The configuration of either family, told apart by ``family``."""
