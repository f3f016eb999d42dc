"""SGLang's flags as a user passes them through: read, refused where the extension can't honour them, completed.

SGLang's parser takes ``--name value``, ``--name=value`` and unambiguous beginnings of a name; all three count here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from angelspec.core.engine import CPU_BACKEND, RAGGED_BACKENDS, RUNNING_REQUESTS
from angelspec.serving.failures import ServingError

Device = str
"""``cuda`` or ``cpu``."""

_SHORTEST_BEGINNING = 7
"""``--enabl`` could be many flags; SGLang itself refuses ambiguous ones."""

_REFUSED: Mapping[str, str] = {
    "--enable-hierarchical-cache": "the hierarchical cache does not hold the drafters' state",
    "--enable-hicache": "the hierarchical cache does not hold the drafters' state",
    "--hicache": "the hierarchical cache does not hold the drafters' state",
    "--enable-lmcache": "LMCache does not hold the drafters' state",
    "--enable-flexkv": "FlexKV does not hold the drafters' state",
    "--enable-lora": "LoRA changes the target that the drafters were trained for",
    "--lora": "LoRA changes the target that the drafters were trained for",
    "--max-lora": "LoRA changes the target that the drafters were trained for",
    "--max-loaded-loras": "LoRA changes the target that the drafters were trained for",
    "--disaggregation": "prefill and decoding must run in one engine: the drafters' state is made by prefill",
    "--enable-pd": "prefill and decoding must run in one engine: the drafters' state is made by prefill",
    "--enable-kv-cache-sharding": "every rank holds the drafters' keys and values whole",
    "--enable-layernorm-sp": "every rank needs the target's whole hidden states",
    "--enable-dp-attention": "the drafters run with every row of an engine",
    "--enable-mixed-chunk": "a forward can't both prefill and verify rows of different widths",
    "--enable-custom-logit-processor": "its changes would not reach the positions of a draft",
    "--enable-return-hidden-states": "the hidden states of a verification are the drafters'",
    "--enable-return-routed-experts": "the experts of a verification are not told apart by row",
    "--enable-return-indexer-topk": "the indexer's choices in a verification are not told apart by row",
    "--decoupled-spec": "drafting and verification must run in one engine",
    "--enable-hisparse": "HiSparse does not hold the drafters' state",
    "--enable-two-batch-overlap": "a forward verifies the whole batch",
    "--enable-pdmux": "prefill and decoding must take turns: the drafters' state is made by prefill",
    "--grpc-mode": "requests are labelled by the HTTP server",
    "--smg-grpc-mode": "requests are labelled by the HTTP server",
    "--encoder-only": "prefill and decoding must run in one engine: the drafters' state is made by prefill",
    "--speculative": "the extension sets speculation up by itself, from the bundle",
    "--model-path": "the target comes from --target or the bundle",
    "--model": "the target comes from --target or the bundle",
}
"""Names, or beginnings of names that stand for a family of flags, and why they are refused."""
_FAMILIES = (
    "--hicache",
    "--enable-lora",
    "--lora",
    "--max-lora",
    "--disaggregation",
    "--enable-pd",
    "--decoupled-spec",
    "--speculative",
)
_ONE: Mapping[tuple[str, ...], str] = {
    ("--pp-size", "--pipeline-parallel-size"): "speculation needs all layers in one stage",
    ("--attn-cp-size", "--attention-context-parallel-size"): "the drafters are not sharded over ranks",
    ("--dcp-size", "--decode-context-parallel-size"): "the drafters are not sharded over ranks",
    ("--tokenizer-worker-num",): "SGLang loads no plugin in further HTTP workers, so they would not label requests",
}
"""Sizes that must be 1, by their names, and why."""
TENSOR_PARALLEL = ("--tp-size", "--tensor-parallel-size", "--tp")
"""Names of the number of tensor-parallel ranks."""
_BACKENDS = ("--attention-backend", "--decode-attention-backend", "--prefill-attention-backend")
_SECRET = ("--api-key", "--admin-api-key", "--ssl-keyfile-password")
"""Flags whose values nobody else may read."""
_WEIGHT_BYTES: Mapping[str, int] = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
"""Of one number, by the names of ``--dtype`` and of a target's config.json."""
_KV_BYTES: Mapping[str, float] = {
    "bf16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "mxfp8": 1 + 1 / 32, "nvfp4": 1 / 2 + 1 / 16,
    "fp4_mx_block16": 1 / 2 + 1 / 16,
}  # fmt: skip
"""Of one number with its share of a block's scale, by the names of ``--kv-cache-dtype``."""


