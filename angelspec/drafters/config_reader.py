"""Looking up keys of a ``config.json`` that may be spelled in two places, and what all families read alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from angelspec.core.geometry import Rope
from angelspec.drafters.problem import Findings

NESTED = "dflash_config"
"""Section in which block drafters may keep some keys."""


class ConfigReader:
    """Looks keys up at the top level and under ``dflash_config``; the two must agree."""

    def __init__(self, config: Mapping[str, Any], findings: Findings) -> None:
        nested = config.get(NESTED)
        self.config = config
        self.places = [config, nested if isinstance(nested, Mapping) else {}]
        self.findings = findings

    def get(self, key: str, default: Any = None) -> Any:
        """The key's value; the default where it is absent or null."""
        stated = [place[key] for place in self.places if place.get(key) is not None]
        if len(stated) == 2 and stated[0] != stated[1]:
            self.findings.add(
                "config-conflict", key, f"{key} is {stated[0]} at the top level but {stated[1]} under {NESTED}",
                mend="keep the value it was trained with",
            )  # fmt: skip
        return stated[0] if stated else default

    def need(self, key: str, *, mend: str | None = None) -> Any:
        """The key's value; None, and a problem, where it is absent or null."""
        value = self.get(key)
        if value is None:
            self.findings.add(
                "config-key-missing", key, f"config.json does not state {key}", mend=mend or f"add {key} to config.json"
            )
        return value

    def layer_shape(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """The fields that both families read alike: widths, heads, vocabulary, norm, positions."""
        fields: dict[str, Any] = {}
        for ours, theirs in {
            "hidden_size": "hidden_size", "intermediate_size": "intermediate_size",
            "num_heads": "num_attention_heads", "vocab_size": "vocab_size",
        }.items():  # fmt: skip
            if ours not in overrides:
                value = fields[ours] = self.need(theirs)
                if value is not None and (not isinstance(value, int) or value <= 0):
                    self.findings.add("config-value", theirs, f"{theirs} is {value!r}; it must be a positive integer")
        fields["num_kv_heads"] = self.get("num_key_value_heads", fields.get("num_heads"))
        head_dim = self.get("head_dim")
        width, heads = fields.get("hidden_size"), fields.get("num_heads")
        if head_dim is None and isinstance(width, int) and isinstance(heads, int) and heads > 0:
            head_dim = width // heads
        fields["head_dim"] = head_dim
        fields["rms_norm_eps"] = self.get("rms_norm_eps", 1e-6)
        fields["max_position_embeddings"] = self.get("max_position_embeddings", 32768)
        fields["target_hidden_size"] = self.get("target_hidden_size", fields.get("hidden_size"))
        try:
            fields["rope"] = Rope.from_config(self.config)
        except (ValueError, TypeError) as error:
            self.findings.add(
                "config-conflict", "rope", f"rope: {error}", mend="keep one spelling of the target's rope"
            )
        pruned = self.get("draft_vocab_size")
        if pruned is not None and pruned != self.get("vocab_size"):
            self.findings.add(
                "unsupported", "draft_vocab_size", f"draft_vocab_size {pruned} differs from vocab_size: pruned"
            )
        return fields
