"""The worker: SGLang's DSPARK worker with a decode step of ours.

A step: plan whom to draft for and with which drafter; draft; cut; verify all rows, each as wide as it pays, in one
target forward; accept; keep the states of what was committed. Prefill keeps the states of the prompt for every drafter
of the request's mode, so a request may change its drafter whenever the planner finds a better one.

Shapes: B batch rows, W slots of a row (one more than the deepest drafter proposes), K = W - 1, N verified slots, F
width of the captured features, D hidden, V vocabulary.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from angelspec.core.calibration import Calibration
from angelspec.core.engine import WAITING_STATES
from angelspec.core.geometry import TargetGeometry
from angelspec.core.step_costs import StepCosts
from angelspec.ops.step_plan import DraftPlan
from angelspec.ops.step_planner import Step, StepPlanner
from sglang_ext import compat
from sglang_ext.accept import accept, draw
from sglang_ext.answers import TOKENS_KEY, opening
from sglang_ext.clock import StepMarks, StepTimer, step_clock
from sglang_ext.drafting import DraftRows, DraftRunner, PromptRun
from sglang_ext.engine_hooks import check_applied
from sglang_ext.ledger import Ledger
from sglang_ext.live_costs import LiveCosts
from sglang_ext.metrics import StepReport
from sglang_ext.models.graphs import cuda_recorder, graph_sizes
from sglang_ext.outcome import Outcome
from sglang_ext.penalties import RowPenalties, is_penalised
from sglang_ext.pending import PendingStates
from sglang_ext.profiling import find_costs, graph_tiers
from sglang_ext.prometheus import Exporter
from sglang_ext.ranks import Ranks
from sglang_ext.requests import RequestBook, ServedRequest
from sglang_ext.settings import check_target, current_plan
from sglang_ext.transfer import on_device
from sglang_ext.verification import add_logprobs, adjust_logits, pack, verify

logger = logging.getLogger(__name__)
_BROKEN_AT_MOST = 3
"""A request whose drafts were not finite so often is decoded plainly from then on."""


class AngelSpecWorker(compat.DSparkWorkerV2):
    """Holds every drafter of the bundle beside the target."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_applied()
        self.plan = current_plan()
        target = kwargs["target_worker"].model_runner.model_config
        if compat.mambaish_config(target) is not None:
            raise compat.CompatibilityError(
                f"the target {target.model_path} has recurrent layers, whose states the extension does not roll back",
                mend="serve it without the extension",
            )
        check_target(self.plan, TargetGeometry.from_config(target.hf_config.to_dict()))
        super().__init__(*args, **kwargs)
        if self.draft_model_runner.dtype != self.model_runner.dtype:
            raise compat.CompatibilityError(
                f"drafters were loaded in {self.draft_model_runner.dtype} and the target in {self.model_runner.dtype}",
                mend="name the target's precision with --dtype",
            )
        self._drop_epilogue()
        self.model_runner.model.logits_processor.keep_last_hidden_states = True
        self.requests = RequestBook(self.plan.bundle)
        self.ranks = Ranks(compat.get_parallel().tp_group)
        self.ledger = Ledger(Exporter() if self.server_args.enable_metrics and self.ranks.is_first else None)
        self.speculation = True
        """Whether steps may be drafted for; an operator switches it."""
        self._width = self.verify_num_draft_tokens
        self._drafts: DraftRunner | None = None
        self._given_up: list[ServedRequest] = []
        self._owner: dict[int, str] = {}
        self._timer = StepTimer(step_clock(self.device))
        self._step_ended: tuple[Any, tuple[str, ...]] | None = None
        self._weights_changed = False
        self._outcome: Outcome | None = None
        self._kept = torch.cuda.Event() if str(self.device).startswith("cuda") else None
        """When the states of the last step's tokens lie in their rings; None: on a CPU, at once."""
        self.use_costs(None)

    # ------------------------------------------------------------------------------------------------ set-up

    def _drop_epilogue(self) -> None:
        """Keep SGLang's own acceptance out of the target's graphs: ours comes after them, and its buffers are large."""
        if self._verify_epilogue is not None:
            self.model_runner.capture_tail_hooks.remove(self._verify_epilogue.capture_hook)
            self._verify_epilogue = self._verify_executor.verify_epilogue = None

    @property
    def carries_confidence(self) -> bool:
        return False

    def get_confidence_budget_prepare(self) -> None:
        return None

    def init_cuda_graphs(self) -> None:
        """No graph of the draft model by the engine: its forwards are ours (``models.graphs``)."""

    def weight_update_runners(self) -> list[tuple[str, Any]]:
        """None of ours: an update of weights is the target's, whose embedding and head the drafters then take anew."""
        self._weights_changed = True
        return []

    def _take_weights(self) -> None:
        """After an update of the target's weights, in step on all ranks."""
        if self._weights_changed:
            self._weights_changed = False
            model = self.draft_model
            model.attach_shared_modules(embed_tokens=model.embed_tokens, lm_head=model.lm_head)

    def prewarm_sampling(self) -> Any:
        """The last thing before the engine serves: record the drafters' graphs and measure what a step costs."""
        outcome = super().prewarm_sampling()
        if graph_tiers(self.model_runner):  # the engine runs from graphs
            sizes = graph_sizes(int(compat.get_schedule().max_running_requests or 1))
            self._ready().model.record_choices(sizes, record=cuda_recorder())
        self.use_costs(find_costs(self.plan, self, self._ready()))
        if self.ranks.is_first:
            logger.info("angelspec: %s", self._active())
        return outcome

    def _active(self) -> str:
        """What is active, in a line."""
        costs, bundle = self.costs.current, self.plan.bundle
        plain = None if costs is None else costs.seconds(1, drafted={}, slots=1)
        drafters = [
            f"{place.drafter.name} ({place.drafter.algorithm or place.drafter.family}, {place.drafter.mode}, "
            f"{place.drafter.depth} proposals)"
            for place in self.plan.places
        ]
        ratio = bundle.dcut.ratio
        cut = "D-cut step by step" if ratio is None else f"keep ratio {ratio:g}"
        lone = "" if plain is None else f"; a plain step of one request takes {1e3 * plain:.1f} ms"
        return f"drafters {', '.join(drafters)}; {cut}; {len(bundle.routes)} fixed routes, the others by load{lone}"

    def use_costs(self, costs: StepCosts | None) -> None:
        """Plan by these costs from now on; None: by none, so that only rows whose request names a drafter draft."""
        self.costs = LiveCosts(costs, ranks=self.ranks, counters=self.ledger.counters)
        self._planner = StepPlanner.of(self.plan.bundle, costs or StepCosts())
        for known in list(self.requests):
            self._open(known)

    @property
    def calibrations(self) -> dict[str, Calibration]:
        """What served requests have taught about the drafters' confidences, by drafter."""
        return self._planner.calibrations

    def set_speculation(self, on: bool) -> None:
        """Switch drafting on or off; running requests go on."""
        self.speculation = on

    def _ready(self) -> DraftRunner:
        if self._drafts is None:
            runner, config = self.draft_model_runner, self.plan.places[0].config
            pending = PendingStates(
                runner.req_to_token_pool.req_to_token.shape[0],
                capacity=self._width + WAITING_STATES,
                tap_width=len(self.plan.layer_ids) * config.target_hidden_size,
                hidden_size=config.target_hidden_size,
                drafters=[place.drafter.name for place in self.plan.places],
                dtype=self.model_runner.dtype,
                device=self.device,
            )
            self._drafts = DraftRunner(self.draft_model, runner, pending, self.ranks)
        return self._drafts

    def _open(self, known: ServedRequest) -> None:
        plain = known.plain_because is not None
        self._planner.open(
            known.rid,
            workload=known.workload,
            drafters=() if plain else known.route.drafters,
            forced=known.route.forced and not plain,
            ratio=known.route.ratio,
        )

    def _rows(self, reqs: Any) -> list[ServedRequest]:
        rows, new = self.requests.rows(reqs, costs=self.costs.current)
        for known in new:
            self._planner.close(known.rid)
            self._open(known)
        self._forget(self.requests.forget_idle())
        return rows

    def forget_finished(self) -> None:
        """Count the requests that ended with their first token, whose end nobody tells."""
        self._forget(self.requests.forget_idle(now=True))

    def _forget(self, idle: list[ServedRequest]) -> None:
        """Close requests that the book has dropped."""
        for known in idle:
            if known.req.finished():
                self.ledger.finish(known)
            self._planner.close(known.rid)

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        """Called when a decoding request ends, before its tokens go to the prefix cache."""
        super().note_request_finished(rid=rid, natural_stop=natural_stop)
        known = self.requests.get(rid)
        if known is None:
            return
        if self._outcome is not None and self._outcome.ends(known):
            self._settle()
        self.requests.finish(rid)
        if known.anchor is not None and known.states_of and self._owner.get(known.slot) == rid:
            if self._kept is not None:  # this is another stream than the one that keeps states
                torch.cuda.current_stream().wait_event(self._kept)
            self._ready().enter(known.states_of, [known.slot], anchors=known.anchor)
        self.ledger.finish(known)
        self._planner.close(known.rid)

    # ----------------------------------------------------------------------------------------------- prefill

    def _forward_prefill(self, batch: Any, on_publish: Any, pp_proxy_tensors: Any = None) -> Any:
        if batch.forward_mode.is_idle():
            return self._decode_idle_result(on_publish=on_publish)
        self._settle()
        self._take_weights()
        reqs = list(batch.reqs)
        words_N = batch.input_ids.clamp(max=self.model_runner.model_config.vocab_size - 1)  # pictures have hashes there
        starts, counts = list(batch.prefix_lens), list(batch.extend_lens)
        slots = batch.req_pool_indices_cpu.tolist()
        result = self.target_worker.forward_batch_generation(
            batch, pp_proxy_tensors=pp_proxy_tensors, capture_hidden_mode=compat.CaptureHiddenMode.FULL
        )
        self.ranks.sync(result.next_token_ids)
        self._step_ended = None
        output = result.logits_output
        result.new_seq_lens = batch.seq_lens
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        drafts, begin = self._ready(), 0
        taps_NF, hidden_ND = output.hidden_states, output.last_hidden_states
        if taps_NF is None or hidden_ND is None:
            raise RuntimeError("the target's hidden states were not captured: angelspec's hooks were not applied")
        runs: dict[tuple[str, ...], list[PromptRun]] = {}
        for known, slot, start, count in zip(self._rows(reqs), slots, starts, counts, strict=True):
            mine = self._owner.get(slot) == known.rid and known.prefilled_to == start
            # of a mode without drafters no states are kept
            continues = start > 0 and mine and (not known.states_of or drafts.pending.length[slot] == start)
            if not continues:
                drafts.pending.reset(slot, start)
            if is_penalised(known.req.sampling_params):  # what was decoded before a retraction is fed to new ones
                known.penalties, known.already_put_out = None, tuple(known.req.output_ids)
            self._owner[slot], known.slot, known.anchor = known.rid, slot, None
            known.prefilled_to = known.length = start + count
            self.ledger.counters.prefill(start=start, continues=continues, again=bool(known.record.steps))
            if known.states_of:
                runs.setdefault(known.states_of, []).append(PromptRun(slot, start, begin, begin + count))
            begin += count
        for names, of_mode in runs.items():
            drafts.prefill(names, of_mode, tokens_N=words_N, taps_NF=taps_NF, hidden_ND=hidden_ND)
        output.hidden_states = output.last_hidden_states = None  # large, and nobody else's
        output.customized_info = {TOKENS_KEY: [opening(self.requests.get(req.rid)) for req in reqs]}
        result.next_draft_input = compat.make_draft_input_v2(
            bonus_tokens=result.next_token_ids, new_seq_lens=result.new_seq_lens
        )
        return result

    # ------------------------------------------------------------------------------------------------ decode

    def _forward_decode(
        self, batch: Any, on_publish: Any, grammar_barrier: Any = None, coordination_plan: Any = None
    ) -> Any:
        if batch.spec_info is None:
            batch.spec_info = compat.DFlashDraftInputV2.create_idle_input(device=self.device)
        if batch.forward_mode.is_idle():
            return self._decode_idle_result(on_publish=on_publish)
        began = time.perf_counter()
        self._settle()
        learnt = time.perf_counter()
        self._take_weights()
        drafts, rows = self._ready(), self._rows(batch.reqs)
        draft_input, size, width = batch.spec_info, len(batch.reqs), self._width
        slots, lengths = batch.req_pool_indices_cpu.tolist(), [known.length for known in rows]
        anchor_B = draft_input.bonus_tokens.view(-1)
        self._follow(drafts, rows, slots, lengths)
        window = compat.alloc_verify_window(
            batch=batch,
            bs=size,
            device=self.device,
            verify_num_draft_tokens=width,
            block_pos_offsets=self._block_pos_offsets,
            model_runner=self.model_runner,
            seq_lens_cpu=batch.seq_lens_cpu if batch.seq_lens_cpu is not None else draft_input.nxt_kv_lens_cpu,
        )
        prepared = time.perf_counter()

        step = self._begin(rows)
        planned, drafting = time.perf_counter(), self._timer.mark()
        block_BW = anchor_B.new_zeros(size, width)
        block_BW[:, 0] = anchor_B
        confidences: list[list[float]] = [[] for _ in rows]
        for name, indices in step.rows_by_drafter.items():
            self._draft(name, indices, rows, slots, lengths, batch, block_BW, confidences)
        drafted, draft_end = time.perf_counter(), self._timer.mark()
        if step.rows_by_drafter:
            step = self._planner.cut(step, confidences)
            kept = list(step.kept)
        else:
            kept = [0] * size
            step = replace(step, kept=tuple(kept))
        packed = pack(self.model_runner, window, block_BW, kept)
        row_N, offset_N = packed.row_N, packed.offset_N
        was_packed, verifying = time.perf_counter(), self._timer.mark()

        # before the target runs, or the copy to the host would wait for it
        tree = compat.GrammarTree.from_linear_chain(block_BW[:, :1].contiguous()) if batch.has_grammar else None
        output, graphed = verify(self._verify_executor, batch, packed, window.kv_loc_plan)
        info, logits_NV = batch.sampling_info, output.next_token_logits
        self._open_penalties(rows)
        adjust_logits(batch, rows, logits_NV, row_N, block_BW, kept=kept, tree=tree, barrier=grammar_barrier)
        keeps_logits = batch.return_logprob and not (info is None or info.is_all_greedy)
        drawn_N = draw(
            self.model_runner.sampler,
            logits_NV.clone() if keeps_logits else logits_NV,
            info,
            row_N=row_N,
            position_N=packed.position_N,
        )
        self.ranks.sync(drawn_N)
        kept_B = packed.layout.verify_lens.to(torch.int64) - 1
        outcome = accept(drawn_N, block_BW[:, 1:], row_N=row_N, offset_N=offset_N, kept_B=kept_B)
        commit_B = outcome.correct_B + 1
        new_lengths_B = batch.seq_lens + commit_B
        if batch.return_logprob:
            add_logprobs(batch, output, outcome.tokens_BW, row_N, offset_N)
        if on_publish is not None:
            on_publish(new_lengths_B)
        committed = commit_B.tolist() if step.rows_by_drafter else [1] * size
        outputs = [known.length - len(known.req.origin_input_ids) + 1 for known in rows]
        for index, known in enumerate(rows):
            known.anchor = outcome.bonus_B[index : index + 1]
            known.length += committed[index]
        if drafts.keep(rows, slots, kept=kept, committed=committed, output=output, block_BW=block_BW):
            # it read the table of slots after the target did, whose event says that nobody reads it any more
            self.last_shared_read_runner.shared_read_done_event = None
        if self._kept is not None:
            self._kept.record()
        output.hidden_states = output.last_hidden_states = None
        verified, verify_end = time.perf_counter(), self._timer.mark()

        result = compat.GenerationBatchResult(
            logits_output=output,
            next_token_ids=outcome.tokens_BW.reshape(-1),
            accept_lens=commit_B.to(torch.int32),
            cap_lens=packed.layout.verify_lens.to(torch.int32),
            can_run_cuda_graph=graphed,
            next_draft_input=compat.make_draft_input_v2(bonus_tokens=outcome.bonus_B, new_seq_lens=new_lengths_B),
            speculative_num_draft_tokens=width,
            new_seq_lens=new_lengths_B,
        )
        result.angelspec_step = StepReport(
            routes=step.drafters,
            drafted=[len(one) for one in confidences],
            verified=kept,
            committed=committed,
            graphed=bool(graphed),
            reasons={row: known.plain_because for row, known in enumerate(rows) if known in self._given_up},
        )
        self._outcome = Outcome(step, rows, result.angelspec_step, outputs)
        before, self._step_ended = self._step_ended, (verify_end, step.requests)
        self._timer.add(
            StepMarks(
                batch_size=size,
                drafted={name: len(indices) for name, indices in step.rows_by_drafter.items()},
                slots=size + sum(kept),
                drafting=(drafting, draft_end),
                verifying=(verifying, verify_end),
                before=before[0] if before is not None and before[1] == step.requests else None,
                plan_seconds=learnt - began + planned - prepared + was_packed - drafted,
                other_seconds=prepared - learnt + time.perf_counter() - verified,
            )
        )
        for timed in self._timer.passed():
            self.ledger.time(timed.times)
            self.costs.observe(timed)
        if self.costs.renewed():
            self._planner.use(self.costs.current)
        return result

    def _follow(self, drafts: DraftRunner, rows: list[ServedRequest], slots: list[int], lengths: list[int]) -> None:
        """Rows whose states were not seen up to here (they should be) begin anew, and are counted."""
        for known, slot, length in zip(rows, slots, lengths, strict=True):
            if known.states_of and drafts.pending.length[slot] != length:
                self.ledger.fall_back("lost states")
                drafts.pending.reset(slot, length)

    def _begin(self, rows: list[ServedRequest]) -> Step:
        rids = tuple(known.rid for known in rows)
        if not self.speculation or all(known.plain_because for known in rows):
            nobody = (None,) * len(rows)
            return Step(rids, nobody, DraftPlan(nobody, float(len(rows)), None), kept=(0,) * len(rows))
        return self._planner.begin(rids)

    def _draft(
        self, name: str, indices: list[int], rows: list[ServedRequest], slots: list[int], lengths: list[int],
        batch: Any, block_BW: Tensor, confidences: list[list[float]],
    ) -> None:  # fmt: skip
        """Draft for some rows; proposals and confidences go where they belong."""
        index_B = on_device(indices, block_BW.device)
        chosen = DraftRows(
            slots=[slots[i] for i in indices],
            request_B=batch.req_pool_indices[index_B],
            length_B=batch.seq_lens[index_B].to(torch.int64),
            lengths=[lengths[i] for i in indices],
            anchor_B=block_BW[index_B, 0],
        )
        drafted = self._ready().draft(name, chosen)
        depth = drafted.tokens_BK.shape[1]
        block_BW[index_B, 1 : depth + 1] = drafted.tokens_BK
        for index, values in zip(indices, drafted.confidence_BK.tolist(), strict=True):
            if not all(map(math.isfinite, values)):
                self._broken(rows[index], name)
                values = []  # nothing of it is verified
            confidences[index] = values

    def _broken(self, known: ServedRequest, name: str) -> None:
        self.ledger.fall_back("draft not finite")
        known.broken_drafts += 1
        if known.broken_drafts == _BROKEN_AT_MOST:
            logger.error("drafter %s gives numbers that are not finite: %s goes on without it", name, known.rid)
            known.plain_because = f"drafter {name} gave numbers that are not finite"
            self._given_up.append(known)

    def _open_penalties(self, rows: list[ServedRequest]) -> None:
        """Penalizers for the rows that need them, at their first step since they were prefilled."""
        for known in rows:
            if known.penalties is None and is_penalised(known.req.sampling_params):
                known.penalties = RowPenalties(
                    known.req,
                    already_put_out=known.already_put_out,
                    vocab_size=self.model_runner.model_config.vocab_size,
                    device=str(self.device),
                )

    def _settle(self) -> None:
        """Learn from the last step, but for rows whose request had ended before it."""
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            return
        outcome.leave_out_dropped()
        self._planner.observe(outcome.step, outcome.accepted)
        while self._given_up:  # not before: the step that was on its way was planned with their drafters
            known = self._given_up.pop()
            if self.requests.get(known.rid) is known:
                self._planner.close(known.rid)
                self._open(known)
        self.ledger.step(outcome)