@dataclass(frozen=True)
class Flag:
    """One flag of a command line."""

    name: str
    values: tuple[str, ...] = ()
    """Nothing for a switch, several for a list."""

    @property
    def value(self) -> str | None:
        """The first value; None: a switch."""
        return self.values[0] if self.values else None

    @property
    def words(self) -> list[str]:
        """As on a command line."""
        return [self.name, *self.values]

    @property
    def is_secret(self) -> bool:
        """Whether its values are keys or passwords; any beginning of such a flag's name counts."""
        return self.name != "--ssl-keyfile" and any(name.startswith(self.name) for name in _SECRET)

    @property
    def shown(self) -> list[str]:
        """The same for other eyes: keys are not shown."""
        return [self.name, *("***" for _ in self.values)] if self.is_secret else self.words


def parse_flags(arguments: Sequence[str]) -> list[Flag]:
    """The flags of a command line, in order.

    Raises:
        ServingError: something that is neither a flag nor the value of one.
    """
    flags: list[Flag] = []
    for argument in arguments:
        if argument.startswith("--"):
            name, separator, value = argument.partition("=")
            flags.append(Flag(name, (value,) if separator else ()))
        elif flags:
            flags[-1] = Flag(flags[-1].name, (*flags[-1].values, argument))
        else:
            raise ServingError(f"'{argument}' is no flag of SGLang", mend="write flags as --name value")
    return flags


def means(given: str, name: str) -> bool:
    """Whether SGLang's parser reads ``given`` as ``name``."""
    return given == name or (len(given) >= _SHORTEST_BEGINNING and name.startswith(given))


def flag_value(flags: Sequence[Flag], *names: str) -> str | None:
    """The value of a flag under any of its names, the last one given; None: it is absent or a switch."""
    values = [flag.value for flag in flags if any(means(flag.name, name) for name in names)]
    return values[-1] if values else None


def is_given(flags: Sequence[Flag], *names: str) -> bool:
    """Whether a flag is given under any of its names."""
    return any(means(flag.name, name) for flag in flags for name in names)


def check_flags(flags: Sequence[Flag], *, device: Device) -> None:
    """Refuse, by name, what can't be served.

    Raises:
        ServingError: the first such flag, and why.
    """
    ragged = [name for name, backend in RAGGED_BACKENDS.items() if backend.device == device]
    for flag in flags:
        for name, why in _REFUSED.items():
            if means(flag.name, name) or (name in _FAMILIES and flag.name.startswith(name)):
                raise ServingError(f"{flag.name} can't be used here: {why}", mend="leave it out")
        for names, why in _ONE.items():
            if any(means(flag.name, name) for name in names) and flag.value != "1":
                raise ServingError(f"{flag.name} {flag.value} can't be used here: {why}", mend="leave it out")
        if any(means(flag.name, name) for name in _BACKENDS) and flag.value not in ragged:
            raise ServingError(
                f"{flag.name} {flag.value} can't be used here: it can't verify rows of different widths in one "
                f"forward (on {device})",
                mend=f"leave it out, or use one of: {', '.join(ragged)}",
            )


def default_flags(
    flags: Sequence[Flag], *, device: Device, capability: tuple[int, int] | None, max_total_tokens: int
) -> dict[str, str | None]:
    """What is set where the user sets nothing.

    Args:
        flags: the user's.
        device: what the server runs on.
        capability: of the GPU; None on a CPU.
        max_total_tokens: pool of a CPU server.
    """
    if device == "cpu":
        defaults: dict[str, str | None] = {
            "--device": "cpu",
            "--attention-backend": CPU_BACKEND,
            "--dtype": "float32",
            "--max-running-requests": str(RUNNING_REQUESTS["cpu"]),
            "--max-total-tokens": str(max_total_tokens),
            # of all memory, other processes' share included: --max-total-tokens is what bounds the pool
            "--mem-fraction-static": "0.8",
            "--disable-cuda-graph": None,
        }
    else:
        defaults = {
            "--attention-backend": _gpu_backend(capability),
            "--max-running-requests": str(RUNNING_REQUESTS["cuda"]),
        }
        if not RAGGED_BACKENDS[flag_value(flags, *_BACKENDS) or _gpu_backend(capability)].graphs:
            defaults["--disable-cuda-graph"] = None
    return {name: value for name, value in defaults.items() if not is_given(flags, name)}


def _gpu_backend(capability: tuple[int, int] | None) -> str:
    major = capability[0] if capability else 0
    return "fa3" if major in (8, 9) else "trtllm_mha" if major == 10 else "flashinfer"


def kv_bytes(flags: Sequence[Flag], *, model_dtype: str) -> float | None:
    """Bytes of one number in the drafters' key and value pool; None: not known."""
    value = flag_value(flags, "--kv-cache-dtype")
    if value is not None and value != "auto":
        return _KV_BYTES.get(value)
    return dtype_bytes(flags, model_dtype=model_dtype)


def dtype_bytes(flags: Sequence[Flag], *, model_dtype: str) -> int | None:
    """Bytes of one weight; None: not known."""
    value = flag_value(flags, "--dtype")
    return _WEIGHT_BYTES.get(model_dtype if value in (None, "auto") else value)
