"""Multi-token prediction: one decoder layer on [embedding; hidden state], reused at every depth.

Depth 0 at position j reads the target's last hidden state there (which predicted token j + 1) and the embedding of
token j + 1, and predicts token j + 2. Depth k reads the output of depth k - 1 at the same position and the token that
this one proposed, and predicts token j + 2 + k. A query of depth k attends to the depth-0 keys of positions up to j and
to its own position's keys of depths 1..k: exactly what a server's cache holds when it drafts from position j.

Training unrolls the depths over whole rows (Training-Time Test; AngelSpec, arXiv 2607.25852); decoding keeps depth 0 in
a cache and runs the further depths behind it, with entries that each draft throws away.

Ranks may share the rows by positions (``ops.sequence_parallel``): each then holds the states of its own run of
positions and, inside attention, all positions of its share of the heads. Then P and N are this rank's, except in
attention.

Shapes: R packed rows, T tokens, P positions whose keys are needed, N positions that ask, B batch rows, D hidden, V
vocabulary, H query heads, G key-value heads, C head channels. ``...`` stands for any leading axes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from angelspec.core.drafter_config import MtpDrafterConfig
from angelspec.drafters.base import DrafterModule
from angelspec.drafters.drafting import ContextCache, Drafts, best_tokens, vocabulary_logits
from angelspec.drafters.experts import ExpertMLP
from angelspec.drafters.layers import DenseMLP, RMSNorm, Rotation, SelfAttention, add_linear, linear
from angelspec.ops.rope import rotate
from angelspec.ops.sequence_parallel import SequenceGroup
from angelspec.ops.unrolled_attention import UnrolledPlan, plan_unrolled, unrolled_attention

AttendStates = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(query_NHC, key_PGC, value_PGC) -> [N, H, C]: attention of the asking states to these keys and all earlier ones."""


class MtpLayer(nn.Module):
    """The decoder layer: pre-norm attention, then a SwiGLU or a mixture of experts."""

    def __init__(self, config: MtpDrafterConfig) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config, qk_norm=config.qk_norm)
        if config.moe is None:
            self.mlp = DenseMLP(config.hidden_size, config.intermediate_size)
        else:
            self.mlp = ExpertMLP(config.hidden_size, config.moe)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        states_PD: Tensor,
        rotation: Rotation,
        attend: AttendStates,
        dtype: torch.dtype | None,
        *,
        asking_N: Tensor | None = None,
    ) -> Tensor:
        """Keys of all states, and the layer's output where it is asked for.

        Args:
            states_PD: the residual stream.
            rotation: of their positions, [P, 1, E].
            attend: see ``AttendStates``.
            asking_N: which of the states ask; None: all.

        Returns:
            [N, D].
        """
        cos, sin = rotation
        normed_PD = self.input_layernorm(states_PD)
        key_PGC, value_PGC = self.self_attn.keys_values(normed_PD, dtype)
        key_PGC = rotate(key_PGC, cos, sin)
        states_ND, normed_ND = states_PD, normed_PD
        if asking_N is not None:
            states_ND, normed_ND, cos, sin = (item[asking_N] for item in (states_PD, normed_PD, cos, sin))
        query_NHC = rotate(self.self_attn.queries(normed_ND, dtype), cos, sin)
        mixed_ND = attend(query_NHC, key_PGC, value_PGC).flatten(1)
        states_ND = add_linear(states_ND, mixed_ND, self.self_attn.o_proj.weight, dtype)
        return self.mlp(states_ND, self.post_attention_layernorm(states_ND), dtype)


