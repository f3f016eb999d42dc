"""Thinking modes: what each means to a target family's chat template.

A drafter is trained for exactly one mode; the same arguments reach the template in rollout, training, evaluation
and on the server (``chat_template_kwargs``), so that every prompt is rendered token for token alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

from angelspec.core.errors import RecipeError, suggest

Mode = Literal["no-think", "high-think"]
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True)
class ModeFamily:
    """How one family of chat templates switches thinking."""

    name: str
    template_arguments: Mapping[Mode, Mapping[str, Any]]
    """Keyword arguments of the chat template, by mode; a mode that is absent is not supported."""
    think_open: str | None = None
    """Text that opens reasoning in an answer."""
    think_close: str | None = None
    """Text that closes reasoning in an answer."""
    default: Mode = "no-think"
    """The mode of a prompt that was rendered without any of the arguments."""

    @property
    def modes(self) -> tuple[Mode, ...]:
        """Supported modes, in the order of ``MODES``."""
        return tuple(mode for mode in MODES if mode in self.template_arguments)

    def arguments(self, mode: Mode) -> dict[str, Any]:
        """Template keyword arguments of ``mode``.

        Raises:
            RecipeError: the family has no such mode.
        """
        if mode not in self.template_arguments:
            raise RecipeError(
                f"mode '{mode}' does not exist for mode family '{self.name}'",
                mend=f"use one of: {', '.join(self.modes)}",
            )
        return dict(self.template_arguments[mode])

    def mode_of(self, arguments: Mapping[str, Any]) -> Mode | None:
        """The mode that template keyword arguments ask for; None where it is none that angelspec knows.

        Arguments that do not switch thinking are ignored.
        """
        switches = {key for by_mode in self.template_arguments.values() for key in by_mode}
        given = {key: value for key, value in arguments.items() if key in switches}
        asked = {**self.template_arguments[self.default], **given}
        return next((mode for mode in self.modes if self.template_arguments[mode] == asked), None)


def _family(
    name: str,
    think_open: str | None,
    think_close: str | None,
    *,
    default: Mode = "no-think",
    **arguments: dict[str, Any],
) -> ModeFamily:
    by_mode = {mode: MappingProxyType(arguments[mode.replace("-", "_")]) for mode in MODES
               if mode.replace("-", "_") in arguments}  # fmt: skip
    return ModeFamily(name, MappingProxyType(by_mode), think_open, think_close, default)


MODE_FAMILIES: Mapping[str, ModeFamily] = MappingProxyType(
    {
        family.name: family
        for family in (
            _family("plain", None, None, no_think={}),
            _family(
                "smollm2", "<think>", "</think>",
                no_think={"enable_thinking": False}, high_think={"enable_thinking": True},
            ),
            _family(
                "qwen3", "<think>", "</think>", default="high-think",
                no_think={"enable_thinking": False}, high_think={"enable_thinking": True},
            ),
            _family(
                "hy3", "<think:opensource>", "</think:opensource>",
                no_think={"reasoning_effort": "no_think"}, high_think={"reasoning_effort": "high"},
            ),
        )
    }
)  # fmt: skip


_OF_ARCHITECTURE = {"qwen3": "qwen3", "qwen3_moe": "qwen3", "hy_v3": "hy3"}


def mode_family_of(architecture: str) -> str | None:
    """The mode family of the chat templates that come with an architecture (transformers' model_type); None: there is
    none that angelspec knows."""
    return _OF_ARCHITECTURE.get(architecture)


def mode_family(name: str) -> ModeFamily:
    """Look a family up by name.

    Raises:
        RecipeError: no such family.
    """
    if name not in MODE_FAMILIES:
        raise RecipeError(
            f"unknown mode family '{name}'{suggest(name, MODE_FAMILIES)}",
            mend=f"use one of: {', '.join(MODE_FAMILIES)}",
        )
    return MODE_FAMILIES[name]
