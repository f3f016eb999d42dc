"""Measures what the parts of a step cost, when the engine starts: a verification by rows and slots, a draft by rows.

The forwards are the real ones, over slots of the empty pools; their content is of no account. What a step takes beyond
its parts (the scheduler, sampling, results) is learnt from served steps: ``worker`` sees how much later each one ends.

Shapes: B rows, N verified slots of all rows.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from angelspec.core.files import write_json_atomic
from angelspec.core.fingerprint import fingerprint
from angelspec.core.locations import cache_folder
from angelspec.core.step_costs import DraftPoint, MeasuredFor, StepCosts, VerifyPoint
from sglang_ext import compat
from sglang_ext.drafting import DraftRows, DraftRunner
from sglang_ext.settings import EnginePlan

logger = logging.getLogger(__name__)
CONTEXT = 192
"""Tokens per row while measuring."""
_REVISION = 5
"""Raised when the extension's own part of a step takes another time than before."""
_ROUNDS = 3
_SECONDS_AT_MOST = 45.0


def measured_for(plan: EnginePlan, worker: Any) -> MeasuredFor:
    """What costs that are measured here hold for."""
    runner = worker.model_runner
    device = str(worker.device)
    if device.startswith("cuda"):
        hardware = torch.cuda.get_device_name()
    else:
        hardware = f"{_processor()}, {torch.get_num_threads()} threads"
    return MeasuredFor(
        hardware=hardware,
        engine=f"sglang {compat.SUPPORTED}",
        target=plan.bundle.target.digest or _digest(Path(runner.model_config.model_path) / "config.json"),
        drafters={
            place.drafter.name: place.drafter.digest or _digest(place.folder / "config.json") for place in plan.places
        },
        flags={
            "dtype": str(runner.dtype).removeprefix("torch."),
            "attention_backend": type(runner.attn_backend).__name__,
            "max_running_requests": int(compat.get_schedule().max_running_requests or 0),
            "draft_backend": type(worker.draft_model_runner.attn_backend).__name__,
            "kv_cache_dtype": str(runner.kv_cache_dtype).removeprefix("torch."),
            "cuda_graphs": ", ".join(map(str, graph_tiers(runner))),
            "quantization": runner.model_config.quantization,
            "overlap": not compat.get_schedule().disable_overlap_schedule,
            "page_size": worker.page_size,
            "tp_size": compat.get_parallel().tp_size,
            "drafting": ", ".join(
                f"{place.drafter.name} {place.drafter.depth}/{place.drafter.shortlist}" for place in plan.places
            ),
            "revision": _REVISION,
        },
    )


def _digest(path: Path) -> str:
    return fingerprint({"text": path.read_text(encoding="utf-8")}) if path.is_file() else "unknown"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()} x {len(os.sched_getaffinity(0))}"
    except OSError:
        pass
    return platform.processor() or platform.machine()


def find_costs(plan: EnginePlan, worker: Any, drafts: DraftRunner) -> StepCosts:
    """The bundle's costs if they hold here, else those of an earlier start, else measured now and kept.

    The first rank decides, and its figures hold on all.
    """
    here = measured_for(plan, worker)
    kept = cache_folder() / "costs" / f"{here.fingerprint}.json"
    ranks = worker.ranks
    if (known := ranks.agree(_known_costs(plan, here, kept) if ranks.is_first else None)) is not None:
        return known
    costs = ranks.agree(Profiler(worker, drafts).measure().model_copy(update={"measured_for": here}))
    if ranks.is_first:
        write_json_atomic(kept, costs.model_dump(mode="json"))
    return costs


def _known_costs(plan: EnginePlan, here: MeasuredFor, kept: Path) -> StepCosts | None:
    if plan.bundle.costs is not None:
        if not (stale := plan.bundle.stale_costs(here)):
            return plan.bundle.costs
        logger.warning("the bundle's costs do not hold here (%s): measuring", "; ".join(stale))
    if kept.is_file():
        try:
            return StepCosts.model_validate_json(kept.read_text(encoding="utf-8"))
        except ValueError:
            logger.warning("%s can't be read: measuring again", kept)
    return None


def graph_tiers(runner: Any) -> tuple[int, ...]:
    """Slots of the captured graphs, ascending."""
    graphs = runner.decode_cuda_graph_runner
    return tuple(sorted(graphs.capture_num_tokens or ())) if graphs is not None else ()


def graph_batch_size(runner: Any) -> int | None:
    """Rows of the largest batch that runs from a graph; None: there are no graphs."""
    graphs = runner.decode_cuda_graph_runner
    return int(graphs.max_bs) if graphs is not None else None


def padded_slots(runner: Any, slots: int, *, batch_size: int) -> int:
    """Slots that a verification of so many takes: those of the smallest captured graph that holds them."""
    most = graph_batch_size(runner)
    if most is None or batch_size > most:  # run without a graph, where what pads would be computed for nothing
        return slots
    return next((tier for tier in graph_tiers(runner) if tier >= slots), slots)


