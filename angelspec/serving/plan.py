"""What would be served, decided and checked before anything starts: parts, engine, flags, memory, the exact command."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from angelspec.core.byte_sizes import byte_size
from angelspec.core.engine import ALGORITHM, BUNDLE_VARIABLE, CPU_PLATFORM, PLATFORM_VARIABLE, WAITING_STATES
from angelspec.core.errors import BundleError
from angelspec.core.modes import mode_family
from angelspec.serving.flags import (
    TENSOR_PARALLEL,
    Device,
    Flag,
    check_flags,
    default_flags,
    dtype_bytes,
    flag_value,
    is_given,
    kv_bytes,
    parse_flags,
)
from angelspec.serving.resolving import ResolvedBundle, ResolvedDrafter

_CPU_POOL_BYTES = 2 * 2**30
_CPU_POOL_TOKENS = (2048, 32768)
"""Fewest and most tokens of a CPU server's pool where the user says nothing."""


@dataclass(frozen=True)
class Hardware:
    """What the server would run on."""

    device: Device
    description: str
    capability: tuple[int, int] | None = None
    """Of the GPU."""


@dataclass(frozen=True)
class Memory:
    """Estimated memory, in bytes; None: not estimated, because the size of its numbers is not known."""

    target_weights: int | None
    """None as well for a model that is not dense."""
    drafter_weights: Mapping[str, int | None]
    target_bytes_per_token: int | None
    draft_bytes_per_token: Mapping[str, int | None]
    """Keys and values of each drafter's layers, per token of the pool."""
    pool_tokens: int | None
    """None: SGLang decides by the memory that is free."""
    waiting_states: int | None
    """Target states that wait for their drafters' entries, of all requests that may run at a time."""

    @property
    def draft_pool_bytes_per_token(self) -> int | None:
        """What the extra pools add to every token."""
        sizes = [size for size in self.draft_bytes_per_token.values() if size is not None]
        return sum(sizes) if len(sizes) == len(self.draft_bytes_per_token) else None


