"""``config.json`` of a drafter: every public spelling in, ours and the public ones out.

The keys of MTP drafters are in ``mtp_config_dialects``. What the spellings of block drafters disagree on, and how it is
told apart:

* ``num_target_layers`` is the number of taps to AngelSpec and the number of the target's layers to everybody else.
* ``block_size`` counts slots with the anchor, except under ``Qwen3DSparkModel``, where it counts proposals.
* ``sample_from_anchor`` says whether the anchor slot predicts. DFlash, DFlare and DFly never do; of DSpark both kinds
  exist, so there it must be stated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError

from angelspec.core.drafter_config import ALGORITHM_PARTS, BlockDrafterConfig, DrafterConfig, MtpDrafterConfig
from angelspec.core.errors import CheckpointError, suggest
from angelspec.core.geometry import Rope, TargetGeometry, spread_layer_ids
from angelspec.drafters.config_reader import NESTED, ConfigReader
from angelspec.drafters.key_dialects import Dialect
from angelspec.drafters.mtp_config_dialects import (
    MTP_ARCHITECTURES,
    mtp_dialects_of,
    mtp_fields,
    write_mtp_config,
)
from angelspec.drafters.problem import Findings
from angelspec.drafters.speculators_config import flattened, is_speculators, layer_keys, write_speculators_config

OWN_SECTION = "angelspec"
"""Key under which our exports keep the whole configuration in one spelling."""
_SGLANG = "sglang"
_LOADED_BY_SGLANG: set[Dialect] = {"dflash", "dspark", "hy3"}
"""What SGLang loads without the extension."""
_OWN_ARCHITECTURE = "AngelSpecBlockDrafter"
"""For combinations without a public name."""
_SERVED_DSPARK = "Qwen3DSparkModel"
_ARCHITECTURES = {
    "DFlashDraftModel": "dflash",
    "DSparkDraftModel": "dspark",
    _SERVED_DSPARK: "dspark",
    "Qwen3DFlyModel": "dfly",
    "Qwen3TreeDSparkDFlareModel": "dfly",
    _OWN_ARCHITECTURE: None,
}
_NATIVE_ARCHITECTURE = {"dflash": "DFlashDraftModel", "dflare": "DFlashDraftModel", "dspark": "DSparkDraftModel",
                        "dfly": "Qwen3DFlyModel"}  # fmt: skip
_CONFIG = TypeAdapter(DrafterConfig)
_MODEL_TYPE = {"dflash": "dflash", "dflare": "dflash", "dspark": "dspark", "dfly": "qwen3"}


def read_config(
    config: Mapping[str, Any],
    findings: Findings,
    *,
    geometry: TargetGeometry | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> DrafterConfig | None:
    """Our configuration from a parsed ``config.json`` of any dialect; None, with problems, where it can't be had.

    Args:
        config: the parsed file.
        findings: receives every problem.
        geometry: the target's, to fill in the number of its layers where the file does not say it.
        overrides: fields of our configuration that the file lacks or has wrong, stated by the caller.
    """
    before = len(findings.problems)
    if is_speculators(config):
        flat = flattened(config, findings)
        if flat is None:
            return None
        config = flat
    if is_foreign(config):
        _algorithm(config, findings)
        return None
    overrides = dict(overrides or {})
    read, own, architecture = ConfigReader(config, findings), config.get(OWN_SECTION), _architecture(config)
    if architecture in MTP_ARCHITECTURES:
        fields = mtp_fields(
            read, MTP_ARCHITECTURES[architecture], findings, geometry=geometry, overrides=overrides,
            has_own_section=own is not None,
        ) | overrides  # fmt: skip
        if isinstance(own, Mapping) and isinstance(own.get("drafter"), Mapping):
            fields["num_depths"] = overrides.get("num_depths", own["drafter"].get("num_depths"))
        fields = {key: value for key, value in fields.items() if value is not None}
    else:
        fields = _public_fields(read, config, findings, geometry, overrides)
    if isinstance(own, Mapping) and isinstance(own.get("drafter"), Mapping):
        for key, value in own["drafter"].items():
            if key in fields and key not in overrides and not _same(fields[key], value):
                findings.add(
                    "config-conflict", key, f"{key} is {fields[key]} by public keys but {value} under {OWN_SECTION}",
                    mend="keep the value it was trained with",
                )  # fmt: skip
        fields = {**own["drafter"], **overrides}
    if len(findings.problems) > before:
        return None
    try:
        return _CONFIG.validate_python({"family": "block", **fields})
    except ValidationError as error:
        for item in error.errors():
            key = ".".join(str(part) for part in item["loc"][1:])  # behind the family
            message = item["msg"].removeprefix("Value error, ")
            key = key or message.split()[0]
            value = "" if item["type"] == "value_error" else f"{key} is {item.get('input')!r}: "
            findings.add("config-value", key, f"{value}{message}")
        return None


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Rope):
        ours = ours.model_dump(mode="json")
    return (list(ours) if isinstance(ours, tuple) else ours) == (list(theirs) if isinstance(theirs, tuple) else theirs)


def _public_fields(
    read: ConfigReader,
    config: Mapping[str, Any],
    findings: Findings,
    geometry: TargetGeometry | None,
    overrides: dict[str, Any],
) -> dict[str, Any]:
    has_own = OWN_SECTION in config
    architecture, algorithm = _algorithm(config, findings)
    fields: dict[str, Any] = {}
    if algorithm is not None:
        context, head, _ = ALGORITHM_PARTS[algorithm]
        if algorithm == "dfly" and config.get("enable_hidden_correction") is False:
            head = "none"
        fields |= {"context": context, "head": head, "confidence_head": False}
        if head == "markov":
            fields |= _markov_fields(read, findings)
        if head == "correction":
            width = read.get("hidden_correction_intermediate_size")
            fields["correction_intermediate_size"] = read.get("hidden_size") if width is None else width
    fields |= read.layer_shape(overrides)
    if "num_layers" not in overrides:
        fields["num_layers"] = read.need("num_hidden_layers")
    anchor_predicts = read.get("sample_from_anchor")
    if anchor_predicts is None and not has_own and "sample_from_anchor" not in overrides:
        if algorithm == "dspark":
            read.need(
                "sample_from_anchor",
                mend="state whether the anchor slot predicts (DeepSpec: true) or is input only (AngelSpec: false)",
            )
        else:
            findings.note("sample_from_anchor is not stated; false, as in every DFlash, DFlare and DFly")
    fields["sample_from_anchor"] = bool(anchor_predicts)

    if "block_size" not in overrides:
        block_size = read.need(
            "block_size", mend="add the block size that it was trained with (slots, anchor included)"
        )
        counts_proposals = architecture == _SERVED_DSPARK and not fields["sample_from_anchor"]
        fields["block_size"] = block_size + 1 if counts_proposals and isinstance(block_size, int) else block_size
    if "mask_token_id" not in overrides:
        fields["mask_token_id"] = read.need("mask_token_id")
    fields |= _target_fields(read, findings, geometry, overrides)
    fields |= overrides
    return {key: value for key, value in fields.items() if value is not None}


def _architecture(config: Mapping[str, Any]) -> str | None:
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names else None


def _algorithm(config: Mapping[str, Any], findings: Findings) -> tuple[str | None, str | None]:
    """The architecture's name and what it stands for."""
    name, known = _architecture(config), [*_ARCHITECTURES, *MTP_ARCHITECTURES]
    if name is None:
        findings.add(
            "config-key-missing", "architectures", "config.json does not state architectures",
            mend=f"use one of: {', '.join(known)}",
        )  # fmt: skip
        return None, None
    if name not in _ARCHITECTURES:
        findings.add(
            "unsupported", "architectures", f"architecture '{name}' is no drafter{suggest(name, known)}",
            mend=f"use one of: {', '.join(known)}",
        )  # fmt: skip
        return name, None
    algorithm = _ARCHITECTURES[name]
    variant = config.get("model_arch")
    if variant is not None and algorithm is not None:
        allowed = {"dflash": ("dflash", "dflare"), "dspark": ("dspark", "dfly"), "dfly": ("dfly",)}[algorithm]
        if variant not in allowed:
            findings.add(
                "unsupported", "model_arch", f"model_arch '{variant}' under {name}; known: {', '.join(allowed)}"
            )
            return name, None
        algorithm = variant
    fusion = config.get("fusion_type")
    if fusion not in (None, "concat_fc"):
        findings.add("unsupported", "fusion_type", f"fusion_type '{fusion}' is not supported", mend="known: concat_fc")
    return name, algorithm


