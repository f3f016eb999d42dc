"""The speculative algorithm ``ANGELSPEC``: to SGLang's scheduler it is DSPARK, with a worker of ours.

SGLang 0.5.23 asks a registered algorithm for methods that its base class ``CustomSpecAlgo`` lacks, so everything that
is not said otherwise here is answered by DSPARK's own member.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from transformers import AutoConfig

from angelspec.core.engine import ALGORITHM, RAGGED_BACKENDS, RUNNING_REQUESTS
from angelspec.core.errors import AngelspecError
from sglang_ext.compat import CustomSpecAlgo, ServerArgs, SpeculativeAlgorithm
from sglang_ext.engine_hooks import check_applied
from sglang_ext.local_bundle import settle_bundle
from sglang_ext.settings import check_contents, current_plan, draft_folder


class UnsupportedError(AngelspecError):
    """A feature of SGLang that the extension can't be combined with."""


UNSUPPORTED: Mapping[str, tuple[Any, str]] = {
    "pp_size": (1, "pipeline parallelism (--pp-size)"),
    "attn_dp_size": (1, "attention data parallelism (--dp-size with --enable-dp-attention)"),
    "attn_cp_size": (1, "context parallelism (--attn-cp-size)"),
    "dcp_size": (1, "decode context parallelism (--dcp-size)"),
    "enable_kv_cache_sharding": (False, "a sharded key-value cache (--enable-kv-cache-sharding)"),
    "enable_layernorm_sp": (False, "sequence-parallel norms (--enable-layernorm-sp)"),
    "disaggregation_mode": ("null", "disaggregated prefill and decoding (--disaggregation-mode)"),
    "enable_lmcache": (False, "LMCache (--enable-lmcache)"),
    "enable_flexkv": (False, "FlexKV (--enable-flexkv)"),
    "enable_hisparse": (False, "HiSparse (--enable-hisparse)"),
    "enable_two_batch_overlap": (False, "two-batch overlap (--enable-two-batch-overlap)"),
    "enable_pdmux": (False, "multiplexed prefill and decoding (--enable-pdmux)"),
    "tokenizer_worker_num": (1, "several HTTP workers (--tokenizer-worker-num): SGLang loads no plugin in them"),
    "grpc_mode": (False, "the gRPC server (--grpc-mode)"),
    "smg_grpc_mode": (False, "the gRPC server (--smg-grpc-mode)"),
    "enable_hierarchical_cache": (False, "the hierarchical cache (--enable-hierarchical-cache)"),
    "enable_lora": (False, "LoRA adapters (--enable-lora)"),
    "lora_paths": (None, "LoRA adapters (--lora-paths)"),
    "enable_mixed_chunk": (False, "mixed chunks (--enable-mixed-chunk)"),
    "enable_unified_memory": (False, "unified memory (--enable-unified-memory)"),
    "speculative_adaptive": (False, "adaptive steps (--speculative-adaptive): D-cut adapts every step by itself"),
    "speculative_use_block_verification": (False, "block verification (--speculative-use-block-verification)"),
    "enable_watermark": (False, "watermarks (--enable-watermark)"),
    "enable_custom_logit_processor": (False, "custom logit processors (--enable-custom-logit-processor)"),
    "enable_return_hidden_states": (False, "hidden states in answers (--enable-return-hidden-states)"),
    "enable_return_routed_experts": (False, "experts in answers (--enable-return-routed-experts)"),
    "enable_return_indexer_topk": (False, "the indexer's choices in answers (--enable-return-indexer-topk)"),
}
"""Field of the server's arguments to the value that is needed, and what any other means."""


_DRAFT_BACKEND = "speculative_draft_attention_backend"
_POST_CAPTURE = "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"


class AngelSpecAlgorithm(CustomSpecAlgo):
    """Answers as DSPARK, takes its depth from the bundle, and refuses by name what it can't be combined with."""

    def handle_server_args(self, server_args: Any) -> None:
        """Settle the arguments of speculation.

        Raises:
            UnsupportedError: a feature that the extension does not work with.
            BundleError: no bundle, or a wrong one.
        """
        refuse_unsupported(server_args)
        if os.environ.get(_POST_CAPTURE, "").lower() in ("1", "true", "yes"):
            raise UnsupportedError(
                f"{_POST_CAPTURE}: the pools are not whole yet when the costs of a step are measured", mend="unset it"
            )
        check_applied()
        settle_bundle()
        plan = current_plan()
        check_contents(plan, Path(server_args.model_path))
        folder = draft_folder(plan, ranks=server_args.tp_size, dtype=target_dtype(server_args))
        ours = {
            "speculative_draft_model_path": str(folder),
            "speculative_num_steps": 1,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": plan.depth + 1,
        }
        refuse_speculative(server_args, ours)
        for name, value in ours.items():
            setattr(server_args, name, value)
        server_args.speculative_draft_attention_backend = draft_backend(server_args)
        server_args.speculative_draft_model_quantization = None  # SGLang hands the target's down, --quantization
        if server_args.max_running_requests is None:
            server_args.max_running_requests = RUNNING_REQUESTS["cpu" if str(server_args.device) == "cpu" else "cuda"]

    def supports_prefill_shared_read_done(self) -> bool:
        """No: after the target's prefill, entries are still placed by the table of slots."""
        return False

    def get_num_tokens_per_req_for_target_verify(self, num_draft_tokens: int, is_draft_worker: bool) -> int:
        return SpeculativeAlgorithm.DSPARK.get_num_tokens_per_req_for_target_verify(num_draft_tokens, is_draft_worker)

    def build_disagg_draft_input(self, *args: Any, **kwargs: Any) -> Any:
        return SpeculativeAlgorithm.DSPARK.build_disagg_draft_input(*args, **kwargs)


