"""Ranks: one process or many behind the same few calls, so that the loop never asks which.

Losses are numerators and denominators that are summed over all ranks and divided once, so any number of ranks gives the
update of one rank that saw all rows (up to the order of additions). That holds whether two ranks see different rows or,
with sequence parallelism, different positions of the same ones.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from angelspec.core.errors import MissingRequirement
from angelspec.ops.sequence_parallel import SequenceGroup


@dataclass(frozen=True)
class Ranks:
    """This process among the trainers. The default is a process that is alone."""

    rank: int = 0
    world_size: int = 1
    mesh: DeviceMesh | None = field(default=None, compare=False)
    """One-dimensional mesh of all ranks, named ``data``; None alone."""
    sequence: SequenceGroup | None = field(default=None, compare=False)
    """The ranks that share this one's rows; None: no others do."""

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and talks to the user."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Which of the shares of rows is this rank's."""
        return self.rank if self.sequence is None else self.rank // self.sequence.size

    @property
    def data_size(self) -> int:
        """Into how many shares rows are divided."""
        return self.world_size if self.sequence is None else self.world_size // self.sequence.size

    @property
    def counts_rows(self) -> bool:
        """Whether this rank counts its rows: one of those that share them."""
        return self.sequence is None or self.sequence.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier()

    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place, and return it."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return flag if self.world_size == 1 else bool(self.sum(torch.tensor(int(flag))))

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add up replicated gradients over the ranks, as one flat buffer. Sharded ones are summed by FSDP."""
        if self.world_size == 1:
            return
        whole = [p for p in parameters if p.requires_grad and not isinstance(p, DTensor)]
        for parameter in whole:
            if parameter.grad is None:  # a rank without any supervised token still takes part
                parameter.grad = torch.zeros_like(parameter)
        flat = torch.cat([p.grad.reshape(-1) for p in whole]) if whole else None
        if flat is None:
            return
        dist.all_reduce(flat)
        for parameter, part in zip(whole, flat.split([p.numel() for p in whole]), strict=True):
            parameter.grad.copy_(part.view_as(parameter))


def announced_ranks() -> int:
    """How many ranks the launcher started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def connect(device: str = "cpu") -> Ranks:
    """Join the ranks that a launcher (torchrun) announced in the environment; alone without one.

    Raises:
        MissingRequirement: the environment announces ranks but torch has no distributed backend.
    """
    if not dist.is_available():
        if announced_ranks() > 1:
            raise MissingRequirement(
                "WORLD_SIZE is above 1 but this torch was built without torch.distributed",
                mend="install a torch build with distributed support, or start one process",
            )
        return Ranks()
    if not dist.is_initialized():
        if announced_ranks() <= 1:
            return Ranks()
        if device.startswith("cuda"):
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        # counters live on the CPU, which nccl does not serve
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo")
    mesh = init_device_mesh(device.split(":")[0], (dist.get_world_size(),), mesh_dim_names=("data",))
    return Ranks(dist.get_rank(), dist.get_world_size(), mesh)


def share_rows(ranks: Ranks, size: int) -> Ranks:
    """The same ranks, neighbours in groups of ``size`` sharing their rows by positions.

    Raises:
        MissingRequirement: the ranks do not fall into such groups.
    """
    if size == 1:
        return ranks
    if ranks.world_size % size:
        raise MissingRequirement(
            f"training.sequence_parallel is {size} and {ranks.world_size} rank(s) run",
            mend=f"start a multiple of {size} processes (torchrun --nproc-per-node {size}), or set it to 1",
        )
    for first in range(0, ranks.world_size, size):  # every rank takes part in making every group
        group = dist.new_group(list(range(first, first + size)))
        if first <= ranks.rank < first + size:
            mine = group
    return replace(ranks, sequence=SequenceGroup(ranks.rank % size, size, mine))


def shard(model: nn.Module, ranks: Ranks) -> None:
    """Shard a model's parameters, gradients and optimiser state over the ranks with FSDP2, as one unit.

    One unit, because a drafter's context keys and values of all layers are made before its first layer runs, outside
    the layers' own forward. Gradients are summed in float32, not averaged: the loop divides once, by the denominators
    of all ranks.
    """
    if ranks.mesh is None:
        return
    fully_shard(model, mesh=ranks.mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    assert isinstance(model, FSDPModule)
    model.set_force_sum_reduction_for_comms(True)  # gloo can't scale inside a reduction
    model.set_gradient_divide_factor(1.0)


@contextmanager
def whole_parameters(model: nn.Module) -> Iterator[None]:
    """Inside, a sharded model's parameters are whole, for calls other than its forward."""
    if not isinstance(model, FSDPModule):
        yield
        return
    model.unshard()
    try:
        yield
    finally:
        model.reshard()


def equalise(model: nn.Module, ranks: Ranks) -> None:
    """Give every rank the first rank's parameters and buffers."""
    if ranks.world_size > 1:
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), 0)