def _markov_fields(read: ConfigReader, findings: Findings) -> dict[str, Any]:
    rank, kind = read.need("markov_rank"), read.get("markov_head_type", "vanilla")
    if rank is not None and (not isinstance(rank, int) or rank <= 0):
        findings.add("config-value", "markov_rank", f"markov_rank is {rank!r}; it must be a positive integer")
    if kind != "vanilla":
        findings.add(
            "unsupported", "markov_head_type", f"markov_head_type '{kind}' is not supported", mend="known: vanilla"
        )
    confident = bool(read.get("enable_confidence_head", True))
    if confident and not read.get("confidence_head_with_markov", True):
        findings.add(
            "unsupported", "confidence_head_with_markov",
            "confidence_head_with_markov is false: a confidence head beside a Markov head that does not read it",
        )  # fmt: skip
    return {"markov_rank": rank, "confidence_head": confident}


def _target_fields(
    read: ConfigReader, findings: Findings, geometry: TargetGeometry | None, overrides: dict[str, Any]
) -> dict[str, Any]:
    """Layer ids, and the number of the target's layers from whichever key says it."""
    ids, stated = read.get("target_layer_ids"), read.get("num_target_layers")
    count = overrides.get("target_num_layers", read.get("target_num_hidden_layers"))
    if count is None and geometry is not None:
        count = geometry.num_layers
    if isinstance(stated, int) and isinstance(ids, list):
        highest = max((item for item in ids if isinstance(item, int)), default=-1)
        allowed = {len(ids)} if count is None else {len(ids), count}
        means_layers = stated > highest if count is None else stated == count
        if not means_layers and stated not in allowed:
            findings.add(
                "config-conflict", "num_target_layers",
                f"num_target_layers is {stated}, which is neither the number of taps ({len(ids)}) nor of target layers"
                + (f" ({count})" if count is not None else f" (above the highest tap, {highest})"),
            )  # fmt: skip
        if count is None and means_layers:
            count = stated
    if count is None:
        findings.add(
            "config-key-missing", "target_num_hidden_layers", "config.json does not say how deep the target is",
            mend="add target_num_hidden_layers to config.json",
        )  # fmt: skip
    if ids is None and "target_layer_ids" not in overrides:
        if isinstance(stated, int) and isinstance(count, int) and 0 < stated < count:
            ids = list(spread_layer_ids(count, stated))
            findings.note(f"target_layer_ids is not stated; {ids}, by DFlash's rule")
        else:
            read.need("target_layer_ids")
    return {"target_num_layers": count, "target_layer_ids": tuple(ids) if isinstance(ids, list) else ids}


