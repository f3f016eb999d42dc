"""The draft model that SGLang loads: every drafter of the bundle, side by side."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from angelspec.core.drafter_config import BlockDrafterConfig
from angelspec.core.errors import CheckpointError
from angelspec.drafters.checkpoint import load_drafter
from sglang_ext.compat import get_parallel
from sglang_ext.models.graphs import Record
from sglang_ext.models.served import Served, ServedBlock, ServedMtp
from sglang_ext.ranks import Ranks
from sglang_ext.settings import MARKER, DrafterPlace, EnginePlan, current_plan

logger = logging.getLogger(__name__)


class _NoHead:
    """Stands where SGLang's DSPARK looks for a confidence or Markov head; nothing of it is ever called."""

    sts_temperatures: Tensor | None = None


class AngelSpecDrafters(nn.Module):
    """Every drafter of the bundle, and what SGLang's DSPARK worker asks of a draft model.

    Weights come from the drafters' own folders, through ``angelspec.drafters.checkpoint``, which refuses missing,
    unexpected, misshapen and non-finite tensors by name.
    """

    sample_from_anchor = False
    supports_pre_gather_target_hidden_projection = False
    logits_mup_width_multiplier: float | None = None

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        self.config = config
        self.plan = plan = current_plan()
        if config.angelspec_plan != plan.digest:
            raise CheckpointError(
                "the draft model's folder was written for another bundle", mend="start the server again"
            )
        self.gamma = plan.depth
        self.num_stages = plan.num_layers
        self.markov_head = self.confidence_head = _NoHead()
        self.embed_tokens: nn.Module | None = None
        self.lm_head: nn.Module | None = None
        self._copies: tuple[Tensor, Tensor] | None = None
        self.served = nn.ModuleDict({place.drafter.name: _load(plan, place) for place in plan.places})

    def attach_shared_modules(self, *, embed_tokens: nn.Module, lm_head: nn.Module) -> None:
        """Take the target's embedding and head, which every drafter shares; on several ranks put together a whole copy.

        Raises:
            QuantisedError: one of them is quantised.
        """
        ranks = Ranks(get_parallel().tp_group)
        object.__setattr__(self, "embed_tokens", embed_tokens)  # no submodule: the target's weights are not ours
        object.__setattr__(self, "lm_head", lm_head)
        size = {"rows": self.config.vocab_size, "columns": self.config.hidden_size}
        embedding_VD = ranks.whole(embed_tokens.weight, **size, name="embedding")
        tied = lm_head.weight.data_ptr() == embed_tokens.weight.data_ptr()
        head_VD = embedding_VD if tied else ranks.whole(lm_head.weight, **size, name="vocabulary head")
        if self._copies is not None:  # recorded graphs read them where they are
            for copy, new in zip(self._copies, (embedding_VD, head_VD), strict=True):
                copy.copy_(new)
        elif ranks.several:
            self._copies = (embedding_VD, head_VD)

    @property
    def embedding_VD(self) -> Tensor:
        """The target's embedding."""
        return self.embed_tokens.weight if self._copies is None else self._copies[0]

    @property
    def head_VD(self) -> Tensor:
        """The target's vocabulary head."""
        return self.lm_head.weight[: self.config.vocab_size] if self._copies is None else self._copies[1]

    def multiply(self, states: Tensor, head_VD: Tensor) -> Tensor:
        """Logits [..., V] of states [..., D]. On one rank the head's own layer multiplies, which may hold the weight in
        another layout; ``head_VD`` is then the same weight, and is not read."""
        if self._copies is not None:
            return F.linear(states, head_VD)
        logits_NV = self.lm_head.quant_method.apply(self.lm_head, states.flatten(0, -2))[:, : self.config.vocab_size]
        return logits_NV.unflatten(0, states.shape[:-1])

    @torch.inference_mode()
    def record_choices(self, sizes: Sequence[int], *, record: Record) -> None:
        """Let the block drafters choose tokens by CUDA graphs; one that can't goes on without, and a log line says why.

        Args:
            sizes: rows of the graphs.
            record: makes one.
        """
        for name, served in self.served.items():
            if isinstance(served, ServedBlock):
                try:
                    served.record_choices(
                        sizes, record=record, embedding_VD=self.embedding_VD, head_VD=self.head_VD,
                        multiply=self.multiply,
                    )  # fmt: skip
                except RuntimeError as error:
                    logger.warning("drafter '%s' drafts without CUDA graphs: %s", name, error)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Check the marker; the drafters were loaded when the model was built.

        Raises:
            CheckpointError: the folder is not the one that was written for this bundle.
        """
        found = dict(weights)
        marker = found.get(MARKER)
        if len(found) != 1 or marker is None or bytes(marker.tolist()) != self.plan.digest.encode():
            raise CheckpointError(
                f"the draft model's folder holds {sorted(found)} instead of the marker of this bundle",
                mend="let the extension choose --speculative-draft-model-path",
            )

    def forward(self, input_ids: Tensor, positions: Tensor, forward_batch: Any, **kwargs: Any) -> Any:
        """Never called: drafts run through :attr:`served`."""
        raise RuntimeError("the drafters are run by sglang_ext.drafting, not by the model runner")


def _load(plan: EnginePlan, place: DrafterPlace) -> Served:
    dtype, device = torch.get_default_dtype(), torch.empty(0).device
    with torch.device("cpu"):
        drafter = load_drafter(place.folder, dtype=dtype, device=device).drafter.eval().requires_grad_(False)
    if isinstance(place.config, BlockDrafterConfig):
        columns = plan.tap_columns(place)
        columns = None if columns is None else columns.to(device)
        shortlist = None if place.config.head == "none" else place.drafter.shortlist
        return ServedBlock(drafter, first_layer=place.first_layer, tap_columns=columns, shortlist=shortlist)
    return ServedMtp(drafter, first_layer=place.first_layer, depth=place.drafter.depth)


EntryClass = AngelSpecDrafters
