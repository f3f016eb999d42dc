"""Runs the drafters of an engine: entries at prefill, and proposals for some rows of a batch.

Shapes: N tokens of all rows, B rows that are drafted for, K proposals, W slots of a row, V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from angelspec.drafters.drafting import Drafts
from sglang_ext import compat
from sglang_ext.models.drafters import AngelSpecDrafters
from sglang_ext.models.served import ServedMtp
from sglang_ext.pending import PendingStates, Waiting
from sglang_ext.ranks import Ranks
from sglang_ext.requests import ServedRequest
from sglang_ext.transfer import on_device


@dataclass(frozen=True)
class DraftRows:
    """Some rows of the running batch, to be drafted for."""

    slots: list[int]
    """In the request pool."""
    request_B: Tensor
    """The same, on the device."""
    length_B: Tensor
    """Committed tokens before the anchor, which is the anchor's position."""
    lengths: list[int]
    anchor_B: Tensor


@dataclass(frozen=True)
class PromptRun:
    """A run of one request's prompt in a prefilled batch."""

    slot: int
    """Of the request pool."""
    start: int
    """Position of its first token."""
    begin: int
    """Its tokens in the batch, up to (not including) ``end``."""
    end: int


class DraftRunner:
    """Every drafter of the engine, with the engine's draft pool and attention backend.

    Args:
        model: the draft model.
        runner: SGLang's runner of the draft model.
        pending: the states that wait to be entered.
        ranks: of the engine.
    """

    def __init__(self, model: AngelSpecDrafters, runner: Any, pending: PendingStates, ranks: Ranks) -> None:
        self.model, self._runner, self.pending, self._ranks = model, runner, pending, ranks
        self._infos: dict[tuple[int, int], Any] = {}

    @torch.inference_mode()
    def prefill(
        self,
        drafters: Sequence[str],
        runs: Sequence[PromptRun],
        *,
        tokens_N: Tensor,
        taps_NF: Tensor,
        hidden_ND: Tensor,
    ) -> None:
        """Entries for runs of prompt tokens that continue what was seen of their requests, in one pass per drafter.

        A run's last token waits: what comes after it is not known yet, and a drafter that reads that writes its entry
        again.

        Args:
            drafters: names.
            runs: some or all of the batch's.
            tokens_N: ids of the whole batch.
            taps_NF: the target's features.
            hidden_ND: the target's last hidden states.
        """
        device, slots = tokens_N.device, [run.slot for run in runs]
        first_B, last_B = on_device([[run.begin for run in runs], [run.end - 1 for run in runs]], device)
        self.enter(drafters, slots, anchors=tokens_N[first_B])
        requests = [run.slot for run in runs for _ in range(run.begin, run.end)]
        positions = [run.start + i for run in runs for i in range(run.end - run.begin)]
        request_N, position_N = on_device([requests, positions], device)
        chosen_N: Tensor | slice = slice(None)
        if len(requests) < tokens_N.shape[0]:
            chosen_N = on_device([i for run in runs for i in range(run.begin, run.end)], device)
        waiting = Waiting(
            taps_NF[chosen_N],
            hidden_ND[chosen_N],
            torch.cat([tokens_N[1:], tokens_N[-1:]])[chosen_N],
            position_N,
            request_N,
            position_N[:0],
        )
        for name in drafters:
            self._write(name, waiting)
            for run in runs:
                until = run.start + run.end - run.begin
                self.pending.enter(name, run.slot, max(until - self.model.served[name].lag, run.start))
        for run in runs:
            self.pending.length[run.slot] = run.start + run.end - run.begin - 1  # append counts the last one
        self.pending.append(
            slots, [1] * len(slots), taps_NF=taps_NF[last_B], hidden_ND=hidden_ND[last_B], token_N=tokens_N[last_B]
        )

    @torch.inference_mode()
    def enter(self, drafters: Sequence[str], slots: Sequence[int], *, anchors: Tensor) -> None:
        """Enter everything of these slots that waits and whose next token is known."""
        for name in drafters:
            waiting = self.pending.take(name, slots, anchors=anchors)
            if waiting is not None:
                self._write(name, waiting)
            for slot in slots:
                self.pending.enter(name, slot, self.pending.length[slot])

    @torch.inference_mode()
    def make_room(self, drafters: Sequence[str], slots: Sequence[int], *, anchors: Tensor, room: int) -> bool:
        """Enter what waits of all these slots where the ring of one could not take ``room`` more tokens.

        All, since one pass over many tokens costs little more than one over few, and rows that decode side by side fill
        their rings alike.

        Returns:
            whether anything was entered.
        """
        full = [
            name
            for name in drafters
            if any(self.pending.waiting(name, slot) + room > self.pending.capacity for slot in slots)
        ]
        self.enter(full, slots, anchors=anchors)
        return bool(full)

    def keep(
        self,
        rows: Sequence[ServedRequest],
        slots: Sequence[int],
        *,
        kept: Sequence[int],
        committed: Sequence[int],
        output: Any,
        block_BW: Tensor,
    ) -> bool:
        """The states of a step's committed tokens wait for their entries.

        Args:
            rows: the batch's requests.
            slots: theirs, of the request pool.
            kept: verified proposals by row.
            committed: of each row's slots, the first so many.
            output: SGLang's, with states of all verified slots, row by row.
            block_BW: anchors and proposals.

        Returns:
            whether entries were written to make room.
        """
        chosen = [index for index, known in enumerate(rows) if known.states_of]
        if not chosen:
            return False
        by_mode: dict[tuple[str, ...], list[int]] = {}
        for index in chosen:
            by_mode.setdefault(rows[index].states_of, []).append(index)
        entered = False
        for names, indices in by_mode.items():
            anchor_B = block_BW[on_device(indices, block_BW.device), 0]
            room = max(committed[i] for i in indices)
            entered |= self.make_room(names, [slots[i] for i in indices], anchors=anchor_B, room=room)
        first = [0, *accumulate(number + 1 for number in kept)]
        token = [(first[i] + step, i, step) for i in chosen for step in range(committed[i])]
        index_N, row_N, offset_N = on_device([list(part) for part in zip(*token, strict=True)], block_BW.device)
        self.pending.append(
            [slots[i] for i in chosen],
            [committed[i] for i in chosen],
            taps_NF=output.hidden_states[index_N],
            hidden_ND=output.last_hidden_states[index_N],
            token_N=block_BW[row_N, offset_N],
        )
        return entered

    @torch.inference_mode()
    def draft(self, name: str, rows: DraftRows) -> Drafts:
        """Proposals of one drafter for some rows, equal on all ranks."""
        drafts = self._draft(name, rows)
        if not self._ranks.several:
            return drafts
        depth = drafts.tokens_BK.shape[1]
        both = torch.cat([drafts.tokens_BK.double(), drafts.confidence_BK.double()], dim=1)  # exact for both
        self._ranks.sync(both)
        return Drafts(both[:, :depth].long(), both[:, depth:].float())

    def _draft(self, name: str, rows: DraftRows) -> Drafts:
        served = self.model.served[name]
        with compat.forward_context(compat.ForwardContext(attn_backend=self._runner.attn_backend)):
            if not isinstance(served, ServedMtp):
                self.enter([name], rows.slots, anchors=rows.anchor_B)
                return served.draft(
                    lambda offset: self._window(rows, offset=offset, width=served.width),
                    anchor_B=rows.anchor_B,
                    position_B=rows.length_B,
                    embedding_VD=self.model.embedding_VD,
                    head_VD=self.model.head_VD,
                    multiply=self.model.multiply,
                )
            for slot in rows.slots:  # the last entry is written again: its successor may have been another one
                if not self.pending.waiting(name, slot):
                    self.pending.enter(name, slot, self.pending.length[slot] - 1)
            waiting = self.pending.take(name, rows.slots, anchors=rows.anchor_B)
            assert waiting is not None and waiting.last_B.shape[0] == len(rows.slots)
            drafts = served.draft(
                lambda offset: self._window(rows, offset=offset, width=1),
                pool=self._runner.token_to_kv_pool,
                hidden_ND=waiting.hidden_ND,
                next_N=waiting.next_N,
                position_N=waiting.position_N,
                slot_N=self._places(waiting.request_N, waiting.position_N),
                asking_B=waiting.last_B,
                embedding_VD=self.model.embedding_VD,
                head_VD=self.model.head_VD,
                multiply=self.model.multiply,
            )
            for slot in rows.slots:
                self.pending.enter(name, slot, self.pending.length[slot])
            return drafts

    def _write(self, name: str, waiting: Waiting) -> None:
        self.model.served[name].write(
            self._runner.token_to_kv_pool,
            taps_NF=waiting.taps_NF,
            hidden_ND=waiting.hidden_ND,
            next_N=waiting.next_N,
            position_N=waiting.position_N,
            slot_N=self._places(waiting.request_N, waiting.position_N),
            embedding_VD=self.model.embedding_VD,
        )

    def _places(self, request_N: Tensor, position_N: Tensor) -> Tensor:
        """Slots of tokens in the pools of keys and values."""
        return self._runner.req_to_token_pool.req_to_token[request_N, position_N].to(torch.int64)

    def _window(self, rows: DraftRows, *, offset: int, width: int) -> Any:
        """A forward batch over ``width`` tokens of each row, ready for attention."""
        count = len(rows.slots)
        info = self._infos.get((count, width))
        if info is None:
            info = compat.make_draft_block_spec_info(draft_token_num=width, device=rows.anchor_B.device)
            # said row by row: some backends take a uniform width from the server's settings, not from here
            info.ragged_verify_layout = compat.RaggedVerifyLayout.from_verify_lens(
                verify_lens_cpu=[width] * count, device=rows.anchor_B.device, grid=[count * width]
            )
            self._infos[count, width] = info
        start_B = rows.length_B + offset
        starts_cpu = torch.tensor([length + offset for length in rows.lengths])
        translator = self._runner.kv_index_translator
        plan = translator.plan_uniform_extend(
            req_pool_indices=rows.request_B, seq_lens=start_B, seq_lens_cpu=starts_cpu, width=width
        )
        batch = compat.ForwardBatch(
            forward_mode=compat.ForwardMode.TARGET_VERIFY,
            batch_size=count,
            input_ids=torch.empty(count * width, dtype=torch.int64, device=rows.anchor_B.device),
            req_pool_indices=rows.request_B,
            seq_lens=start_B,
            out_cache_loc=plan.write_virtual,
            seq_lens_sum=int(starts_cpu.sum()) + count * width,
            seq_lens_cpu=starts_cpu + width,
            positions=(start_B[:, None] + torch.arange(width, device=start_B.device)).flatten(),
            spec_algorithm=compat.SpeculativeAlgorithm.DSPARK,
            spec_info=info,
            capture_hidden_mode=compat.CaptureHiddenMode.NULL,
        )
        plan.bind(batch, translator)
        self._runner.attn_backend.init_forward_metadata(batch)
        return batch