_IN_THE_BUNDLE = (
    "draft_model_path", "draft_model_revision", "num_steps", "eagle_topk", "num_draft_tokens", "dflash_block_size",
    "dspark_block_size", "dspark_sps_table_path", "dspark_confidence_sts_path",
    "dspark_align_verify_tokens_to_graph_tier", "accept_threshold_single", "accept_threshold_acc",
    "use_rejection_sampling", "token_map", "draft_window_size", "draft_sink_size", "adaptive_config",
)  # fmt: skip
"""Settings of SGLang's speculation that say nothing here."""
_NO_RAGGED_BLOCKS = "trtllm_mha"
"""Looks both ways in windows of one width only."""


def refuse_speculative(server_args: Any, ours: Mapping[str, Any]) -> None:
    """Refuse settings of SGLang's own speculation, which would say nothing here.

    Args:
        server_args: SGLang's.
        ours: the values that we set, which may stand there already.

    Raises:
        UnsupportedError: naming every one.
    """
    defaults = {item.name: item.default for item in msgspec.structs.fields(ServerArgs)}
    wrong = []
    for name in (f"speculative_{setting}" for setting in _IN_THE_BUNDLE):
        value = getattr(server_args, name)
        if value not in (defaults[name], ours.get(name)):
            wrong.append(f"--{name.replace('_', '-')} {value}")
    if wrong:
        raise UnsupportedError(
            f"--speculative-algorithm {ALGORITHM} takes from its bundle what these would say: {', '.join(wrong)}",
            mend="leave them out",
        )


def draft_backend(server_args: Any) -> str | None:
    """The attention backend of block drafters; None: the target's.

    Raises:
        UnsupportedError: the one that is asked for can't look both ways in windows of different widths.
    """
    asked = getattr(server_args, _DRAFT_BACKEND)
    inherited = server_args.prefill_attention_backend or server_args.attention_backend  # as SGLang's draft workers do
    if asked is None:
        return "fa4" if inherited == _NO_RAGGED_BLOCKS else None
    if asked == _NO_RAGGED_BLOCKS or asked not in RAGGED_BACKENDS:
        allowed = ", ".join(name for name in RAGGED_BACKENDS if name != _NO_RAGGED_BLOCKS)
        raise UnsupportedError(
            f"attention backend '{asked}' (--{_DRAFT_BACKEND.replace('_', '-')}) can't draft in rows of unequal width",
            mend=f"leave it out, or use one of: {allowed}",
        )
    return asked


def target_dtype(server_args: Any) -> str | None:
    """The target's precision by its name in a config.json; None: it is not known yet (the worker compares).

    Left to itself, SGLang loads a model whose configuration names none in float16.
    """
    named = server_args.dtype
    if named not in (None, "auto"):
        return {"half": "float16", "float": "float32"}.get(named, named)
    try:
        config = AutoConfig.from_pretrained(
            server_args.model_path, revision=server_args.revision, trust_remote_code=server_args.trust_remote_code
        )
    except (OSError, ValueError):
        return None
    dtype = config.get_text_config().dtype
    return None if dtype is None else str(dtype).removeprefix("torch.")


def refuse_unsupported(server_args: Any) -> None:
    """Raises UnsupportedError, naming every argument that rules the extension out."""
    wrong = []
    for field, (needed, name) in UNSUPPORTED.items():
        value = getattr(server_args, field, needed)
        unset = value is None or value == []
        if value != needed and not unset:
            wrong.append(name)
    if wrong:
        raise UnsupportedError(
            f"--speculative-algorithm {ALGORITHM} does not work with " + ", ".join(wrong),
            mend="leave these out, or serve without the extension",
        )
    for field in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        name = getattr(server_args, field, None)
        if name is None:
            continue
        if name not in RAGGED_BACKENDS:
            allowed = ", ".join(f"{name} {backend.where}".strip() for name, backend in RAGGED_BACKENDS.items())
            raise UnsupportedError(
                f"attention backend '{name}' (--{field.replace('_', '-')}) can't verify rows of different widths",
                mend=f"use one of: {allowed}",
            )
        on_gpu = str(getattr(server_args, "device", "cpu")).startswith("cuda")
        if on_gpu and not RAGGED_BACKENDS[name].graphs and not getattr(server_args, "disable_cuda_graph", False):
            raise UnsupportedError(
                f"attention backend '{name}' verifies rows of different widths without CUDA graphs only",
                mend="add --disable-cuda-graph, or use a backend with graphs (fa3, fa4, trtllm_mha)",
            )


def _delegate(name: str) -> Any:
    def call(self: AngelSpecAlgorithm, *args: Any, **kwargs: Any) -> Any:
        return getattr(SpeculativeAlgorithm.DSPARK, name)(*args, **kwargs)

    call.__name__ = name
    return call


def _answer_as_dspark() -> None:
    for name, member in vars(SpeculativeAlgorithm).items():
        if not inspect.isfunction(member) or name.startswith("_") or name in vars(AngelSpecAlgorithm):
            continue
        if name.startswith(("is_", "supports_", "has_")) or not hasattr(CustomSpecAlgo, name):
            setattr(AngelSpecAlgorithm, name, _delegate(name))


_answer_as_dspark()


def register() -> None:
    """Make the algorithm known to SGLang in this process."""

    @SpeculativeAlgorithm.register(ALGORITHM, supports_overlap=True, spec_class=AngelSpecAlgorithm)
    def worker_class(server_args: Any) -> type:
        from sglang_ext.worker import AngelSpecWorker  # heavy, and needed in the scheduler's process alone

        return AngelSpecWorker