def is_foreign(config: Mapping[str, Any]) -> bool:
    """Whether a parsed ``config.json`` is that of a model which neither is a drafter nor can hold one."""
    name = _architecture(config)
    return name is not None and name not in (*_ARCHITECTURES, *MTP_ARCHITECTURES) and not is_speculators(config)


def holds_a_target(config: Mapping[str, Any]) -> bool:
    """Whether a parsed ``config.json`` is that of a whole target, in which an MTP layer may lie."""
    return MTP_ARCHITECTURES.get(_architecture(config), "angelspec") != "angelspec"


def dialects_of(config: DrafterConfig) -> tuple[Dialect, ...]:
    """The dialects that can say this drafter without loss."""
    if isinstance(config, MtpDrafterConfig):
        return mtp_dialects_of(config)
    if (config.context, config.head) == ("projection", "none") and not config.confidence_head:
        return ("angelspec", "dflash", "vllm-speculators")
    if (config.context, config.head) == ("projection", "markov"):
        return ("angelspec", "dspark", "vllm-speculators")
    return ("angelspec",)


def dialect_called(name: str, config: DrafterConfig) -> Dialect:
    """The dialect of this name; ``sglang`` is the one of the drafter's that SGLang loads by itself.

    Raises:
        CheckpointError: there is none, or it can't say this drafter.
    """
    possible: dict[str, Dialect] = {dialect: dialect for dialect in dialects_of(config)}
    for dialect in set(possible) & _LOADED_BY_SGLANG:
        possible[_SGLANG] = dialect
    if name in possible:
        return possible[name]
    raise CheckpointError(
        f"dialect '{name}' can't express {_described(config)}"
        if name in (*get_args(Dialect), _SGLANG)
        else f"there is no dialect '{name}'{suggest(name, possible)}",
        mend=f"use one of: {', '.join(possible)}"
        + ("" if name != _SGLANG else "; `angelspec serve` takes every drafter as it is"),
    )