class _Prefix(NamedTuple):
    """What all depths of some asking positions attend to besides themselves."""

    plan: UnrolledPlan
    key_PGC: Tensor
    value_PGC: Tensor

    def place(self, key_NGC: Tensor, value_NGC: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a depth above the first as :meth:`attend` takes them."""
        return key_NGC, value_NGC

    def attend(self, query_NHC: Tensor, diagonal: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Attention of one depth; ``diagonal`` holds keys and values [N, G, C] of depths 1.. up to its own."""
        keys, values = zip(*diagonal, strict=True) if diagonal else ((), ())
        return unrolled_attention(
            query_NHC,
            key_PGC=self.key_PGC,
            value_PGC=self.value_PGC,
            diagonal_key_NKGC=torch.stack(keys, dim=1) if diagonal else None,
            diagonal_value_NKGC=torch.stack(values, dim=1) if diagonal else None,
            plan=self.plan,
        )


class _SharedPrefix(NamedTuple):
    """The same where ranks share the rows: all ranks' positions with this rank's heads."""

    whole: _Prefix
    sequence: SequenceGroup
    counts: tuple[int, ...]
    """Asking positions of each rank."""
    num_query_heads: int

    def place(self, key_NGC: Tensor, value_NGC: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [N, G, C] of this rank's positions to those of all positions and this rank's heads."""
        key, value = (
            _by_heads(item, self.sequence, self.counts, num_query_heads=self.num_query_heads)
            for item in (key_NGC, value_NGC)
        )
        return key, value

    def attend(self, query_NHC: Tensor, diagonal: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Attention of this rank's positions, by way of all ranks' and this rank's heads."""
        mixed = self.whole.attend(self.sequence.to_heads(query_NHC, self.counts), diagonal)
        return self.sequence.to_positions(mixed, self.counts)


def _by_heads(states_NGC: Tensor, sequence: SequenceGroup, counts: Sequence[int], *, num_query_heads: int) -> Tensor:
    """Keys or values of this rank's positions to those of all positions that its query heads need."""
    return sequence.to_heads(sequence.spread_heads(states_NGC, num_query_heads=num_query_heads), counts)


class _Share(NamedTuple):
    """Which of a plan's positions are this rank's."""

    visible: slice
    asking: slice
    visible_counts: tuple[int, ...]
    """Of every rank."""
    asking_counts: tuple[int, ...]


def _share(plan: UnrolledPlan, sequence: SequenceGroup | None) -> _Share:
    """Runs of equally many visible positions; those that ask go with them."""
    num_visible = plan.visible_P.shape[0]
    if sequence is None:
        return _Share(slice(0, num_visible), slice(0, plan.count), (num_visible,), (plan.count,))
    visible = sequence.bounds(num_visible)
    asking = torch.searchsorted(plan.own_N, torch.tensor(visible, device=plan.own_N.device)).tolist()
    return _Share(
        slice(*visible[sequence.rank :][:2]),
        slice(*asking[sequence.rank :][:2]),
        tuple(end - begin for begin, end in pairwise(visible)),
        tuple(end - begin for begin, end in pairwise(asking)),
    )


class _Inputs:
    """What :meth:`Unroll.advance` reads. No dataclass: FSDP puts hooks on whatever tensors it finds in one."""

    def __init__(
        self,
        drafter: MtpDrafter,
        position_N: Tensor,
        embedding_VD: Tensor,
        prefix: _Prefix | _SharedPrefix,
        *,
        recompute: bool,
    ) -> None:
        self.drafter, self.position_N, self.embedding_VD, self.prefix = drafter, position_N, embedding_VD, prefix
        self.recompute = recompute

    def part(self, position_N: Tensor, prefix: _Prefix | _SharedPrefix) -> _Inputs:
        """The same for some of the positions."""
        return _Inputs(self.drafter, position_N, self.embedding_VD, prefix, recompute=self.recompute)


@dataclass
class Unroll:
    """One training pass: depth 0 has run, each call of :meth:`advance` runs the next depth."""

    hidden_ND: Tensor
    """Depth 0's output at the asking positions, row by row: what the target's head turns into logits."""
    _inputs: _Inputs
    _deepest: list[Tensor] = field(default_factory=list)
    _diagonal: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def depth(self) -> int:
        """The deepest depth that has run."""
        return len(self._diagonal)

    @property
    def own(self) -> slice:
        """Which of all ranks' asking positions are this one's."""
        prefix = self._inputs.prefix
        if not isinstance(prefix, _SharedPrefix):
            return slice(0, self.hidden_ND.shape[0])
        before = sum(prefix.counts[: prefix.sequence.rank])
        return slice(before, before + prefix.counts[prefix.sequence.rank])

    @property
    def counts(self) -> tuple[int, ...]:
        """Asking positions of each rank that shares the rows; alone, of this one."""
        prefix = self._inputs.prefix
        return prefix.counts if isinstance(prefix, _SharedPrefix) else (self.hidden_ND.shape[0],)

    def advance(self, tokens_N: Tensor) -> Tensor:
        """Run the next depth on the tokens that the one before is taken to have proposed.

        Gradients flow through the recurrence and through the keys of all depths; tokens carry none.

        Args:
            tokens_N: the argmax of the depth before (on-policy), or the data's token j + 1 + k (teacher-forced).

        Returns:
            [N, D], the depth's output, which the target's head turns into logits.
        """
        inputs, depth = self._inputs, self.depth + 1
        before_ND = self._deepest.pop() if self._deepest else self.hidden_ND
        earlier = tuple(self._diagonal)

        def run(before_ND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            placed: list[tuple[Tensor, Tensor]] = []

            def attend(query_NHC: Tensor, key_NGC: Tensor, value_NGC: Tensor) -> Tensor:
                placed.append(inputs.prefix.place(key_NGC, value_NGC))
                return inputs.prefix.attend(query_NHC, (*earlier, *placed))

            after_ND = inputs.drafter.deepen(
                before_ND,
                embedded_ND=inputs.embedding_VD[tokens_N].to(before_ND.dtype),
                position_N=inputs.position_N + depth,
                attend=attend,
            )
            return after_ND, *placed[0]

        if inputs.recompute and torch.is_grad_enabled():
            after_ND, key, value = checkpoint(run, before_ND, use_reentrant=False, preserve_rng_state=False)
        else:
            after_ND, key, value = run(before_ND)
        self._diagonal.append((key, value))
        self._deepest.append(after_ND)
        return after_ND

    def split(self, sizes: Sequence[int]) -> list[Unroll]:
        """Consecutive runs of the asking positions, to be advanced apart and in any order.

        Depth 0, with its keys, stays one computation for all of them.

        Args:
            sizes: of the runs, zeros allowed; they add up to N.

        Raises:
            ValueError: a depth above the first has run already, or the sizes don't add up.
        """
        if self._diagonal:
            raise ValueError("split before the first advance")
        if isinstance(self._inputs.prefix, _SharedPrefix):
            raise ValueError("ranks share the rows: use split_shared, which is told every rank's sizes")
        inputs, (plan, key_PGC, value_PGC) = self._inputs, self._inputs.prefix
        pieces = []
        parts = zip(self.hidden_ND.split(sizes), inputs.position_N.split(sizes), plan.split(sizes), strict=True)
        for hidden_ND, position_N, (piece, seen) in parts:
            prefix = _Prefix(piece, key_PGC[seen], value_PGC[seen])
            pieces.append(Unroll(hidden_ND, inputs.part(position_N, prefix)))
        return pieces

    def split_shared(self, sizes: Sequence[Sequence[int]]) -> list[Unroll]:
        """The same where ranks share the rows: piece number i joins run number i of every rank.

        Args:
            sizes: by rank, of its runs; equally many for all, zeros allowed, adding up to :attr:`counts`.

        Raises:
            ValueError: a depth above the first has run already, or the sizes don't add up.
        """
        inputs, prefix = self._inputs, self._inputs.prefix
        if self._diagonal or tuple(sum(runs) for runs in sizes) != prefix.counts or len({*map(len, sizes)}) != 1:
            raise ValueError(
                f"runs of {[list(runs) for runs in sizes]} do not split {prefix.counts} positions at depth 0"
            )
        ends = [list(accumulate(runs, initial=sum(prefix.counts[:rank]))) for rank, runs in enumerate(sizes)]
        mine = sizes[prefix.sequence.rank]
        pieces = []
        parts = zip(self.hidden_ND.split(mine), inputs.position_N.split(mine), strict=True)
        for number, (hidden_ND, position_N) in enumerate(parts):
            runs = [slice(end[number], end[number + 1]) for end in ends]
            part = prefix._replace(
                whole=prefix.whole._replace(plan=prefix.whole.plan.select(runs)),
                counts=tuple(runs_of_rank[number] for runs_of_rank in sizes),
            )
            pieces.append(Unroll(hidden_ND, inputs.part(position_N, part)))
        return pieces


class MtpDrafter(DrafterModule):
    """A multi-token-prediction drafter; see ``DrafterModule`` for its arguments."""

    config: MtpDrafterConfig

    def __init__(self, config: MtpDrafterConfig, *, matmul_dtype: torch.dtype | None = None) -> None:
        super().__init__(config, matmul_dtype=matmul_dtype)
        self.enorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hnorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = MtpLayer(config)
        self.final_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    @property
    def dtype(self) -> torch.dtype:
        """Of the norms, and so of the residual stream."""
        return self.final_layernorm.weight.dtype

    def fuse(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """The layer's input [..., D] from token embeddings [..., D], which get no gradient, and hidden states [..., D].

        The embedding comes first in the projection's input, as in every published checkpoint (the paper's equation 1
        has the hidden state first).
        """
        both = torch.cat([self.enorm(embedded.detach()), self.hnorm(hidden)], dim=-1)
        return linear(both, self.eh_proj.weight, self.matmul_dtype).to(self.dtype)

    def deepen(self, hidden_ND: Tensor, *, embedded_ND: Tensor, position_N: Tensor, attend: AttendStates) -> Tensor:
        """One depth above the first: the same in training and drafting but for what ``attend`` sees.

        Args:
            hidden_ND: output of the depth before.
            embedded_ND: embedding of the token that it proposed.
            position_N: of the new entries: the asking position plus the depth.
            attend: see ``AttendStates``.

        Returns:
            [N, D], final-normed.
        """
        fused_ND = self.fuse(embedded_ND, hidden_ND)
        return self.final_layernorm(self.midlayer(fused_ND, self.rotation(position_N), attend, self.matmul_dtype))

    def begin(
        self,
        hidden_PD: Tensor,
        *,
        embedded_PD: Tensor,
        position_P: Tensor,
        attend: AttendStates,
        asking_N: Tensor,
    ) -> Tensor:
        """Depth 0: entries for all given positions, outputs where asked; the same in training and decoding.

        Args:
            hidden_PD: the target's last hidden states; no gradient flows into them.
            embedded_PD: embedding of the token after each; taken as zero at position 0, where no token comes before
                (as in the servers of Hy3, DeepSeek and Qwen).
            position_P: positions within the document.
            attend: see ``AttendStates``.
            asking_N: which of the positions ask.

        Returns:
            [N, D], final-normed.
        """
        embedded_PD = embedded_PD.masked_fill((position_P == 0).unsqueeze(-1), 0.0)
        fused_PD = self.fuse(embedded_PD, hidden_PD.detach())
        turned = self.rotation(position_P)
        return self.final_layernorm(self.midlayer(fused_PD, turned, attend, self.matmul_dtype, asking_N=asking_N))

    def forward(
        self,
        hidden_RTD: Tensor,
        *,
        tokens_RT: Tensor,
        document_RT: Tensor,
        position_RT: Tensor,
        asked_RT: Tensor,
        embedding_VD: Tensor,
        sequence: SequenceGroup | None = None,
        recompute: bool = False,
    ) -> Unroll:
        """Depth 0 of a training pass over packed rows; the further depths follow by ``Unroll.advance``.

        Entries are made only for positions that some asking position sees, so nothing of padding or of rows that do not
        ask is read; and of the last hidden states only the rank's own are.

        Args:
            hidden_RTD: the target's last hidden states, after its final norm, on any device.
            tokens_RT: token ids.
            document_RT: document ids, -1 for padding; one id is one contiguous run.
            position_RT: positions within the document.
            asked_RT: bool; the N positions j whose outputs are wanted, j + 1 lying in the same document.
            embedding_VD: the target's frozen embedding.
            sequence: the ranks that share these rows, each of which is given all of them; None: no others.
            recompute: run the depths above the first again in the backward pass instead of holding what is inside them.

        Raises:
            ValueError: an asked position is padding or its document's last, or a document lies in two separate runs; or
                the ranks cannot share the heads evenly.
        """
        has_next_RT = torch.zeros_like(asked_RT)
        has_next_RT[:, :-1] = document_RT[:, 1:] == document_RT[:, :-1]
        if bool((asked_RT & ~has_next_RT & (document_RT >= 0)).any()):
            raise ValueError("an asked position is its document's last: there is no token after it to embed")
        plan = plan_unrolled(document_RT, asked_RT)
        share = _share(plan, sequence)
        visible_P, asking_N = plan.visible_P[share.visible], plan.own_N[share.asking] - share.visible.start
        position_P = position_RT.flatten()[visible_P]
        prefixes: list[_Prefix | _SharedPrefix] = []

        def attend(query_NHC: Tensor, key_PGC: Tensor, value_PGC: Tensor) -> Tensor:
            heads = query_NHC.shape[1]
            if sequence is None:
                prefixes.append(_Prefix(plan, key_PGC, value_PGC))
            else:
                key_PGC, value_PGC = (
                    _by_heads(item, sequence, share.visible_counts, num_query_heads=heads)
                    for item in (key_PGC, value_PGC)
                )
                whole = _Prefix(plan, key_PGC, value_PGC)
                prefixes.append(_SharedPrefix(whole, sequence, share.asking_counts, heads))
            return prefixes[0].attend(query_NHC, ())

        hidden_ND = self.begin(
            hidden_RTD.flatten(0, 1)[visible_P.to(hidden_RTD.device)].to(visible_P.device, self.dtype),
            embedded_PD=embedding_VD[tokens_RT.flatten()[visible_P + 1].long()].to(self.dtype),
            position_P=position_P,
            attend=attend,
            asking_N=asking_N,
        )
        inputs = _Inputs(self, position_P[asking_N], embedding_VD, prefixes[0], recompute=recompute)
        return Unroll(hidden_ND, inputs)

    def context_cache(self, rows: int, *, capacity: int, num_depths: int | None = None) -> ContextCache:
        """An empty cache of depth-0 entries for that many rows of up to ``capacity`` committed tokens.

        Args:
            rows: held side by side.
            capacity: most committed tokens of a row.
            num_depths: of the deepest draft; None: those of the configuration.
        """
        config = self.config
        return ContextCache(
            rows=rows, capacity=capacity, spare=config.num_depths if num_depths is None else num_depths, num_layers=1,
            num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, dtype=self.dtype,
            device=self.final_layernorm.weight.device,
        )  # fmt: skip

    @torch.no_grad()
    def extend(
        self,
        cache: ContextCache,
        hidden_BTD: Tensor,
        next_tokens_BT: Tensor,
        *,
        embedding_VD: Tensor,
        counts_B: Tensor | None = None,
        positions_BT: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Add depth-0 entries for newly committed positions whose next token is known.

        A draft's own entries are never kept: after each verification the accepted window is entered again from the
        target's states. Only each row's last position asks, so a prompt of any length costs no scores among its tokens.

        Args:
            cache: grows by ``counts_B``.
            hidden_BTD: the target's last hidden states, after its final norm, at each row's next positions,
                left-aligned.
            next_tokens_BT: the committed token after each of these positions.
            embedding_VD: the target's embedding.
            counts_B: valid positions per row, at least one; None: all T.
            positions_BT: checked, where given, against the positions that come next in each row.
            rows: rows of the cache [B]; None: all, in order.

        Returns:
            [B, D]: the output at each row's last valid position, where :meth:`draft` begins.

        Raises:
            ValueError: a position is skipped or repeated, a row gains nothing or outgrows the capacity.
        """
        new = cache.place(hidden_BTD.shape[:2], counts_B=counts_B, positions_BT=positions_BT, rows=rows)
        gains_B = new.valid_BT.sum(1)
        if not bool((gains_B > 0).all()):
            raise ValueError("every row must gain at least one position; leave the others out of rows")
        asking_B = gains_B.cumsum(0) - 1

        def attend(query_BHC: Tensor, key_NGC: Tensor, value_NGC: Tensor) -> Tensor:
            cache.append(new.rows_N, new.index_N, [(key_NGC, value_NGC)], lengths=new.lengths)
            last = (item.unsqueeze(1) for item in (query_BHC, key_NGC[asking_B], value_NGC[asking_B]))
            return cache.attend(rows, 0, *last, offset=-1).squeeze(1)

        return self.begin(
            hidden_BTD[new.valid_BT].to(self.dtype),
            embedded_PD=embedding_VD[next_tokens_BT[new.valid_BT]].to(self.dtype),
            position_P=new.index_N,
            attend=attend,
            asking_N=asking_B,
        )

    @torch.no_grad()
    def draft_states(
        self,
        cache: ContextCache,
        hidden_BD: Tensor,
        *,
        num_depths: int,
        embedding_VD: Tensor,
        head_VD: Tensor,
        rows: Tensor | None = None,
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Each depth's output [B, D], its proposal [B] and this token's probability [B], depth 0 first.

        See :meth:`draft`.
        """
        if not 1 <= num_depths <= cache.spare:
            raise ValueError(f"num_depths is {num_depths}; the cache was made for 1 to {cache.spare}")
        position_B = cache.lengths[cache.select(rows)] - 1
        depth = 0

        def attend(query_BHC: Tensor, key_BGC: Tensor, value_BGC: Tensor) -> Tensor:
            new = (item.unsqueeze(1) for item in (query_BHC, key_BGC, value_BGC))
            return cache.attend(rows, 0, *new, offset=depth - 1).squeeze(1)

        while True:
            token_B, probability_B = best_tokens(vocabulary_logits(hidden_BD, head_VD))
            yield hidden_BD, token_B, probability_B
            depth += 1
            if depth == num_depths:
                return
            hidden_BD = self.deepen(
                hidden_BD,
                embedded_ND=embedding_VD[token_B].to(self.dtype),
                position_N=position_B + depth,
                attend=attend,
            )

    @torch.no_grad()
    def draft(
        self,
        cache: ContextCache,
        hidden_BD: Tensor,
        *,
        num_depths: int,
        embedding_VD: Tensor,
        head_VD: Tensor,
        rows: Tensor | None = None,
    ) -> Drafts:
        """Propose ``num_depths`` tokens per row: the first from depth 0's output, each further one from one more depth.

        Args:
            cache: entries of everything before the anchor; unchanged afterwards.
            hidden_BD: what :meth:`extend` returned for these rows.
            num_depths: tokens to propose; at most those that the cache was made for.
            embedding_VD: the target's embedding.
            head_VD: the target's vocabulary head.
            rows: rows of the cache [B]; None: all, in order.

        Raises:
            ValueError: more depths than the cache has room for.
        """
        steps = self.draft_states(
            cache, hidden_BD, num_depths=num_depths, embedding_VD=embedding_VD, head_VD=head_VD, rows=rows
        )
        _, tokens, probabilities = zip(*steps, strict=True)
        return Drafts(torch.stack(tokens, dim=1), torch.stack(probabilities, dim=1))
