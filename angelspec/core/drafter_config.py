"""The configuration of a drafter: the one record that trainer, evaluator, exporter and server read."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from angelspec.core.geometry import Rope, TargetGeometry

ContextKind = Literal["projection", "fusion", "hybrid"]
HeadKind = Literal["none", "markov", "correction"]
BlockAlgorithm = Literal["dflash", "dflare", "dspark", "dfly"]
BLOCK_ALGORITHMS: tuple[BlockAlgorithm, ...] = get_args(BlockAlgorithm)

ALGORITHM_PARTS: Mapping[BlockAlgorithm, tuple[ContextKind, HeadKind, bool]] = MappingProxyType(
    {
        "dflash": ("projection", "none", False),
        "dflare": ("fusion", "none", False),
        "dspark": ("projection", "markov", True),
        "dfly": ("hybrid", "correction", False),
    }
)
"""What each published name stands for: context variant, head variant, confidence head."""


class BlockDrafterConfig(BaseModel):
    """A block-parallel drafter (DFlash, DFlare, DSpark, DFly): one backbone, a context and a head variant.

    A block holds ``block_size`` slots: slot 0 is the anchor (the last committed token), slots 1.. hold the mask
    token and propose the tokens that follow it, so ``block_size - 1`` tokens are proposed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    family: Literal["block"] = "block"
    context: ContextKind
    """How target features become context: shared projection, per-layer fusion, or both (hybrid)."""
    head: HeadKind
    """What corrects a slot by the token before it: nothing, a Markov bias on the logits, a hidden correction."""
    confidence_head: bool = False
    """Whether a small head predicts each proposal's acceptance."""
    num_layers: int = Field(ge=1)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    vocab_size: int = Field(gt=1)
    rms_norm_eps: float = Field(gt=0)
    max_position_embeddings: int = Field(gt=0)
    rope: Rope
    target_hidden_size: int = Field(gt=0)
    target_num_layers: int = Field(gt=0)
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
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")
        if (self.head == "markov") != (self.markov_rank is not None):
            raise ValueError("markov_rank belongs to head 'markov' and to it alone")
        if (self.head == "correction") != (self.correction_intermediate_size is not None):
            raise ValueError("correction_intermediate_size belongs to head 'correction' and to it alone")
        return self

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
