"""Every name of SGLang that the CPU platform builds on, and the check that this SGLang has them as we know them.

Nothing here imports SGLang before :func:`missing` is called: the platform is resolved in the middle of SGLang's own
imports.
"""

from __future__ import annotations

from sglang_ext.contract import Internal, troubles

ATTENTION = "sglang.srt.layers.attention"
MEMORY = "sglang.srt.mem_cache.memory_pool"
PLATFORMS = "sglang.srt.platforms"

ASSIGN_REQ_TO_TOKEN = "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func"
CHAIN_SAMPLING = "sglang.kernels.ops.speculative.reject_sampling.chain_speculative_sampling_triton"

FORWARD_PARAMETERS = ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache")

REPLACED: tuple[Internal, ...] = (
    Internal(
        ASSIGN_REQ_TO_TOKEN,
        ("req_pool_indices", "req_to_token", "start_offset", "end_offset", "out_cache_loc", "batch_size"),
    ),
    Internal(
        CHAIN_SAMPLING,
        (
            "predicts",
            "accept_index",
            "accept_token_num",
            "candidates",
            "retrive_index",
            "retrive_next_token",
            "retrive_next_sibling",
            "uniform_samples",
            "uniform_samples_for_final_sampling",
            "target_probs",
            "draft_probs",
            "threshold_single",
            "threshold_acc",
            "deterministic",
            "block_verification",
        ),
    ),
)
"""Functions that a hook replaces; our stand-in takes the same parameters."""

USED: tuple[Internal, ...] = (
    # the platform
    Internal(f"{PLATFORMS}.cpu.CpuDeviceMixin"),
    Internal(f"{PLATFORMS}.device_mixin.PlatformEnum.OOT"),
    Internal(f"{PLATFORMS}.interface.PlatformCapabilities"),
    Internal(f"{PLATFORMS}.interface.SRTPlatform.get_default_attention_backend", ("self",)),
    Internal(
        f"{PLATFORMS}.interface.SRTPlatform.get_default_speculative_draft_attention_backend", ("self", "algorithm")
    ),
    Internal(f"{PLATFORMS}.interface.SRTPlatform.get_compile_backend", ("self", "mode")),
    Internal(f"{PLATFORMS}.interface.SRTPlatform.get_dispatch_key_name", ("self",)),
    Internal(f"{PLATFORMS}.interface.SRTPlatform.get_kv_pool_cls", ("self", "kind")),
    Internal(f"{PLATFORMS}.interface.SRTPlatform.get_speculative_cache_locs_fn", ("self",)),
    Internal(f"{PLATFORMS}.interface.SRTPlatform.supports_speculative_algorithm", ("self", "algorithm")),
    Internal(
        f"{PLATFORMS}.interface.SRTPlatform.supports_speculative_draft_attention_backend",
        ("self", "algorithm", "backend"),
    ),
    Internal(f"{PLATFORMS}.interface.SRTPlatform.init_backend", ("self",)),
    Internal(f"{PLATFORMS}.interface.SRTPlatform.apply_server_args_defaults", ("self", "server_args")),
    Internal("sglang.srt.server_args.ServerArgs", fields=("sleep_on_idle",)),
    Internal(
        "sglang.kernels.ops.speculative.cache_locs.assign_extend_cache_locs_func",
        (
            "req_pool_indices",
            "req_to_token",
            "start_offset",
            "end_offset",
            "batch_size",
            "draft_token_num",
            "device",
        ),
    ),
    # attention
    Internal(f"{ATTENTION}.attention_registry.ATTENTION_BACKENDS"),
    Internal(f"{ATTENTION}.base_attn_backend.AttentionBackend.init_forward_metadata", ("self", "forward_batch")),
    Internal(f"{ATTENTION}.torch_native_backend.TorchNativeAttnBackend.forward_decode", FORWARD_PARAMETERS),
    Internal(f"{ATTENTION}.torch_native_backend.TorchNativeAttnBackend.forward_extend", FORWARD_PARAMETERS),
    Internal("sglang.srt.layers.radix_attention.AttentionType.ENCODER_ONLY"),
    Internal("sglang.srt.layers.radix_attention.RadixAttention"),
    Internal(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch",
        fields=(
            "forward_mode",
            "seq_lens",
            "req_pool_indices",
            "out_cache_loc",
            "spec_info",
            "extend_prefix_lens",
            "extend_seq_lens",
        ),
    ),
    Internal("sglang.srt.model_executor.model_runner.ModelRunner"),
    Internal("sglang.srt.arg_groups.choices.add_draft_attention_backend_choices"),
    # the pool
    Internal(f"{MEMORY}.MHATokenToKVPool._init_kv_copy_and_warmup", ("self",)),
    Internal(f"{MEMORY}.MHATokenToKVPool._store_kv_layer", ("self", "layer_idx", "loc", "cache_k", "cache_v")),
    Internal(f"{MEMORY}.MHATokenToKVPool.get_key_buffer", ("self", "layer_id")),
    Internal(f"{MEMORY}.MHATokenToKVPool.get_value_buffer", ("self", "layer_id")),
    # operators and weights
    Internal(f"{PLATFORMS}.interface.SRTPlatform.post_load_model", ("self", "model")),
    Internal("sglang.kernels.fused_op.BaseFusedOp.register_oot_forward", ("op_cls", "fn", "platform_key")),
    Internal(
        "sglang.srt.layers.layernorm.RMSNorm.forward_native",
        ("self", "x", "residual", "post_residual_addition", "quant_linear"),
    ),
    Internal(
        "sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward_native",
        ("self", "positions", "query", "key", "offsets", "fused_set_kv_buffer_arg"),
    ),
    Internal("sglang.srt.layers.quantization.unquant.UnquantizedEmbeddingMethod.apply", ("self", "layer", "x", "bias")),
    Internal("sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply", ("self", "layer", "x", "bias")),
    Internal(
        "sglang.srt.model_executor.model_runner_components.weight_updater._unsupported_derived_weight_cache_error",
        ("model",),
    ),
    # the hooks
    Internal("sglang.srt.plugins.hook_registry.HookRegistry.register", ("target", "hook", "hook_type", "source")),
    Internal("sglang.srt.plugins.hook_registry.HookType.REPLACE"),
    Internal("sglang.srt.speculative.ragged_verify.RaggedVerifyLayout", fields=("verify_lens", "verify_lens_cpu")),
    Internal(
        "sglang.srt.speculative.dflash_info.DFlashVerifyInput", fields=("draft_token_num", "ragged_verify_layout")
    ),
)
"""Names that we subclass, override or call."""


def missing() -> list[str]:
    """Names in this SGLang that are absent or take other parameters than we were written for; empty if all is well."""
    return troubles((*REPLACED, *USED))