@dataclass(frozen=True)
class ServePlan:
    """Everything that starting needs."""

    resolved: ResolvedBundle
    host: str
    port: int
    hardware: Hardware
    engine_version: str
    flags: tuple[Flag, ...]
    """The user's, and the defaults after them."""
    defaults: Mapping[str, str | None]
    """Flags that the user did not give."""
    memory: Memory
    notes: tuple[str, ...]

    @property
    def url(self) -> str:
        """Where the server answers, as seen from this machine."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host
        scheme = "https" if is_given(self.flags, "--ssl-certfile") else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def command(self) -> list[str]:
        """The server's command line, keys included; the environment is ``environment``."""
        return [*self._own_words, *(word for flag in self.flags for word in flag.words)]

    @property
    def secrets(self) -> tuple[str, ...]:
        """Keys and passwords among the flags, which nobody else may read."""
        return tuple(value for flag in self.flags if flag.is_secret for value in flag.values if value)

    @property
    def _own_words(self) -> list[str]:
        ours = {
            "--model-path": str(self.resolved.target.folder),
            "--speculative-algorithm": ALGORITHM,
            "--host": self.host,
            "--port": str(self.port),
        }
        return [sys.executable, "-m", "sglang.launch_server", *(word for item in ours.items() for word in item)]

    def environment(self, bundle_file: str) -> dict[str, str]:
        """Variables that the server needs besides those that are set."""
        variables = {BUNDLE_VARIABLE: bundle_file, "PYTHONUNBUFFERED": "1"}
        if self.hardware.device == "cpu":
            variables |= {PLATFORM_VARIABLE: CPU_PLATFORM, "CUDA_VISIBLE_DEVICES": ""}
        return variables

    def shell_line(self, bundle_file: str) -> str:
        """The same for a shell, with ``***`` in place of keys."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment(bundle_file).items()]
        shown = [*self._own_words, *(word for flag in self.flags for word in flag.shown)]
        return " ".join([*variables, shlex.join(shown)])


def make_plan(
    resolved: ResolvedBundle,
    *,
    arguments: Sequence[str],
    host: str,
    port: int,
    hardware: Hardware,
    engine_version: str,
) -> ServePlan:
    """Decide how a bundle is served.

    Args:
        resolved: the bundle, found and fitting.
        arguments: the user's flags for SGLang.
        host: to listen on.
        port: to listen on.
        hardware: of this machine; ``--device`` among the arguments overrules it.
        engine_version: SGLang's, as ``engine_package.check_engine`` found it.

    Raises:
        ServingError: a flag that the extension can't support.
        BundleError: drafters that were trained with different chat templates.
    """
    given = parse_flags(arguments)
    wanted = flag_value(given, "--device")
    if wanted is not None and wanted != hardware.device:
        hardware = Hardware(wanted, f"{hardware.description}, device {wanted} as asked for")
    check_flags(given, device=hardware.device)
    geometry = resolved.target.geometry
    target_kv = geometry.num_layers * 2 * geometry.num_kv_heads * geometry.head_dim
    numbers = {drafter.entry.name: drafter.config.cached_numbers_per_token for drafter in resolved.drafters}
    fewest, most = _CPU_POOL_TOKENS
    pool_tokens = min(most, max(fewest, _CPU_POOL_BYTES // (4 * (target_kv + sum(numbers.values())))))
    defaults = default_flags(
        given, device=hardware.device, capability=hardware.capability, max_total_tokens=pool_tokens
    )
    if (template := shared_chat_template(resolved.drafters)) is not None and not is_given(given, "--chat-template"):
        defaults["--chat-template"] = str(template)
    if not is_given(given, "--served-model-name"):
        defaults["--served-model-name"] = resolved.target.name
    flags = (*given, *(Flag(name, () if value is None else (value,)) for name, value in defaults.items()))
    tokens = flag_value(flags, "--max-total-tokens")
    kv, weight = (measure(flags, model_dtype=resolved.target.dtype) for measure in (kv_bytes, dtype_bytes))
    memory = Memory(
        target_weights=_bytes(geometry.num_parameters, weight) if _is_dense(geometry.architecture) else None,
        drafter_weights={drafter.entry.name: _bytes(drafter.num_weights, weight) for drafter in resolved.drafters},
        target_bytes_per_token=_bytes(target_kv, kv),
        draft_bytes_per_token={name: _bytes(count, kv) for name, count in numbers.items()},
        pool_tokens=int(tokens) if tokens and tokens.isdigit() else None,
        waiting_states=_bytes(_waiting_numbers(resolved.drafters, flags), weight),
    )
    return ServePlan(
        resolved=resolved,
        host=host,
        port=port,
        hardware=hardware,
        engine_version=engine_version,
        flags=flags,
        defaults=defaults,
        memory=memory,
        notes=tuple(_notes(resolved, flags, defaults)),
    )


def _waiting_numbers(drafters: Sequence[ResolvedDrafter], flags: Sequence[Flag]) -> int:
    """Numbers of the states that all running requests may have waiting; see ``sglang_ext.pending``."""
    tapped = {layer for drafter in drafters for layer in drafter.config.target_layer_ids} or {0}
    deepest = max((drafter.entry.depth for drafter in drafters), default=0)
    hidden = max((drafter.config.target_hidden_size for drafter in drafters), default=0)
    running = flag_value(flags, "--max-running-requests")
    requests = int(running) if running and running.isdigit() else 0
    return requests * (deepest + 1 + WAITING_STATES) * (len(tapped) + 1) * hidden


def _bytes(count: int, each: float | None) -> int | None:
    return None if each is None else round(count * each)


def _is_dense(architecture: str) -> bool:
    return architecture in ("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma2", "gemma3")


def shared_chat_template(drafters: Sequence[ResolvedDrafter]) -> Path | None:
    """The chat template that all trained drafters were trained with; None: their target's own, or nobody knows.

    Raises:
        BundleError: they were trained with different ones.
    """
    files = [drafter.chat_template for drafter in drafters if drafter.manifest is not None]
    texts = {None if file is None else file.read_bytes() for file in files}
    if len(texts) > 1:
        raise BundleError(
            f"the drafters were trained with different chat templates: {', '.join(sorted(set(map(str, files))))}",
            mend="serve them apart",
        )
    return next(iter(files), None)


def _notes(resolved: ResolvedBundle, flags: Sequence[Flag], defaults: Mapping[str, str | None]) -> list[str]:
    notes = [f"{drafter.entry.name}: {note}" for drafter in resolved.drafters for note in drafter.notes]
    notes += [
        f"{drafter.entry.name} is not trained: nothing of what it proposes will be accepted"
        for drafter in resolved.drafters
        if not drafter.is_trained
    ]
    family = mode_family(resolved.bundle.target.mode_family)
    if family.name == "plain":
        notes.append("how this target's thinking is switched is not known: every request counts as no-think")
    if not resolved.bundle.of_mode(family.default):
        notes.append(
            f"requests that say nothing of thinking are {family.default}, for which there is no drafter: they decode "
            "plainly (see chat_template_kwargs, or label them with custom_params.mode)"
        )
    if (ranks := flag_value(flags, *TENSOR_PARALLEL) or "1") != "1":
        geometry = resolved.target.geometry
        weight = dtype_bytes(flags, model_dtype=resolved.target.dtype)
        copies = _bytes(2 * geometry.vocab_size * geometry.hidden_size, weight)
        notes.append(
            f"each of the {ranks} tensor-parallel ranks holds the drafters and their pools whole, and a copy of the "
            f"target's embedding and head (up to {byte_size(copies, unknown='a size that is not known')})"
        )
    if defaults.get("--attention-backend") == "flashinfer":
        notes.append(
            "flashinfer verifies rows of different widths without CUDA graphs only; fa3 (A100 to H200) has them"
        )
    for drafter in resolved.drafters:
        if not any(item.drafter == drafter.entry.name for item in resolved.bundle.acceptance):
            notes.append(
                f"{drafter.entry.name}: its acceptance was not measured, so the choice by load learns it first"
            )
    return notes
