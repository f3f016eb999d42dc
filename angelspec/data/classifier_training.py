"""Makes the weights of ``core.classifier`` from prompts, and measures them.

    python -m angelspec.data.classifier_training fit FOLDER [FOLDER ...] [--out FILE]
    python -m angelspec.data.classifier_training check FOLDER [FOLDER ...] [--weights FILE]

Every ``*.jsonl`` file of a folder is read: rows with ``turns`` (or ``text``) and ``workload`` (or ``domain``). The
shipped weights are fitted on ``angelspec/data/prompts/train`` and on public prompts of the same kinds; fitting is
deterministic, and the file names what it was fitted on.

The model is multinomial logistic regression with a ridge penalty, in which a feature votes for the workload that it
speaks for or for none. Each folder counts alike, and in it each source by the root of its rows.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from angelspec.core.classifier import SPEAKS_FOR, WEIGHTS_FILE, ClassifierWeights, classify_text, features
from angelspec.core.errors import DataError
from angelspec.core.files import write_text_atomic
from angelspec.core.fingerprint import file_sha256
from angelspec.core.workloads import WORKLOADS, Workload

_RIDGE, _GUESS = 3e-4, 1.5
_STEPS = 400
_STRONG = ("concept programming language", "cue inline code", "cue code fence", "cue number")
"""Features that nearly decide by themselves. Each row is also shown with one of them hidden, so that the others learn
to stand in for it."""


@dataclass(frozen=True)
class Labelled:
    """One prompt."""

    turns: tuple[str, ...]
    workload: Workload
    folder: str
    source: str


def read_labelled(folder: Path) -> list[Labelled]:
    """Rows of every ``*.jsonl`` file of a folder.

    Raises:
        DataError: no rows, or one without a known workload or text (named by file and line).
    """
    rows = []
    for path in sorted(folder.glob("*.jsonl")):
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # other line separators may stand inside a string
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                workload, turns = row.get("workload", row.get("domain")), row.get("turns") or [row.get("text")]
            except (ValueError, AttributeError):
                workload, turns = None, []
            if workload not in WORKLOADS or not all(isinstance(turn, str) and turn for turn in turns):
                raise DataError(
                    f"{path.name}:{number}: no workload of {', '.join(WORKLOADS)}, or no text",
                    mend='give rows {"workload": ..., "turns": [...]}',
                )
            rows.append(Labelled(tuple(turns), workload, str(folder), f"{path.stem}/{row.get('source', '')}"))
    if not rows:
        raise DataError(f"{folder} holds no *.jsonl rows", mend="name a folder of prompts")
    return rows


def fit(rows: Sequence[Labelled]) -> dict:
    """The weights, as they are stored. Only first turns are read: later ones often say nothing by themselves."""
    seen = [features(row.turns[0]) for row in rows]
    copies = [(i, name) for i, found in enumerate(seen) for name in ("", *_STRONG) if not name or name in found]
    names = sorted(SPEAKS_FOR)
    column = {name: i for i, name in enumerate(names)}
    x, y = np.zeros((len(copies), len(names))), np.zeros((len(copies), len(WORKLOADS)))
    for line, (i, hidden) in enumerate(copies):
        for name, value in seen[i].items():
            x[line, column[name]] = value if name != hidden else 0.0
        y[line, WORKLOADS.index(rows[i].workload)] = 1
    copies_of = Counter(i for i, _ in copies)
    row_weight = _row_weights(rows)
    copy_weight = np.array([row_weight[i] / copies_of[i] for i, _ in copies])
    mine = np.array([[SPEAKS_FOR[name] == workload for workload in WORKLOADS] for name in names])
    weight, bias = _regression(x, y, row_weight=copy_weight, mine=mine)
    weight -= weight.mean(axis=1, keepdims=True)
    return {
        "workloads": list(WORKLOADS),
        "bias": [round(float(b), 3) for b in bias - bias.mean()],
        "votes": {name: [round(float(w), 3) for w in weight[i]] for i, name in enumerate(names)},
    }


def _row_weights(rows: Sequence[Labelled]) -> np.ndarray:
    """Workloads count alike, in each the folders, and in a folder each source by the root of its rows."""
    keys = [(row.workload, row.folder, row.source) for row in rows]
    rows_of = Counter(keys)
    folders = Counter({(workload, folder) for workload, folder, _ in rows_of})
    num_folders = Counter(workload for workload, _ in folders)
    whole: Counter[tuple[Workload, str]] = Counter()
    for (workload, folder, _), count in rows_of.items():
        whole[workload, folder] += count**0.5
    return np.array([rows_of[key] ** -0.5 / whole[key[:2]] / num_folders[key[0]] / len(num_folders) for key in keys])


def _regression(
    x: np.ndarray, y: np.ndarray, *, row_weight: np.ndarray, mine: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Minimise sum_i w_i cross_entropy_i + ridge |W - W_0|^2 by accelerated projected gradient steps of a safe length.

    Args:
        mine: per feature and workload, whether the feature speaks for it: there W >= 0, elsewhere W <= 0. W_0 is a
            margin of ``_GUESS`` between the two, which a feature keeps that training prompts hardly show.
    """
    guess = np.where(mine, 1.0, -0.5) * _GUESS / 1.5
    least, most = np.where(mine, 0.0, -np.inf), np.where(mine, np.inf, 0.0)
    weight, bias = guess.copy(), np.zeros(y.shape[1])
    curvature = 0.5 * float((row_weight * (x**2).sum(axis=1)).sum()) + 0.5
    step = 1 / (curvature + 2 * _RIDGE)
    ahead_w, ahead_b, momentum = weight, bias, 1.0
    for _ in range(_STEPS):
        score = x @ ahead_w + ahead_b
        score -= score.max(axis=1, keepdims=True)
        chance = np.exp(score)
        chance /= chance.sum(axis=1, keepdims=True)
        error = (chance - y) * row_weight[:, None]
        new_w = np.clip(ahead_w - step * (x.T @ error + 2 * _RIDGE * (ahead_w - guess)), least, most)
        new_b = ahead_b - step * error.sum(axis=0)
        faster = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        ahead_w = new_w + (momentum - 1) / faster * (new_w - weight)
        ahead_b = new_b + (momentum - 1) / faster * (new_b - bias)
        weight, bias, momentum = new_w, new_b, faster
    return weight, bias


