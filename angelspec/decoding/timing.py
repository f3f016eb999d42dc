"""What a verify step costs, part by part, while every row of a batch is running."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from angelspec.decoding.proposer import Proposer
from angelspec.decoding.speculative import CutPolicy, Loop, require_room
from angelspec.decoding.verifiers import Request, TargetVerifier

if TYPE_CHECKING:
    from angelspec.targets.target import Target


def time_steps(
    target: Target,
    proposer: Proposer,
    prompts: Sequence[Sequence[int]],
    *,
    steps: int,
    unmeasured_steps: int,
    temperature: float,
    seed: int,
    cut: CutPolicy | None = None,
) -> dict[str, float]:
    """Decode all prompts in one batch, past any stop token, and time ``steps`` steps after some unmeasured ones.

    Args:
        prompts: one row each.
        steps: measured verify steps.
        unmeasured_steps: the ones before them.

    Others as for ``speculative.decode``.

    Returns:
        Wall seconds by component of ``answers.COMPONENTS``, summed over the measured steps of the whole batch.

    Raises:
        DataError: the answers may outgrow the target's positions.
    """
    answer = 1 + (unmeasured_steps + steps) * (proposer.depth + 1)  # no row can end before the last step
    require_room(target, prompts, max_new_tokens=answer)
    loop = Loop(
        TargetVerifier(target, layer_ids=proposer.layer_ids, temperature=temperature, seed=seed),
        proposer,
        num_rows=len(prompts),
        capacity=max(map(len, prompts)) + answer + proposer.depth,
        max_new_tokens=answer,
        cut=cut,
        stop_token_ids=frozenset(),
    )
    loop.admit(deque(Request(index, index, list(prompt)) for index, prompt in enumerate(prompts)))
    for _ in range(unmeasured_steps):
        loop.step()
    before = dict(loop.watch.seconds)
    for _ in range(steps):
        loop.step()
    return {component: seconds - before[component] for component, seconds in loop.watch.seconds.items()}
