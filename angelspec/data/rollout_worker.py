"""One process of a rollout: it loads the target, then answers shard after shard.

On a CPU a decoding step is made of products too small to share among threads, so a rollout runs whole shards beside
each other instead, each in a process of few threads. Run as ``python -m angelspec.data.rollout_worker``; the parent
(``angelspec.data.rollout``) speaks JSON lines over its standard input and output.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from angelspec.core.errors import AngelspecError, TargetError
from angelspec.core.recipe import TargetSection

_PACKAGE_PARENT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class ShardJob:
    """What ``generate`` needs for one shard."""

    number: int
    prompts: list[list[int]]
    row_keys: list[int]
    settings: dict[str, Any]
    """Keyword arguments of ``generate``."""


ShardAnswers = list[tuple[list[int], str]]
"""Tokens and finish reason of each answer."""


def answer_in_processes(
    jobs: Sequence[ShardJob],
    *,
    section: TargetSection,
    dtype: str,
    workers: int,
    threads: int,
    on_progress: Callable[[int, int], None],
) -> Iterator[tuple[int, ShardAnswers]]:
    """Answer shards in ``workers`` processes of ``threads`` threads; yield (shard number, answers) as they finish.

    Args:
        jobs: begun in this order.
        section: resolved target section.
        dtype: ``float32`` or ``bfloat16``.
        on_progress: called with (tokens, answers) of all shards that are under way or done.

    Raises:
        AngelspecError: what a worker raised, or that it died.
    """
    events: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
    waiting = list(reversed(jobs))
    done: tuple[int, int] = (0, 0)
    under_way = dict.fromkeys(range(workers), (0, 0))
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(workers)]
        processes = [stack.enter_context(_started(threads, log)) for log in logs]
        for worker, process in enumerate(processes):
            threading.Thread(target=_listen, args=(worker, process, events), daemon=True).start()
            _send(process, {"section": section.model_dump(mode="json"), "dtype": dtype, "threads": threads})
        busy = 0
        for process in processes:
            if waiting:
                _send(process, asdict(waiting.pop()))
                busy += 1
        while busy:
            worker, message = events.get()
            if message is None:
                logs[worker].seek(0)
                reason = (logs[worker].read().strip().splitlines() or ["it said nothing"])[-1]
                raise TargetError(
                    f"a rollout process ended early: {reason}", mend="look for lack of memory; finished shards are kept"
                )
            if "error" in message:
                raise AngelspecError(message["error"], mend=message["mend"])
            if "progress" in message:
                under_way[worker] = tuple(message["progress"])
            else:
                under_way[worker] = (0, 0)
                answers: ShardAnswers = [(tokens, reason) for tokens, reason in message["answers"]]
                done = (done[0] + sum(len(tokens) for tokens, _ in answers), done[1] + len(answers))
                yield message["number"], answers
                if waiting:
                    _send(processes[worker], asdict(waiting.pop()))
                else:
                    busy -= 1
            on_progress(
                done[0] + sum(tokens for tokens, _ in under_way.values()),
                done[1] + sum(count for _, count in under_way.values()),
            )


@contextlib.contextmanager
def _started(threads: int, log: TextIO) -> Iterator[subprocess.Popen[str]]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_PACKAGE_PARENT), os.environ.get("PYTHONPATH")])),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "angelspec.data.rollout_worker"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment,
        start_new_session=True,  # Ctrl-C reaches the parent alone, which then ends its workers
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                stream.close()


def _send(process: subprocess.Popen[str], message: dict[str, Any]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the listener reports the death
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()


def _listen(worker: int, process: subprocess.Popen[str], events: queue.Queue) -> None:
    assert process.stdout is not None
    with contextlib.suppress(ValueError):  # closed while reading, at the end
        for line in process.stdout:
            events.put((worker, json.loads(line)))
    events.put((worker, None))


def main() -> None:
    """Serve shards until standard input closes."""
    import torch

    from angelspec.data.generation import generate
    from angelspec.targets.target import load_target

    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints is no message

    def tell(message: dict[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    setup = json.loads(sys.stdin.readline())
    torch.set_num_threads(setup["threads"])
    try:
        target = load_target(TargetSection.model_validate(setup["section"]), dtype=getattr(torch, setup["dtype"]))
        for line in sys.stdin:
            job = ShardJob(**json.loads(line))
            answers = generate(
                target,
                job.prompts,
                row_keys=job.row_keys,
                on_progress=lambda tokens, count: tell({"progress": [tokens, count]}),
                **job.settings,
            )
            tell({"number": job.number, "answers": [[list(answer.tokens), answer.finish_reason] for answer in answers]})
    except AngelspecError as error:
        tell({"error": error.message, "mend": error.mend})


if __name__ == "__main__":
    main()
