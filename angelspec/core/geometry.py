"""What a drafter must know of its target's shape, read from any spelling of a Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

_STRICT = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Rope(BaseModel):
    """Rotary embedding, in the one spelling used inside angelspec."""

    model_config = _STRICT

    theta: float = Field(gt=0)
    """Base of the inverse frequencies."""
    type: str = "default"
    """transformers' name of the scaling rule: default, linear, dynamic, yarn, longrope, llama3."""
    partial_rotary_factor: float = Field(default=1.0, gt=0, le=1)
    """Share of each head's channels that is rotated."""
    scaling: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the scaling rule (factor, original_max_position_embeddings, ...)."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read ``rope_theta`` + ``rope_scaling`` (transformers 4) or ``rope_parameters`` (transformers 5).

        Raises:
            ValueError: the spellings contradict each other, or parameters differ by attention type.
        """
        parameters = dict(config.get("rope_parameters") or {})
        if parameters and all(isinstance(value, Mapping) for value in parameters.values()):
            distinct = {repr(sorted(value.items())) for value in parameters.values()}
            if len(distinct) != 1:
                raise ValueError(
                    "rope_parameters differ by attention type "
                    f"({', '.join(parameters)}); a drafter needs one: state target.geometry, with its rope"
                )
            parameters = dict(next(iter(parameters.values())))
        scaling = dict(config.get("rope_scaling") or {})
        theta_spellings = {
            float(value)
            for value in (parameters.pop("rope_theta", None), config.get("rope_theta"), scaling.pop("rope_theta", None))
            if value is not None
        }
        if len(theta_spellings) > 1:
            raise ValueError(f"rope_theta is given as {sorted(theta_spellings)}")
        types = {
            str(value)
            for source in (parameters, scaling)
            for value in (source.pop("rope_type", None), source.pop("type", None))
            if value is not None
        }
        if len(types) > 1:
            raise ValueError(f"rope type is given as {sorted(types)}")
        partial_spellings = {
            float(value)
            for value in (
                parameters.pop("partial_rotary_factor", None),
                scaling.pop("partial_rotary_factor", None),
                config.get("partial_rotary_factor"),
            )
            if value is not None
        }
        if len(partial_spellings) > 1:
            raise ValueError(f"partial_rotary_factor is given as {sorted(partial_spellings)}")
        return cls(
            theta=theta_spellings.pop() if theta_spellings else 10000.0,
            type=types.pop() if types else "default",
            partial_rotary_factor=partial_spellings.pop() if partial_spellings else 1.0,
            scaling={**scaling, **parameters},
        )

    def rotated_channels(self, head_dim: int) -> int:
        """How many of a head's channels are rotated."""
        return int(head_dim * self.partial_rotary_factor)

    def to_config(self) -> dict[str, Any]:
        """Both spellings, so that readers of either find the same frequencies."""
        nested = {"rope_type": self.type, "rope_theta": self.theta, **self.scaling}
        if self.partial_rotary_factor != 1.0:
            nested["partial_rotary_factor"] = self.partial_rotary_factor
        config: dict[str, Any] = {
            "rope_theta": self.theta,
            "rope_scaling": None if self.type == "default" else {"rope_type": self.type, **self.scaling},
            "rope_parameters": nested,
        }
        if self.partial_rotary_factor != 1.0:
            config["partial_rotary_factor"] = self.partial_rotary_factor
        return config


class DecoderShape(BaseModel):
    """Sizes that a target's decoder layers and a drafter's both have."""

    model_config = _STRICT

    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    vocab_size: int = Field(gt=1)
    rms_norm_eps: float = Field(gt=0)
    max_position_embeddings: int = Field(gt=0)
    rope: Rope

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")
        return self


class TargetGeometry(DecoderShape):
    """The facts of a target that its drafters depend on."""

    architecture: str
    """transformers' model_type."""
    num_layers: int = Field(gt=0)
    tied_head: bool
    """Whether the vocabulary head is the input embedding."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a Hugging Face ``config.json`` (already parsed); a nested ``text_config`` is used where present.

        Raises:
            ValueError: a needed key is missing (named) or rope is contradictory.
        """
        config = config.get("text_config") or config
        missing = [
            key
            for key in (
                "model_type",
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "vocab_size",
            )  # fmt: skip
            if config.get(key) is None
        ]
        if missing:
            raise ValueError(f"config.json lacks {', '.join(missing)}")
        heads = int(config["num_attention_heads"])
        kv_heads = config.get("num_key_value_heads")
        head_dim = config.get("head_dim")
        return cls(
            architecture=str(config["model_type"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(heads if kv_heads is None else kv_heads),
            head_dim=int(config["hidden_size"]) // heads if head_dim is None else int(head_dim),
            vocab_size=int(config["vocab_size"]),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            max_position_embeddings=int(config.get("max_position_embeddings", 32768)),
            tied_head=bool(config.get("tie_word_embeddings", False)),
            rope=Rope.from_config(config),
        )

    @property
    def num_parameters(self) -> int:
        """Parameters of a dense decoder of this shape (an estimate for other kinds)."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        per_layer = attention + 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * per_layer + self.vocab_size * self.hidden_size * (1 if self.tied_head else 2)


def spread_layer_ids(num_layers: int, count: int) -> tuple[int, ...]:
    """Evenly spaced taps from layer 1 to layer N-3 (the rule of DFlash); the middle layer for one tap.

    Ids are zero-based decoder layers: id L is the residual stream after layer L.

    Raises:
        ValueError: the target is too shallow for that many distinct taps.
    """
    if count == 1:
        return (num_layers // 2,)
    ids = tuple(round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count))
    if len(set(ids)) != count or ids[0] < 0 or ids[-1] >= num_layers:
        raise ValueError(f"{num_layers} layers do not hold {count} distinct taps between layer 1 and layer N-3")
    return ids
