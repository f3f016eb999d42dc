"""AdamW and Muon over visibly grouped parameters, with a state that is addressed by parameter name.

The state of the optimiser is saved and restored by parameter name, never by position, so that a resumed run can
not give one parameter the moments of another, and so that a missing entry has a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from angelspec.core.recipe import OptimizerSection
from angelspec.training.precision import has_bfloat16_products

_INSIDE_A_LAYER = re.compile(r"(^|\.)(layers\.\d+|midlayer)\.")
_NO_DECAY = re.compile(r"(layer_fusion_weights|embed_tokens\.weight|markov_w1\.weight)$")
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic that pushes every singular value towards 1 (Jordan et al. 2024, Muon)."""


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are updated by one rule."""

    rule: str
    """muon, adamw (with weight decay) or adamw-no-decay."""
    names: tuple[str, ...]


def group_parameters(model: nn.Module, *, use_muon: bool) -> list[ParameterGroup]:
    """Assign each trainable parameter to a rule, by its name and shape alone.

    - ``muon``: matrices inside layers (attention and MLP), if asked for;
    - ``adamw``: every other matrix (context projection, correction, Markov and confidence heads);
    - ``adamw-no-decay``: norms, biases, fusion weights and embedding tables.
    """
    groups: dict[str, list[str]] = {"muon": [], "adamw": [], "adamw-no-decay": []}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim < 2 or _NO_DECAY.search(name):
            groups["adamw-no-decay"].append(name)
        elif use_muon and parameter.ndim == 2 and _INSIDE_A_LAYER.search(name):
            groups["muon"].append(name)
        else:
            groups["adamw"].append(name)
    return [ParameterGroup(rule, tuple(names)) for rule, names in groups.items() if names]


def orthogonalise(matrices_NRC: Tensor, *, steps: int = 5, dtype: torch.dtype | None = None) -> Tensor:
    """Newton-Schulz iteration of a batch of matrices towards the nearest orthogonal ones (singular values ~ 1).

    Args:
        matrices_NRC: [N, rows, columns].
        steps: iterations of the quintic.
        dtype: precision of the products; None: bfloat16, which the iteration tolerates, where it is fast.

    Returns:
        A tensor of the same shape and dtype.
    """
    a, b, c = _NEWTON_SCHULZ
    tall = matrices_NRC.shape[-2] > matrices_NRC.shape[-1]
    x = matrices_NRC.mT if tall else matrices_NRC
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    if dtype is None:
        dtype = torch.bfloat16 if has_bfloat16_products(x.device) else torch.float32
    x = x.to(dtype)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices_NRC.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum, Nesterov, orthogonalised; scaled so that an update has the RMS of AdamW's.

    Each matrix moves by ``lr * 0.2 * sqrt(max(rows, columns))`` times the orthogonalised direction, with
    decoupled weight decay. Matrices of one shape are orthogonalised as one batch; sharded matrices (DTensor) are
    gathered for it, because the iteration needs the whole matrix.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.product_dtype = dtype
        for group in self.param_groups:
            if any(parameter.ndim != 2 for parameter in group["params"]):
                raise ValueError("Muon takes matrices only")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Apply one update to every parameter that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(tuple(parameter.shape), []).append(parameter)
            for shape, parameters in by_shape.items():
                directions = [self._direction(parameter, group["momentum"]) for parameter in parameters]
                orthogonal = orthogonalise(torch.stack(directions), dtype=self.product_dtype)
                scale = group["lr"] * 0.2 * max(shape) ** 0.5
                for parameter, update in zip(parameters, orthogonal, strict=True):
                    if isinstance(parameter, DTensor):
                        update = distribute_tensor(update, parameter.device_mesh, parameter.placements)
                    parameter.mul_(1.0 - group["lr"] * group["weight_decay"]).sub_(update, alpha=scale)

    def _direction(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = state["momentum_buffer"].lerp_(parameter.grad, 1.0 - momentum)
        direction = torch.lerp(parameter.grad, buffer, momentum)
        return direction.full_tensor() if isinstance(direction, DTensor) else direction


class Optimiser:
    """The optimisers of one model behind one interface: step, learning rate, state by parameter name."""

    def __init__(self, model: nn.Module, section: OptimizerSection) -> None:
        self.section = section
        self.groups = group_parameters(model, use_muon=section.name == "muon")
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        adamw = [group for group in self.groups if group.rule != "muon"]
        muon = [group for group in self.groups if group.rule == "muon"]
        self._optimisers: list[torch.optim.Optimizer] = []
        if adamw:
            sharded = any(isinstance(p, DTensor) for p in self._parameters.values())
            self._optimisers.append(
                torch.optim.AdamW(
                    [
                        {
                            "params": self._of(group),
                            "weight_decay": 0.0 if group.rule == "adamw-no-decay" else section.weight_decay,
                        }
                        for group in adamw
                    ],
                    lr=section.learning_rate,
                    betas=section.betas,
                    eps=section.epsilon,
                    **({} if sharded else {"fused": True}),
                )
            )
        if muon:
            self._optimisers.append(
                Muon(
                    self._of(muon[0]),
                    lr=section.muon_learning_rate,
                    momentum=section.muon_momentum,
                    weight_decay=section.weight_decay,
                )
            )
        self._peaks = [[group["lr"] for group in o.param_groups] for o in self._optimisers]

    def _of(self, group: ParameterGroup) -> list[nn.Parameter]:
        return [self._parameters[name] for name in group.names]

    @property
    def learning_rate(self) -> float:
        """The rate of the first group, as it stands now."""
        return self._optimisers[0].param_groups[0]["lr"]

    def set_factor(self, factor: float) -> None:
        """Set every group's rate to its peak times ``factor``."""
        for optimiser, peaks in zip(self._optimisers, self._peaks, strict=True):
            for group, peak in zip(optimiser.param_groups, peaks, strict=True):
                group["lr"] = peak * factor

    def step(self) -> None:
        """Update every parameter from its gradient."""
        for optimiser in self._optimisers:
            optimiser.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for optimiser in self._optimisers:
            optimiser.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, Tensor]:
        """Every state tensor as ``<parameter name>/<state name>``, e.g. ``final_norm.weight/exp_avg``; to restore a
        state, create it and copy into these."""
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        return {
            f"{names[id(parameter)]}/{key}": value
            for optimiser in self._optimisers
            for parameter, state in optimiser.state.items()
            for key, value in state.items()
        }

    def create_state(self) -> None:
        """Fill the state with zeros as a first update would, without moving a parameter."""
        for optimiser in self._optimisers:
            for group in optimiser.param_groups:
                for parameter in group["params"]:
                    state = optimiser.state[parameter]
                    if state:
                        continue
                    if isinstance(optimiser, Muon):
                        state["momentum_buffer"] = torch.zeros_like(parameter)
                    else:
                        device = parameter.device if group.get("fused") else "cpu"
                        state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                        state["exp_avg"] = torch.zeros_like(parameter)
                        state["exp_avg_sq"] = torch.zeros_like(parameter)
