"""Makes the weights of ``core.classifier`` from prompts, and measures them.

    python -m angelspec.data.classifier_training fit FOLDER [FOLDER ...] [--out FILE]
    python -m angelspec.data.classifier_training check FOLDER [FOLDER ...] [--weights FILE]

Every ``*.jsonl`` file of a folder is read: rows with ``turns`` (or ``text``) and ``workload`` (or ``domain``). The
shipped weights are fitted on ``angelspec/data/prompts/train`` and on public prompts of the same kinds; fitting is
deterministic, and the file names what it was fitted on.

The model is multinomial logistic regression with a ridge penalty. Words are penalised more than cues and concepts,
which hold in every language and style, and each source counts alike, however many rows it has.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from angelspec.core.classifier import WEIGHTS_FILE, ClassifierWeights, classify_text, features
from angelspec.core.errors import DataError
from angelspec.core.files import write_text_atomic
from angelspec.core.fingerprint import file_sha256
from angelspec.core.workloads import WORKLOADS, Workload

_MIN_ROWS = 8
"""A word is a feature if at least so many rows hold it."""
_RIDGE, _WORD_RIDGE = 1e-3, 2e-2
_STEPS = 400
_MOST_WORDS = 1500


@dataclass(frozen=True)
class Labelled:
    """One prompt."""

    turns: tuple[str, ...]
    workload: Workload
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
            rows.append(Labelled(tuple(turns), workload, f"{folder.name}/{path.stem}/{row.get('source', '')}"))
    if not rows:
        raise DataError(f"{folder} holds no *.jsonl rows", mend="name a folder of prompts")
    return rows


def fit(rows: Sequence[Labelled]) -> dict:
    """The weights, as they are stored. Only first turns are read: later ones often say nothing by themselves."""
    seen = [features(row.turns[0]) for row in rows]
    names = _vocabulary(seen, rows)
    column = {name: i for i, name in enumerate(names)}
    x = np.zeros((len(rows), len(names)))
    for i, found in enumerate(seen):
        for name, value in found.items():
            if name in column:
                x[i, column[name]] = value
    y = np.zeros((len(rows), len(WORKLOADS)))
    y[np.arange(len(rows)), [WORKLOADS.index(row.workload) for row in rows]] = 1
    weight, bias = _regression(x, y, _row_weights(rows), np.array([_ridge(name) for name in names]))
    weight -= weight.mean(axis=1, keepdims=True)
    return {
        "workloads": list(WORKLOADS),
        "bias": [round(float(b), 3) for b in bias - bias.mean()],
        "votes": {
            name: [round(float(w), 3) for w in weight[i]]
            for i, name in enumerate(names)
            if np.abs(weight[i]).max() >= 0.02
        },
    }


def _vocabulary(seen: Sequence[dict[str, float]], rows: Sequence[Labelled]) -> list[str]:
    by_feature: dict[str, Counter[str]] = {}
    for found, row in zip(seen, rows, strict=True):
        for name in found:
            by_feature.setdefault(name, Counter())[row.source] += 1
    words, others = [], []
    for name, sources in by_feature.items():
        total = sum(sources.values())
        if not name.startswith("word "):
            others.append(name)
        elif total >= _MIN_ROWS and len(sources) > 1:
            words.append((-total, name))
    return sorted(others) + sorted(name for _, name in sorted(words)[:_MOST_WORDS])


def _row_weights(rows: Sequence[Labelled]) -> np.ndarray:
    """Each workload counts alike, and in it each source by the root of its rows."""
    rows_of = Counter((row.workload, row.source) for row in rows)
    share = {key: count**0.5 for key, count in rows_of.items()}
    whole = {workload: sum(s for (w, _), s in share.items() if w == workload) for workload in WORKLOADS}
    return np.array(
        [share[key] / whole[key[0]] / rows_of[key] / len(WORKLOADS) for key in ((r.workload, r.source) for r in rows)]
    )


def _ridge(name: str) -> float:
    return _WORD_RIDGE if name.startswith("word ") else _RIDGE


def _regression(
    x: np.ndarray, y: np.ndarray, row_weight: np.ndarray, ridge: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Minimise sum_i w_i cross_entropy_i + sum_f ridge_f |W_f|^2 by accelerated gradient steps of a safe length."""
    weight, bias = np.zeros((x.shape[1], y.shape[1])), np.zeros(y.shape[1])
    curvature = 0.5 * float((row_weight * (x**2).sum(axis=1)).sum()) + 0.5
    step = 1 / (curvature + 2 * ridge.max())
    ahead_w, ahead_b, momentum = weight, bias, 1.0
    for _ in range(_STEPS):
        score = x @ ahead_w + ahead_b
        score -= score.max(axis=1, keepdims=True)
        chance = np.exp(score)
        chance /= chance.sum(axis=1, keepdims=True)
        error = (chance - y) * row_weight[:, None]
        new_w = ahead_w - step * (x.T @ error + 2 * ridge[:, None] * ahead_w)
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
    fitted_on = {f"{path.parent.name}/{path.name}": file_sha256(path)[:16] for path in files}
    content = {"fitted_on": fitted_on, "rows": len(rows), **fit(rows)}
    text = json.dumps({key: value for key, value in content.items() if key != "votes"}, ensure_ascii=False)[:-1]
    votes = ",\n".join(f"{json.dumps(k, ensure_ascii=False)}: {json.dumps(v)}" for k, v in content["votes"].items())
    write_text_atomic(options.out, f'{text}, "votes": {{\n{votes}\n}}}}\n')
    print(f"{len(content['votes'])} features from {len(rows)} rows written to {options.out}")
    print(shown(confusion(rows, ClassifierWeights.read(options.out))))


if __name__ == "__main__":
    main()