class Profiler:
    """One measurement of an idle engine.

    Args:
        worker: the speculative worker.
        drafts: its drafters.
    """

    def __init__(self, worker: Any, drafts: DraftRunner) -> None:
        self._worker, self._drafts = worker, drafts
        self._width = worker.verify_num_draft_tokens
        pool = worker.model_runner.req_to_token_pool.req_to_token
        slots = worker.model_runner.max_total_num_tokens
        most = min(int(compat.get_schedule().max_running_requests or 1), pool.shape[0] - 1)
        self._context = max(min(CONTEXT, slots // most - self._width - 1, pool.shape[1] - self._width), 1)
        self._sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if size < most] + [most]
        stride = self._context + self._width
        rows = torch.arange(most * stride, device=pool.device, dtype=pool.dtype).view(most, stride)
        pool[1 : most + 1, :stride] = rows % max(slots - 1, 1) + 1

    @torch.inference_mode()
    def measure(self) -> StepCosts:
        """Time every part."""
        began = time.perf_counter()
        verification = []
        for size in self._sizes:
            for wide in sorted({1, 2, self._width // 2, self._width}):
                verification.append(
                    VerifyPoint(batch_size=size, slots=size * wide, seconds=self._time(self._verifier(size, wide)))
                )
            if self._worker.ranks.agree(time.perf_counter() - began > _SECONDS_AT_MOST):
                break
        sizes = [point.batch_size for point in verification if point.slots == point.batch_size]
        drafting = {
            name: tuple(DraftPoint(rows=size, seconds=self._time(self._drafter(name, size))) for size in sizes)
            for name in self._drafts.model.served
        }
        seconds = time.perf_counter() - began
        logger.info("measured the costs of a step in %.1f s", seconds)
        for slot in range(1, sizes[-1] + 1):
            self._drafts.pending.reset(slot, 0)
        runner = self._worker.model_runner
        return StepCosts(
            prefix_tokens=self._context,
            drafting=drafting,
            verification=tuple(verification),
            tiers=graph_tiers(runner),
            tiers_up_to=graph_batch_size(runner),
        )

    def _time(self, run: Callable[[], Any]) -> float:
        run()
        times = []
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            run()
            if str(self._worker.device).startswith("cuda"):
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return min(times)  # what other processes take from the machine only ever adds

    def _rows(self, size: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        device = self._worker.device
        request_B = torch.arange(1, size + 1, device=device)
        length_B = torch.full((size,), self._context, dtype=torch.int64, device=device)
        return request_B, length_B, [self._context] * size

    def _verifier(self, size: int, wide: int) -> Callable[[], Any]:
        runner, width = self._worker.model_runner, self._width
        device = self._worker.device
        request_B, length_B, lengths = self._rows(size)
        more = padded_slots(runner, size * wide, batch_size=size) - size * wide
        layout = compat.RaggedVerifyLayout.from_verify_lens(
            verify_lens_cpu=[wide] * size, device=device, grid=[size * wide + more]
        )
        ids = torch.ones(size * wide + more, dtype=torch.int64, device=device)
        positions = F.pad((length_B[:, None] + torch.arange(wide, device=device)).flatten(), (0, more))
        window_index = F.pad(torch.arange(size * wide, device=device), (0, more), value=-1)

        def run() -> Any:
            info = compat.DFlashVerifyInput(
                draft_token=ids,
                positions=positions,
                draft_token_num=width,
                custom_mask=None,
                capture_hidden_mode=compat.CaptureHiddenMode.FULL,
                ragged_verify_layout=layout,
            )
            translator = runner.kv_index_translator
            plan = translator.plan_uniform_extend(
                req_pool_indices=request_B, seq_lens=length_B, seq_lens_cpu=torch.tensor(lengths), width=wide
            )
            batch = compat.ForwardBatch(
                forward_mode=compat.ForwardMode.TARGET_VERIFY,
                batch_size=size,
                input_ids=ids,
                req_pool_indices=request_B,
                seq_lens=length_B,
                out_cache_loc=plan.write_virtual,
                seq_lens_sum=sum(lengths) + size * wide,
                seq_lens_cpu=torch.tensor(lengths) + wide,
                positions=positions,
                spec_algorithm=compat.SpeculativeAlgorithm.DSPARK,
                spec_info=info,
                capture_hidden_mode=compat.CaptureHiddenMode.FULL,
            )
            plan.bind(batch, translator, cols=window_index)  # what pads a graph is written to the sink
            graphs = runner.decode_cuda_graph_runner
            if graphs is not None and graphs.can_run_graph(batch):
                graphs.load_batch(batch)
            else:
                runner.attn_backend.init_forward_metadata(batch)
            output = runner.forward(batch, skip_attn_backend_init=True).logits_output
            return output.next_token_logits.argmax(-1).tolist()

        return run

    def _drafter(self, name: str, size: int) -> Callable[[], Any]:
        pending = self._drafts.pending
        request_B, length_B, lengths = self._rows(size)
        slots = request_B.tolist()
        rows = DraftRows(slots, request_B, length_B, lengths, torch.ones_like(request_B))

        def run() -> Any:
            for slot in slots:  # as after a step that committed two tokens
                pending.length[slot] = self._context
                pending.enter(name, slot, self._context - 2)
            return self._drafts.draft(name, rows).confidence_BK.tolist()

        return run
