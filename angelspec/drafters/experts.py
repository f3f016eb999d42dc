"""A mixture of experts in place of a layer's MLP: a router, routed experts, and shared ones that see every token.

Shapes: N tokens, M experts of a token, E experts, D hidden, I width of one expert; ``...`` stands for any leading axes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from angelspec.core.drafter_config import MoeConfig
from angelspec.drafters.layers import DenseMLP, linear
from angelspec.ops.activation import gated_silu
from angelspec.ops.routing import choose_experts

_ALIGNMENT = 16
"""Bytes; rows of a grouped product's matrices are multiples of it."""


def keeps_float32(name: str) -> bool:
    """Whether a drafter's tensor is written and loaded in float32 whatever the export's precision.

    Rounding what chooses experts would choose others; Hy3 keeps the same tensors so.
    """
    return name.endswith(("router.gate.weight", "expert_bias"))


class Router(nn.Module):
    """One logit per expert, in float32 whatever the drafter's precision: rounding would choose other experts."""

    def __init__(self, hidden_size: int, num_experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)

    def forward(self, states_ND: Tensor) -> Tensor:
        """Logits [N, E]."""
        return F.linear(states_ND.float(), self.gate.weight.float())


class ExpertMLP(nn.Module):
    """The sum of a token's routed experts, by weight, and of the shared experts, which are one SwiGLU.

    The experts' matrices lie in one tensor each, input channels first. Tokens are sorted by expert, and each expert's
    product is over its own tokens.
    """

    def __init__(self, hidden_size: int, moe: MoeConfig) -> None:
        super().__init__()
        self.moe = moe
        experts, width = moe.num_experts, moe.intermediate_size
        self.router = Router(hidden_size, experts)
        if moe.selection_bias:
            # chooses and never weighs, so it gets no gradient: no parameter
            self.register_buffer("expert_bias", torch.zeros(experts))
        self.experts_gate_proj = nn.Parameter(torch.empty(experts, hidden_size, width))
        self.experts_up_proj = nn.Parameter(torch.empty(experts, hidden_size, width))
        self.experts_down_proj = nn.Parameter(torch.empty(experts, width, hidden_size))
        if moe.num_shared_experts:
            self.shared_mlp = DenseMLP(hidden_size, moe.num_shared_experts * width)

    def forward(self, residual: Tensor, states: Tensor, dtype: torch.dtype | None) -> Tensor:
        """``residual`` plus the experts' answer to ``states``, [..., D] both."""
        states_ND = states.flatten(0, -2)
        bias_E = self.expert_bias.float() if self.moe.selection_bias else None
        expert_NM, weight_NM = choose_experts(self.router(states_ND), bias_E, moe=self.moe)
        if self.moe.num_shared_experts:
            residual = self.shared_mlp(residual, states, dtype)
        return residual + self._routed(states_ND, expert_NM, weight_NM, dtype).view(residual.shape).to(residual.dtype)

    def _routed(self, states_ND: Tensor, expert_NM: Tensor, weight_NM: Tensor, dtype: torch.dtype | None) -> Tensor:
        matrices = self.experts_gate_proj, self.experts_up_proj, self.experts_down_proj
        dtype = self.experts_gate_proj.dtype if dtype is None else dtype
        aligned = all(size * dtype.itemsize % _ALIGNMENT == 0 for size in self.experts_gate_proj.shape[1:])
        routed = routed_sum if aligned else routed_sum_reference
        return routed(states_ND, expert_NM, weight_NM, *matrices, dtype=dtype)


def routed_sum(
    states_ND: Tensor,
    expert_NM: Tensor,
    weight_NM: Tensor,
    gate_EDI: Tensor,
    up_EDI: Tensor,
    down_EID: Tensor,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """Each token's experts (SwiGLU) by weight, all experts of a matrix in one grouped product; nothing waits for a GPU.

    Args:
        states_ND: inputs.
        expert_NM: int64, each token's experts.
        weight_NM: theirs; the sum has its dtype.
        gate_EDI, up_EDI, down_EID: the experts' matrices, input channels first; rows of D and of I must be multiples
            of 16 bytes.
        dtype: of the products.

    Returns:
        [N, D].
    """
    order, token, weight = _by_expert(expert_NM, weight_NM)
    expert_E = torch.arange(gate_EDI.shape[0], device=order.device)
    ends_E = torch.searchsorted(expert_NM.flatten()[order], expert_E, right=True).to(torch.int32)
    inputs = states_ND[token].to(dtype)
    inner = gated_silu(
        F.grouped_mm(inputs, gate_EDI.to(dtype), offs=ends_E), F.grouped_mm(inputs, up_EDI.to(dtype), offs=ends_E)
    )
    outputs = F.grouped_mm(inner, down_EID.to(dtype), offs=ends_E).to(weight_NM.dtype)
    sum_ND = states_ND.new_zeros(states_ND.shape, dtype=weight_NM.dtype)
    return sum_ND.index_add(0, token, outputs * weight.unsqueeze(-1))


def routed_sum_reference(
    states_ND: Tensor,
    expert_NM: Tensor,
    weight_NM: Tensor,
    gate_EDI: Tensor,
    up_EDI: Tensor,
    down_EID: Tensor,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """``routed_sum`` expert by expert, for matrices of any size."""
    _, token, weight = _by_expert(expert_NM, weight_NM)
    sizes = torch.bincount(expert_NM.flatten(), minlength=gate_EDI.shape[0]).tolist()
    # indexing one expert would make a gradient of all experts' size for each; unbind makes one in all
    matrices = zip(gate_EDI.unbind(), up_EDI.unbind(), down_EID.unbind(), strict=True)
    sum_ND = states_ND.new_zeros(states_ND.shape, dtype=weight_NM.dtype)
    shares = zip(token.split(sizes), weight.split(sizes), matrices, strict=True)
    for number, (token_n, weight_n, (gate_DI, up_DI, down_ID)) in enumerate(shares):
        # the first expert runs also without tokens, so that every rank makes gradients of the same tensors
        if number and not token_n.shape[0]:
            continue
        inputs = states_ND[token_n]
        inner = gated_silu(linear(inputs, gate_DI.mT, dtype), linear(inputs, up_DI.mT, dtype))
        outputs = linear(inner, down_ID.mT, dtype).to(sum_ND.dtype)
        sum_ND.index_add_(0, token_n, outputs * weight_n.unsqueeze(-1))
    return sum_ND


def _by_expert(expert_NM: Tensor, weight_NM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Routes sorted by expert, and each one's token and weight."""
    order = expert_NM.flatten().argsort(stable=True)
    return order, order // expert_NM.shape[1], weight_NM.flatten()[order]
