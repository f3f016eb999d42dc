"""Proves that a started server speculates: each drafter must have some of its proposals accepted.

A server whose drafter lacks a tensor, reads the wrong layer or was trained for another mode still answers, correctly
and slowly. Its accepted length of 1.00 is the only sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from angelspec.core.acceptance import AcceptanceCounts
from angelspec.core.modes import mode_family
from angelspec.core.request_label import RequestLabel
from angelspec.serving.client import Client
from angelspec.serving.failures import NotSpeculating
from angelspec.serving.resolving import ResolvedBundle
from angelspec.serving.wire import Sampling

PROMPTS = (
    "Write a Python function that returns the sum of a list of numbers.",
    "What is 12 + 30? Show each step.",
    "Name three things that people do in the morning, and say why.",
)
_TOKENS = 48
_NOTHING = 1.005
"""An accepted length that is shown as 1.00."""


@dataclass(frozen=True)
class Probed:
    """What one drafter did."""

    drafter: str
    steps: int
    """Verify steps that it drafted for."""
    accepted_length: float
    trained: bool

    def __str__(self) -> str:
        return f"{self.drafter}: accepted length {self.accepted_length:.2f} over {self.steps} steps"


def probe(client: Client, resolved: ResolvedBundle, *, prompts: Sequence[str] = PROMPTS) -> list[Probed]:
    """Answer a few prompts with each drafter, the route forced and nothing cut.

    Raises:
        NotSpeculating: the extension is not there, or a drafter's proposals are not used or never accepted (by name).
        RequestRefused: the server does not take the labels.
        ServerUnreachable: it stopped answering.
    """
    engine = client.server_info().engine
    if engine is None:
        raise NotSpeculating(
            "the server runs without angelspec's extension: its plugin did not load",
            mend="look for 'angelspec' in the server's log; is angelspec installed beside SGLang?",
        )
    served = {drafter.name for drafter in engine.drafters}
    missing = [drafter.entry.name for drafter in resolved.drafters if drafter.entry.name not in served]
    if missing:
        raise NotSpeculating(f"the server did not load {', '.join(missing)} of the bundle", mend="see its log")
    family = mode_family(resolved.bundle.target.mode_family)
    found = []
    for drafter in resolved.drafters:
        name = drafter.entry.name
        arguments = family.arguments(drafter.entry.mode)
        counts, drafted = AcceptanceCounts(), 0
        for prompt in prompts:
            answer = client.chat(
                [{"role": "user", "content": prompt}],
                sampling=Sampling(max_tokens=_TOKENS, temperature=0.0),
                label=RequestLabel(route=name, ratio=1.0),
                template_arguments=arguments,
                details=True,
            )
            if answer.metadata is None:
                raise NotSpeculating(
                    "the server's answers carry no metadata of angelspec",
                    mend="use the same angelspec for the server and for this command",
                )
            drafted += answer.metadata.steps_by_route.get(name, 0)
            counts += answer.metadata.counts
        length = counts.mean_accepted_length
        if not drafted or length is None:
            raise NotSpeculating(f"drafter '{name}' was asked for but never drafted", mend="see the server's log")
        probed = Probed(name, drafted, length, drafter.is_trained)
        if probed.trained and probed.accepted_length < _NOTHING:
            raise NotSpeculating(
                f"drafter '{name}' is trained, but none of its proposals was accepted: accepted length "
                f"{probed.accepted_length:.2f} over {counts.verify_steps} steps",
                mend="measure it with `angelspec evaluate`; if it is good there, report this as a bug of the server",
            )
        found.append(probed)
    return found
