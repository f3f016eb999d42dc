"""Hooks into SGLang's processes: entries of tokens, the prefix cache, the information page and the switch (scheduler),
labels and metadata (HTTP)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from angelspec.core.engine import ALGORITHM, SPECULATION_SWITCH
from sglang_ext import compat, http_hooks
from sglang_ext.answers import TOKENS_KEY, step_entries
from sglang_ext.settings import current_plan

_COMPONENTS = "sglang.srt.managers.scheduler_components."
_SHOWN = {"name", "algorithm", "family", "mode", "depth", "source"}


def hooks() -> Mapping[str, Any]:
    """Dotted path of a method to what is put around it."""
    return {
        f"{_COMPONENTS}batch_result_processor.SchedulerBatchResultProcessor._resolve_spec_v2_tokens": _resolve_tokens,
        f"{_COMPONENTS}internal_state.SchedulerInternalStateController._update_handlers": _update_handlers,
        f"{_COMPONENTS}internal_state.SchedulerInternalStateController._add_speculative": _add_state,
        "sglang.srt.mem_cache.kv_cache_builder.create_tree_cache": _create_tree_cache,
        **http_hooks.hooks(),
    }


def register() -> None:
    """Register every hook; SGLang applies them after all plugins are loaded."""
    for target, hook in hooks().items():
        compat.HookRegistry.register(target, hook, compat.HookType.AROUND)


def check_applied() -> None:
    """Raises CompatibilityError, naming every hook that SGLang did not apply: it only logs them."""
    lost = [target for target in hooks() if target not in compat.HookRegistry._patched]
    if lost:
        raise compat.CompatibilityError(
            "SGLang did not apply hooks: " + ", ".join(lost), mend="see its log for why; is the version supported?"
        )


def _resolve_tokens(original: Any, processor: Any, result: Any, batch: Any) -> Any:
    before = [req.is_retracted or req.finished() for req in batch.reqs]
    tokens = original(processor, result, batch)
    report = getattr(result, "angelspec_step", None)
    if report is not None:
        for row, (req, skipped) in enumerate(zip(batch.reqs, before, strict=True)):
            if not skipped:
                if req.customized_info is None:
                    req.customized_info = {}
                req.customized_info.setdefault(TOKENS_KEY, []).extend(step_entries(report, row))
    return tokens


def _create_tree_cache(original: Any, context: Any) -> Any:
    """MTP's entry of a token reads the token after it, too, so a prefix ends one token before what follows may differ:
    SGLang's cache for EAGLE, whose keys are pairs of tokens."""
    if context.server_args.speculative_algorithm == ALGORITHM:
        context.params.is_eagle = any(place.drafter.family == "mtp" for place in current_plan().places)
    return original(context)


def _update_handlers(original: Any, controller: Any) -> Any:
    def validate(key: str, value: Any) -> None:
        if value not in (0, 1):
            raise compat.UpdateRejected(f"{key} must be 1 (on) or 0 (off), got {value!r}.")

    def apply(key: str, value: Any) -> None:
        controller.scheduler.draft_worker.set_speculation(value == 1)

    handlers = original(controller)
    if not _is_ours(controller.scheduler.draft_worker):
        return handlers
    settled = {key: one for key, one in handlers.items() if not key.startswith(("dspark_", "speculative_"))}
    return {**settled, SPECULATION_SWITCH: compat._UpdateHandler(validate, apply)}


def _add_state(original: Any, controller: Any, state: dict[str, Any]) -> Any:
    outcome = original(controller, state)
    worker = controller.scheduler.draft_worker
    if _is_ours(worker):
        worker.forget_finished()
        state["angelspec"] = describe(worker)
    return outcome


def _is_ours(worker: Any) -> bool:
    """Whether a scheduler's draft worker is the extension's: an engine made in Python may have another beside a bundle
    that the environment names."""
    from sglang_ext.worker import AngelSpecWorker  # heavy, and needed in the scheduler's process alone

    return isinstance(worker, AngelSpecWorker)


def describe(worker: Any) -> dict[str, Any]:
    """What the information page says of the extension."""
    plan = current_plan()
    bundle = plan.bundle
    ratios = bundle.dcut.ratios
    return {
        "bundle": bundle.name,
        "target": bundle.target.source,
        "mode_family": bundle.target.mode_family,
        "speculation": "on" if worker.speculation else "off",
        "drafters": [place.drafter.model_dump(mode="json", include=_SHOWN) for place in plan.places],
        "acceptance": [item.model_dump(mode="json") for item in bundle.acceptance],
        "costs": None if worker.costs.measured is None else worker.costs.measured.model_dump(mode="json"),
        "calibrations": {name: one.model_dump(mode="json") for name, one in worker.calibrations.items()},
        "draft_bytes_per_token": plan.draft_numbers_per_token * worker.draft_model_runner.kv_cache_dtype.itemsize,
        "ratios": list(ratios) if ratios else None,
        "counters": worker.ledger.counters.as_dict(),
    }
