"""The proposer of a trained drafter, whichever family it is of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from angelspec.core.drafter_config import SHORTLIST
from angelspec.decoding.block_proposer import BlockProposer
from angelspec.decoding.mtp_proposer import MtpProposer

if TYPE_CHECKING:
    from angelspec.drafters.families import Drafter
    from angelspec.targets.target import Target


def drafter_proposer(
    drafter: Drafter, *, target: Target, name: str, shortlist: int | None = SHORTLIST
) -> BlockProposer | MtpProposer:
    """A trained drafter beside its target, on its device; see ``TrainedProposer``.

    Args:
        shortlist: candidates per slot that a block drafter's sequential head rescores, None for the whole vocabulary;
            MTP has none and ignores it.
    """
    drafter = drafter.to(target.device)
    if drafter.config.family == "mtp":
        return MtpProposer(drafter, target=target, name=name)
    return BlockProposer(drafter, target=target, name=name, shortlist=shortlist)
