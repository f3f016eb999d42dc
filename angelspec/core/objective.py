"""What a drafter is trained on: the mix of losses of one stage, as plain frozen data."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Objective(BaseModel):
    """Weights of the loss terms and the choices inside them (formulas: ``angelspec.objectives.tokenwise``)."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

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
    top_k: int | None = Field(default=None, gt=0)
    """KL on the teacher's K most probable tokens; None: the whole vocabulary."""
    renormalise: bool = False
    """Whether both distributions are renormalised inside the top K (variant a) or not (variant b)."""
    end_to_end_tv: float = Field(default=0.0, ge=0)
    """One minus the expected accepted share of the block."""
    confidence: float = Field(default=0.0, ge=0)
    """Binary cross-entropy of the confidence head against alpha."""
    position_weights: Literal["uniform", "decay", "d-pace"] = "uniform"
    """How slots of a block weigh in the per-token terms."""
    decay_gamma: float = Field(default=7.0, gt=0)
    d_pace_rho: float = Field(default=0.5, ge=0, le=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not any((self.ce, self.kl, self.tv, self.l1, self.lk, self.end_to_end_tv)):
            raise ValueError("no loss term is positive; give ce, kl, tv, l1, lk or end_to_end_tv a weight")
        if self.renormalise and self.top_k is None:
            raise ValueError("renormalise needs top_k; over the whole vocabulary there is nothing to renormalise")
        return self
