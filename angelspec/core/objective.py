"""What a drafter is trained on: the mix of losses of one stage, as plain frozen data."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Objective(BaseModel):
    """Weights of the loss terms and the choices inside them (formulas: ``angelspec.objectives.tokenwise``)."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    ce: float = Field(default=0.0, ge=0)
    """Cross-entropy with the data's token."""
    kl: float = Field(default=0.0, ge=0)
    """Forward KL from the teacher to the drafter."""
    tv: float = Field(default=0.0, ge=0)
    """Total variation, 1 - sum(min(p, q))."""
    l1: float = Field(default=0.0, ge=0)
    """Twice the total variation (DSpark)."""
    lk: float = Field(default=0.0, ge=0)
    """The LK loss in the form of lk_form."""
    lk_form: Literal["hybrid", "alpha"] = "hybrid"
    """hybrid: lambda*KL + (1-lambda)*TV with lambda = exp(-eta*alpha); alpha: -log(alpha)."""
    lk_eta: float = Field(default=3.0, gt=0)
    """How fast the hybrid LK loss turns from KL to TV as the acceptance grows."""
    top_k: int | None = Field(default=None, gt=0)
    """KL on the teacher's K most probable tokens; None: the whole vocabulary."""
    renormalise: bool = False
    """Whether both distributions are renormalised inside the top K (variant a) or not (variant b)."""
    end_to_end_tv: float = Field(default=0.0, ge=0)
    """One minus the expected accepted share of the block, or (MTP) of the depths of a position that has them all."""
    confidence: float = Field(default=0.0, ge=0)
    """Binary cross-entropy of the confidence head against alpha."""
    position_weights: Literal["uniform", "decay", "d-pace"] = "uniform"
    """How the slots of a block, or the depths of MTP, weigh in the per-token terms."""
    decay_gamma: float = Field(default=7.0, gt=0)
    """Slots over which the weight of `decay` falls by a factor e."""
    d_pace_rho: float = Field(default=0.5, ge=0, le=1)
    """How far `d-pace` lifts every slot's probability towards 1: s -> (1-rho)*s + rho."""
    slot_weights: tuple[Annotated[float, Field(ge=0)], ...] | None = None
    """One weight for each proposed token (slot or depth), instead of position_weights; None: as those say."""

    @property
    def needs_teacher(self) -> bool:
        """Whether any term compares the drafter with the target's distribution."""
        return any((self.kl, self.tv, self.l1, self.lk, self.end_to_end_tv, self.confidence))

    @property
    def weights_in_words(self) -> str:
        """How slots or depths weigh, for a person."""
        if self.slot_weights is None:
            return f"{self.position_weights} weights"
        return f"weights {', '.join(f'{weight:g}' for weight in self.slot_weights)}"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not any((self.ce, self.kl, self.tv, self.l1, self.lk, self.end_to_end_tv)):
            raise ValueError("no loss term is positive; give ce, kl, tv, l1, lk or end_to_end_tv a weight")
        if self.slot_weights is not None and not any(self.slot_weights):
            raise ValueError("slot_weights are all 0: no proposal would be trained")
        if self.slot_weights is not None and self.position_weights != "uniform":
            raise ValueError(f"slot_weights take the place of position_weights '{self.position_weights}'; give one")
        if self.renormalise and self.top_k is None:
            raise ValueError("renormalise needs top_k; over the whole vocabulary there is nothing to renormalise")
        if self.renormalise and self.top_k == 1:
            raise ValueError("renormalise with top_k 1 leaves one token of probability 1: every loss would be 0")
        if self.renormalise and not self.needs_teacher:
            raise ValueError("renormalise has no effect: no term compares the drafter with the target")
        reads_kl = self.kl or (self.lk and self.lk_form == "hybrid")
        if self.top_k is not None and not self.renormalise and not reads_kl:
            raise ValueError(
                "top_k has no effect: without renormalise only kl and the hybrid lk read it, and both are off"
            )
        return self