def _described(config: DrafterConfig) -> str:
    if isinstance(config, MtpDrafterConfig):
        return f"an MTP drafter with mlp '{config.mlp}'" + ("" if config.qk_norm else " and qk_norm false")
    return f"a drafter of context '{config.context}' and head '{config.head}'"


def write_config(
    config: DrafterConfig,
    *,
    dialect: Dialect,
    dtype: str,
    target_config: Mapping[str, Any] | None = None,
    target_name: str | None = None,
) -> dict[str, Any]:
    """``config.json`` of an export.

    Args:
        config: ours.
        dialect: one of :func:`dialects_of`.
        dtype: of the tensors that are written, e.g. "bfloat16".
        target_config: parsed ``config.json`` of the target, for the dialects that keep it (hy3, qwen3) or name what it
            is (vllm-speculators).
        target_name: the target's on the hub, for vllm-speculators.
    """
    if dialect == "vllm-speculators" and isinstance(config, BlockDrafterConfig):
        architectures = list((target_config or {}).get("architectures") or [])
        return write_speculators_config(config, dtype=dtype, verifier=target_name, architectures=architectures)
    if isinstance(config, MtpDrafterConfig):
        written = write_mtp_config(config, dialect=dialect, dtype=dtype, target_config=target_config)
    else:
        written = _write_block_config(config, dialect=dialect, dtype=dtype)
    # a public dialect can say all of a block drafter; of an MTP drafter it can't say the number of depths
    if dialect == "angelspec" or isinstance(config, MtpDrafterConfig):
        written[OWN_SECTION] = {"drafter": config.model_dump(mode="json")}
    return written


def _write_block_config(config: BlockDrafterConfig, *, dialect: Dialect, dtype: str) -> dict[str, Any]:
    algorithm = config.algorithm if config.algorithm in ALGORITHM_PARTS else None
    if algorithm is not None and (config.head != "markov") and config.confidence_head:
        algorithm = None
    served_dspark = dialect == "dspark"
    architecture = _SERVED_DSPARK if served_dspark else _NATIVE_ARCHITECTURE.get(algorithm, _OWN_ARCHITECTURE)
    block = {
        "block_size": config.block_size - 1 if served_dspark else config.block_size,
        "sample_from_anchor": config.sample_from_anchor,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "num_target_layers": len(config.target_layer_ids) if dialect == "angelspec" else config.target_num_layers,
    }
    written: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": "qwen3" if dialect != "angelspec" else _MODEL_TYPE.get(algorithm, "qwen3"),
        **layer_keys(config),
        "draft_vocab_size": config.vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "target_num_hidden_layers": config.target_num_layers,
        **block,
        NESTED: dict(block),
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if algorithm == "dflare":
        written["model_arch"] = "dflare"
    if config.head == "correction":
        written["enable_hidden_correction"] = True
        written["hidden_correction_intermediate_size"] = config.correction_intermediate_size
    if config.head == "markov":
        written["markov_rank"] = config.markov_rank
        written["markov_head_type"] = "vanilla"
        written["enable_confidence_head"] = config.confidence_head
        written["confidence_head_with_markov"] = config.confidence_head
    return written