def confusion(rows: Sequence[Labelled], weights: ClassifierWeights | None = None) -> dict[Workload, Counter[Workload]]:
    """By true workload, how often each was answered; all turns of a row are read."""
    table: dict[Workload, Counter[Workload]] = {workload: Counter() for workload in WORKLOADS}
    for row in rows:
        table[row.workload][classify_text(*row.turns, weights=weights).workload] += 1
    return table


def shown(table: dict[Workload, Counter[Workload]]) -> str:
    """A confusion matrix in text, with the share that is right."""
    right, total = sum(table[w][w] for w in WORKLOADS), sum(sum(counts.values()) for counts in table.values())
    lines = ["true \\ answered" + "".join(f"{w:>8}" for w in WORKLOADS)]
    lines += [f"{w:<15}" + "".join(f"{table[w][v]:>8}" for v in WORKLOADS) for w in WORKLOADS]
    return "\n".join([*lines, f"{right} of {total} right: {right / total:.2%}"])


def main(arguments: Sequence[str] | None = None) -> None:
    """The two commands; None: the process's own arguments."""
    parser = argparse.ArgumentParser(prog="python -m angelspec.data.classifier_training", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    fitting = commands.add_parser("fit", help="fit weights and write them")
    fitting.add_argument("folders", nargs="+", type=Path)
    fitting.add_argument("--out", type=Path, default=WEIGHTS_FILE)
    checking = commands.add_parser("check", help="confusion matrix of weights on prompts")
    checking.add_argument("folders", nargs="+", type=Path)
    checking.add_argument("--weights", type=Path, default=WEIGHTS_FILE)
    options = parser.parse_args(arguments)
    rows = [row for folder in options.folders for row in read_labelled(folder)]
    if options.command == "check":
        print(shown(confusion(rows, ClassifierWeights.read(options.weights))))
        return
    files = [path for folder in options.folders for path in sorted(folder.glob("*.jsonl"))]
    fitted_on = [f"{path.parent.name}/{path.name} {file_sha256(path)[:16]}" for path in files]
    content = {"fitted_on": fitted_on, "rows": len(rows), **fit(rows)}
    text = json.dumps({key: value for key, value in content.items() if key != "votes"}, ensure_ascii=False)[:-1]
    votes = ",\n".join(f"{json.dumps(k, ensure_ascii=False)}: {json.dumps(v)}" for k, v in content["votes"].items())
    write_text_atomic(options.out, f'{text}, "votes": {{\n{votes}\n}}}}\n')
    print(f"{len(content['votes'])} features from {len(rows)} rows written to {options.out}")
    print(shown(confusion(rows, ClassifierWeights.read(options.out))))


if __name__ == "__main__":
    main()
