"""The seam: every internal of SGLang that the extension touches, named once and checked when the plugin loads.

Nothing else in ``sglang_ext`` imports ``sglang`` but the models (layers) and ``cpu/`` (which has its own list).
An upgrade of SGLang is done here: raise ``core.engine.SGLANG_VERSION``, run ``check_contract``, and mend what it names.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from typing import Any

from angelspec.core.engine import SGLANG_VERSION as SUPPORTED
from angelspec.core.errors import AngelspecError
from angelspec.core.installing import install_hint
from sglang_ext.contract import Internal, troubles


class CompatibilityError(AngelspecError):
    """SGLang is missing, of another version, or changed inside."""


_SRT = "sglang.srt."
_DSPARK = f"{_SRT}speculative.dspark_components."
INTERNALS: Mapping[str, str] = {
    "ServerArgs": f"{_SRT}server_args",
    "SpeculativeAlgorithm": f"{_SRT}speculative.spec_info",
    "CustomSpecAlgo": f"{_SRT}speculative.spec_registry",
    "DSparkWorkerV2": f"{_DSPARK}dspark_worker_v2",
    "alloc_verify_window": f"{_DSPARK}dspark_planner",
    "RaggedVerifyLayout": f"{_SRT}speculative.ragged_verify",
    "DFlashVerifyInput": f"{_SRT}speculative.dflash_info",
    "DFlashDraftInputV2": f"{_SRT}speculative.dflash_info_v2",
    "make_draft_input_v2": f"{_SRT}speculative.draft_worker_common",
    "make_draft_block_spec_info": f"{_SRT}speculative.draft_worker_common",
    "GrammarTree": f"{_SRT}speculative.spec_utils",
    "build_grammar_vocab_mask": f"{_SRT}speculative.spec_utils",
    "compute_spec_logprobs": f"{_SRT}layers.logprob_processor",
    "CaptureHiddenMode": f"{_SRT}model_executor.forward_batch_info",
    "ForwardBatch": f"{_SRT}model_executor.forward_batch_info",
    "ForwardMode": f"{_SRT}model_executor.forward_batch_info",
    "GenerationBatchResult": f"{_SRT}managers.utils",
    "HookRegistry": f"{_SRT}plugins.hook_registry",
    "HookType": f"{_SRT}plugins.hook_registry",
    "ModelRegistry": f"{_SRT}models.registry",
    "KVWriteLoc": f"{_SRT}mem_cache.memory_pool",
    "get_parallel": f"{_SRT}runtime_context",
    "get_schedule": f"{_SRT}runtime_context",
    "LogitsProcessorOutput": f"{_SRT}layers.logits_processor",
    "mambaish_config": f"{_SRT}configs.hybrid_arch",
    "UpdateRejected": f"{_SRT}managers.scheduler_components.internal_state",
    "_UpdateHandler": f"{_SRT}managers.scheduler_components.internal_state",
    "BatchedPenalizerOrchestrator": f"{_SRT}sampling.penaltylib",
    "BatchedFrequencyPenalizer": f"{_SRT}sampling.penaltylib",
    "BatchedMinNewTokensPenalizer": f"{_SRT}sampling.penaltylib",
    "BatchedPresencePenalizer": f"{_SRT}sampling.penaltylib",
    "BatchedRepetitionPenalizer": f"{_SRT}sampling.penaltylib",
    "ForwardContext": f"{_SRT}model_executor.forward_context",
    "forward_context": f"{_SRT}model_executor.forward_context",
}
"""Name to the module that holds it."""

SIGNATURES: Mapping[str, tuple[str, ...]] = {
    f"{_DSPARK}dspark_worker_v2:DSparkWorkerV2.__init__": ("server_args", "gpu_id", "nccl_port", "target_worker"),
    f"{_DSPARK}dspark_worker_v2:DSparkWorkerV2._forward_prefill": ("batch", "on_publish", "pp_proxy_tensors"),
    f"{_DSPARK}dspark_worker_v2:DSparkWorkerV2._forward_decode": ("batch", "on_publish", "grammar_barrier"),
    f"{_DSPARK}dspark_planner:alloc_verify_window": (
        "batch", "bs", "device", "verify_num_draft_tokens", "block_pos_offsets", "model_runner", "seq_lens_cpu",
    ),
    f"{_SRT}speculative.ragged_verify:RaggedVerifyLayout.from_verify_lens": ("verify_lens_cpu", "device", "grid"),
    f"{_SRT}speculative.ragged_verify:RaggedVerifyLayout._assemble_device": (
        "verify_lens", "graph_num_tokens", "verify_lens_cpu", "total_verify_tokens",
    ),
    f"{_DSPARK}dspark_worker_v2:DSparkWorkerV2._decode_idle_result": ("on_publish",),
    f"{_DSPARK}dspark_worker_v2:DSparkWorkerV2.note_request_finished": ("rid", "natural_stop"),
    f"{_DSPARK}dspark_worker_v2:DSparkWorkerV2.weight_update_runners": (),
    f"{_DSPARK}dspark_worker_v2:DSparkWorkerV2.init_cuda_graphs": (),
    f"{_DSPARK}dspark_worker_v2:DSparkWorkerV2.prewarm_sampling": (),
    f"{_DSPARK}dspark_worker_v2:DSparkWorkerV2.carries_confidence": (),
    f"{_DSPARK}dspark_worker_v2:DSparkWorkerV2.get_confidence_budget_prepare": (),
    f"{_SRT}plugins.hook_registry:HookRegistry._patched": (),
    f"{_DSPARK}dspark_worker_v2:DSparkWorkerV2.last_shared_read_runner": (),
    f"{_DSPARK}dspark_verify:TargetVerifyExecutor._run_ragged": (
        "batch", "layout", "ragged_window", "sampling_info", "kv_loc_plan",
    ),
    f"{_SRT}mem_cache.kv_index_translator:KVIndexTranslator.plan_uniform_extend": (
        "req_pool_indices", "seq_lens", "seq_lens_cpu", "width",
    ),
    f"{_SRT}model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner.can_run_graph": ("forward_batch",),
    f"{_SRT}model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner.load_batch": ("forward_batch",),
    f"{_SRT}layers.sampler:Sampler.forward": (
        "logits_output", "sampling_info", "return_logprob", "top_logprobs_nums", "token_ids_logprobs", "positions",
    ),
    f"{_SRT}entrypoints.openai.serving_chat:OpenAIServingChat._process_messages": ("request",),
    f"{_SRT}managers.scheduler_components.batch_result_processor:SchedulerBatchResultProcessor._resolve_spec_v2_tokens":
        ("result", "batch"),
    f"{_SRT}mem_cache.kv_cache_builder:create_tree_cache": ("ctx",),
    f"{_SRT}mem_cache.cache_init_params:CacheInitParams": ("is_eagle",),
    f"{_SRT}managers.scheduler_components.internal_state:SchedulerInternalStateController._update_handlers": (),
    f"{_SRT}managers.scheduler_components.internal_state:SchedulerInternalStateController._add_speculative": ("state",),
    f"{_SRT}distributed.parallel_state:GroupCoordinator.broadcast": ("input_", "src"),
    f"{_SRT}distributed.parallel_state:GroupCoordinator.broadcast_object": ("obj", "src"),
    f"{_SRT}distributed.parallel_state:GroupCoordinator.all_gather": ("input_", "dim"),
    f"{_SRT}managers.tokenizer_manager:TokenizerManager.generate_request": ("obj",),
    f"{_SRT}managers.tokenizer_manager:TokenizerManager._accumulate_request_meta_info": (
        "meta_info", "state", "key", "values",
    ),
    f"{_SRT}entrypoints.openai.serving_chat:OpenAIServingChat._convert_to_internal_request": ("request",),
    f"{_SRT}entrypoints.openai.serving_chat:OpenAIServingChat._generate_stream_content": ("content", "request"),
    f"{_SRT}managers.tokenizer_manager:TokenizerManager.update_request_meta_info": (
        "meta_info", "state", "customized_info", "index", "finish_reason",
    ),
}  # fmt: skip
"""``module:qualified name`` to parameters that must exist."""


def __getattr__(name: str) -> Any:
    if name in INTERNALS:
        return getattr(importlib.import_module(INTERNALS[name]), name)
    raise AttributeError(name)


def installed_version() -> str | None:
    """SGLang's version; None: it is not installed."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def check_version() -> None:
    """Raises CompatibilityError for any version but the supported one."""
    found = installed_version()
    if found is None:
        raise CompatibilityError("SGLang is not installed", mend=install_hint("serve"))
    if found != SUPPORTED:
        raise CompatibilityError(
            f"SGLang {found} is installed, but this angelspec works with {SUPPORTED}",
            mend=f"pip install sglang=={SUPPORTED}, or an angelspec that names {found} in angelspec/core/engine.py",
        )


def missing() -> list[str]:
    """Internals that are not there, or lack a parameter: one line each."""
    names = [Internal(f"{module}.{name}") for name, module in INTERNALS.items()]
    return troubles([*names, *(Internal(place, takes=parameters) for place, parameters in SIGNATURES.items())])


def check_contract() -> None:
    """Raises CompatibilityError, naming everything that changed."""
    check_version()
    if lines := missing():
        raise CompatibilityError(
            f"SGLang {SUPPORTED} is not what angelspec expects:\n" + "\n".join(f"  - {line}" for line in lines),
            mend=f"reinstall sglang=={SUPPORTED}; if it is patched, adapt sglang_ext/compat.py",
        )
