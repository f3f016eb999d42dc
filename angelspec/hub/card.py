"""The model card: everything a person must know before he uses a drafter, from its manifest and its report.

It is plain GitHub Markdown without raw HTML, so that both hubs show it alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from angelspec.core.acceptance import AcceptanceCounts, pool
from angelspec.core.bundle import of_checkpoint
from angelspec.core.drafter_config import ALGORITHM_NAMES, BlockDrafterConfig
from angelspec.core.errors import BundleError
from angelspec.core.manifest import DrafterManifest, MeasuredAcceptance
from angelspec.core.modes import mode_family
from angelspec.core.repositories import Repository
from angelspec.hub.card_metadata import card_metadata, front_matter

_MISSING = "–"


@dataclass(frozen=True)
class ServeLine:
    """One way to serve the drafter."""

    engine: str
    """With its version."""
    command: str
    note: str


@dataclass(frozen=True)
class SpeedLine:
    """Speed of one suite at one temperature."""

    suite: str
    temperature: float
    tokens_per_second: float
    plain_tokens_per_second: float
    concurrency: int = 1

    @property
    def speedup(self) -> float:
        """Over plain decoding."""
        return self.tokens_per_second / self.plain_tokens_per_second


@dataclass(frozen=True)
class Measurement:
    """What the report says besides the accepted lengths, which are in the manifest."""

    machine: str
    versions: Mapping[str, str]
    settings: str
    measured: str
    """When."""
    commands: tuple[str, ...]
    definitions: Mapping[str, str]
    notes: tuple[str, ...] = ()
    speed: tuple[SpeedLine, ...] = ()
    speed_of: str = ""
    """What was timed, and how."""


@dataclass(frozen=True)
class ServedLine:
    """Speed in a server, of one way to use the drafter."""

    traffic: str
    concurrency: int
    choice: str
    tokens_per_second: float
    speedup: float | None
    """Over plain decoding in the same server."""
    interval: tuple[float, float] | None
    """95 %, of the speed-up."""
    accepted_length: float | None
    kept_ratio: float | None
    marks: str = ""
    """Of a faulty measurement, beside its speed; the definitions say what they mean."""
    speedup_marks: str = ""
    """Of it and of plain decoding, beside the speed-up."""


@dataclass(frozen=True)
class Served:
    """A load test of a server that held the drafter."""

    engine: str
    """With its version."""
    machine: str
    settings: str
    measured: str
    """When."""
    command: str
    definitions: Mapping[str, str]
    lines: tuple[ServedLine, ...]
    faults: tuple[str, ...] = ()
    """What is wrong with the measurement, one sentence each."""


@dataclass(frozen=True)
class CardFacts:
    """All that a card says."""

    manifest: DrafterManifest
    name: str
    """By which the commands name it: without the organisation where it is published."""
    license: str
    weight_bytes: int
    dtype: str
    places: tuple[Repository, ...] = ()
    """Where it is published."""
    base_model: str | None = None
    target_license: str | None = None
    library: str | None = None
    """The engine that loads it, as the hubs know it."""
    serve: tuple[ServeLine, ...] = ()
    measurement: Measurement | None = None
    served: Served | None = None
    plots: Mapping[str, str] = field(default_factory=dict)
    """Path by caption."""


def write_card(facts: CardFacts) -> str:
    """The whole README.md."""
    metadata = card_metadata(
        facts.manifest, name=facts.name, license=facts.license, base_model=facts.base_model, engine=facts.library
    )
    sections = [_opening(facts), _use(facts), _facts(facts), _measured(facts), _training(facts), _limits(facts),
                _license(facts)]  # fmt: skip
    return front_matter(metadata) + "\n" + "\n".join(section for section in sections if section)


def _target(facts: CardFacts) -> str:
    if facts.base_model is None:
        return facts.manifest.target.name
    return f"[{facts.base_model}](https://huggingface.co/{facts.base_model})"


def _algorithm(manifest: DrafterManifest) -> str:
    return ALGORITHM_NAMES.get(manifest.algorithm, manifest.algorithm)


def _arguments(manifest: DrafterManifest) -> str:
    family = mode_family(manifest.target.mode_family)
    pairs = [f"{key}={value!r}" for key, value in family.arguments(manifest.mode).items()]
    return f"`{', '.join(pairs)}`" if pairs else "no switch: the template knows one mode"


def _opening(facts: CardFacts) -> str:
    manifest = facts.manifest
    proposals = manifest.drafter.num_proposals
    article = "An" if manifest.algorithm == "mtp" else "A"
    tokens = f"{proposals} token{'s' if proposals > 1 else ''}"
    others = [mode for mode in mode_family(manifest.target.mode_family).modes if mode != manifest.mode]
    warning = (
        f" In {' or '.join(others)} mode the answers stay right, but fewer proposals are accepted, and it may not pay: "
        "use a drafter of that mode there."
        if others
        else ""
    )
    what = (
        f"{article} {_algorithm(manifest)} **draft model for {_target(facts)}**, for speculative decoding. It is no "
        f"language model of its own: at every step it proposes {tokens}, and the target checks them all in one pass. "
        "The answers are the target's own; only their speed changes."
    )
    mode = (
        f"> **Thinking mode: {manifest.mode}** ({_arguments(manifest)}). It was trained on the target's answers in "
        f"this mode only.{warning}"
    )
    return f"# {facts.name}\n\n{what}\n\n{mode}\n"


def _use(facts: CardFacts) -> str:
    lines = ["## Use", ""]
    if facts.places:
        pulls = [f"angelspec pull {place} --output {facts.name}" for place in facts.places]
        lines += ["```bash", *pulls, "```", ""]
    for serve in facts.serve:
        lines += [f"Serve with {serve.engine}: {serve.note}.", "", "```bash", serve.command, "```", ""]
    return "\n".join(lines)


def _facts(facts: CardFacts) -> str:
    manifest, drafter = facts.manifest, facts.manifest.drafter
    rows = [
        ("algorithm", _algorithm(manifest)),
        (
            "target",
            f"{_target(facts)}, from `{_public(manifest.target.source)}`, content `{manifest.target.digest[:16]}`",
        ),
        ("thinking mode", f"{manifest.mode} ({_arguments(manifest)})"),
        ("proposed per step", str(drafter.num_proposals)),
    ]
    if isinstance(drafter, BlockDrafterConfig):
        predicts = "predicts as well" if drafter.sample_from_anchor else "predicts nothing"
        rows += [
            ("block size", f"{drafter.block_size} slots, the anchor included"),
            (
                "slot convention",
                f"slot 0 is the anchor (the last token that stands) and {predicts}; slot k holds the mask token and "
                "predicts the token k places after the anchor "
                f"(`sample_from_anchor: {str(drafter.sample_from_anchor).lower()}`)",
            ),
            ("mask token", f"`{drafter.mask_token_id}`"),
            ("reads target layers", f"{', '.join(map(str, drafter.target_layer_ids))} (outputs, counted from 0)"),
            ("layers", str(drafter.num_layers)),
        ]
    else:
        rows += [
            ("depths", f"{drafter.num_proposals}, one layer used again at each"),
            (
                "convention",
                "depth 0 reads the target's last hidden state and the token after it; each further depth reads the "
                "state and the token of the depth before it",
            ),
        ]
    rows += [
        ("weights", f"{facts.dtype}, {facts.weight_bytes / 1e6:.1f} MB, {_with_or_without(manifest)}"),
        ("angelspec", manifest.angelspec_version),
    ]
    return "## Facts\n\n" + table(("fact", "value"), rows, left=2)


def _with_or_without(manifest: DrafterManifest) -> str:
    whole = manifest.recipe.export.include_embedding
    return f"{'with' if whole else 'without'} the target's embedding and head"


def _public(source: str) -> str:
    """A source without the path to somebody's folder."""
    scheme, colon, rest = source.partition(":")
    if scheme in ("folder", "file"):
        return f"{scheme}:{rest.rstrip('/').split('/')[-1]}"
    return source if colon else source.rstrip("/").split("/")[-1]


def _measured(facts: CardFacts) -> str:
    manifest, measured = facts.manifest, facts.measurement
    if not manifest.acceptance:
        return "## Measured\n\nNothing was measured yet.\n"
    temperatures = sorted({item.temperature for item in manifest.acceptance})
    lines = ["## Measured", "", "Accepted length by real speculative decoding, finished answers:", ""]
    lines += [_length_table(manifest.acceptance, temperatures, algorithm=_algorithm(manifest))]
    if any(item.finished.full_depth_steps for item in manifest.acceptance):
        lines += ["Share of full-depth steps whose proposals 1 to k were all accepted (p_k), all suites:", ""]
        lines += [_position_table(manifest.acceptance, temperatures)]
        lines += _first_estimates(manifest)
    if measured is not None:
        lines += _speed(measured)
    if facts.served is not None:
        lines += _served(facts.served)
    for caption, path in facts.plots.items():
        lines += [f"![{caption}]({path})", ""]
    if measured is not None:
        versions = ", ".join(f"{name} {number}" for name, number in measured.versions.items())
        lines += [f"Measured {measured.measured} on {measured.machine}; {measured.settings}; {versions}.", ""]
        lines += ["What the figures mean:", ""]
        lines += [f"- **{name}**: {text}" for name, text in measured.definitions.items()]
        lines += ["", "To get them again, with the files (and the drafter to start from) that the recipe names:", ""]
        lines += ["```bash", *measured.commands, "```", ""]
    return "\n".join(lines)


def _length_table(cells: Sequence[MeasuredAcceptance], temperatures: Sequence[float], *, algorithm: str) -> str:
    rows = []
    suites = list(dict.fromkeys((item.suite, item.workload) for item in cells))
    for suite, workload in [*suites, (None, None)]:
        row = ["all" if suite is None else _suite(suite, workload)]
        for temperature in temperatures:
            of = [c for c in cells if c.temperature == temperature and suite in (None, c.suite)
                  and workload in (None, c.workload)]  # fmt: skip
            lookups = [c.lookup_finished for c in of if c.lookup_finished is not None]
            ours = pool(c.finished for c in of)
            row += [_number(ours.mean_accepted_length), _number(pool(lookups).mean_accepted_length),
                    f"{ours.verify_steps:,}"]  # fmt: skip
        rows.append(row)
    columns = ["suite"]
    for temperature in temperatures:
        columns += [f"{algorithm}, temperature {temperature:g}", "prompt lookup", "verify steps"]
    return table(columns, rows)


def _suite(suite: str, workload: str) -> str:
    return suite if suite == workload else f"{suite} ({workload})"


def _position_table(cells: Sequence[MeasuredAcceptance], temperatures: Sequence[float]) -> str:
    pooled = {t: pool(c.finished for c in cells if c.temperature == t) for t in temperatures}
    depth = max((len(counts.cumulative_acceptance) for counts in pooled.values()), default=0)
    rows = [
        [f"temperature {t:g}", *_rates(counts, depth), f"{counts.full_depth_steps:,}"] for t, counts in pooled.items()
    ]
    return table(["", *(f"p{k}" for k in range(1, depth + 1)), "full-depth steps"], rows)


def _first_estimates(manifest: DrafterManifest) -> list[str]:
    """What a bundle takes from the manifest, so that what a server says of itself is found in the card."""
    try:
        _, measured = of_checkpoint(manifest, name="drafter", source=".")
    except BundleError as error:  # measured at a smaller depth
        return [f"A server can't estimate from these figures: {error}.", ""]
    if not measured:
        return []
    rows = [
        [one.workload, f"{one.accepted_length:.2f}", *(f"{rate:.3f}" for rate in one.cumulative), f"{one.steps:,}"]
        for one in measured
    ]
    columns = ["workload", "accepted length", *(f"p{k}" for k in range(1, manifest.drafter.num_proposals + 1)), "steps"]
    coldest = min(item.temperature for item in manifest.acceptance)
    return [
        "What `angelspec serve` expects of it before it has seen traffic, and what `angelspec bundle show` and the "
        f"server's `/server_info` say (temperature {coldest:g}, suites of a workload together, answers cut at the "
        "token limit included):",
        "",
        table(columns, rows),
    ]


def _rates(counts: AcceptanceCounts, depth: int) -> list[str]:
    rates = [f"{rate:.3f}" for rate in counts.cumulative_acceptance]
    return rates + [_MISSING] * (depth - len(rates))


def _speed(measured: Measurement) -> list[str]:
    if not measured.speed:
        return []
    rows = [
        (line.suite, f"{line.temperature:g}", str(line.concurrency), f"{line.tokens_per_second:.1f}",
         f"{line.plain_tokens_per_second:.1f}", f"{line.speedup:.2f}x")
        for line in measured.speed
    ]  # fmt: skip
    columns = ("suite", "temperature", "concurrency", "tokens/s", "plain tokens/s", "speed-up")
    return [f"Speed ({measured.speed_of}):", "", table(columns, rows)]


def _served(served: Served) -> list[str]:
    rows = []
    for line in served.lines:
        speedup = _MISSING if line.speedup is None else f"{line.speedup:.2f}x{line.speedup_marks}"
        if line.interval is not None:
            speedup += f" [{line.interval[0]:.2f}, {line.interval[1]:.2f}]"
        kept = _MISSING if line.kept_ratio is None else f"{line.kept_ratio:.0%}"
        rows.append((line.traffic, line.choice, str(line.concurrency), f"{line.tokens_per_second:.1f}{line.marks}",
                     speedup, _number(line.accepted_length), kept))  # fmt: skip
    columns = ("traffic", "choice", "concurrency", "tokens/s", "speed-up", "accepted length", "kept ratio")
    return [
        f"Served by {served.engine} on {served.machine}, measured {served.measured}; {served.settings}; plain decoding "
        "and every choice in turns in one server:",
        "",
        table(columns, rows, left=2),
        *(["Faults of this measurement:", "", *(f"- {fault}" for fault in served.faults), ""] if served.faults else []),
        *(f"- **{name}**: {text}" for name, text in served.definitions.items()),
        "",
        "```bash",
        served.command,
        "```",
        "",
    ]


def _training(facts: CardFacts) -> str:
    manifest, data, training = facts.manifest, facts.manifest.recipe.data, facts.manifest.training
    rollout = manifest.recipe.rollout
    if data.responses == "rollout":
        answers = (
            f"The prompts were answered anew by the target itself, in {manifest.mode} mode at temperature "
            f"{rollout.temperature:g}, up to {rollout.max_new_tokens} tokens, and answers that ended by "
            f"{' or '.join(rollout.keep_finish_reasons)} were kept."
        )
    else:
        answers = "The answers are those of the data; they were not regenerated by the target."
    sources = ", ".join(f"{source.name} (`{_public(source.source)}`)" for source in data.train)
    stages = ", then ".join(f"{stage.name} ({stage.steps} steps)" for stage in training.stages)
    run = sum(stage.steps for stage in training.stages) or training.steps
    kept = f"; these weights, the best on held-out answers, have seen {training.steps:,} of them"
    documents = ", ".join(f"{count:,} {workload}" for workload, count in training.workloads.items())
    documents = f" in {documents} documents" if documents else ""
    start = (
        f" It started from the weights of a training before it (`{_public(training.initial_checkpoint)}`)."
        if training.initial_checkpoint
        else ""
    )
    data_text = (
        f"Data: {sources}. {answers} Prompts that share {data.decontaminate_tokens} tokens in a row with an evaluation "
        "example were dropped."
    )
    steps_text = (
        f"{training.target_tokens:,} supervised target tokens{documents}; {training.supervised_positions:,} proposals "
        f"entered the loss in {run:,} steps: {stages or 'one stage'}{kept if training.steps < run else ''}.{start} "
        f"The whole resolved recipe (`{manifest.recipe.name}`) is in `angelspec_manifest.json`."
    )
    return f"## Training\n\n{data_text}\n\n{steps_text}\n"


def _limits(facts: CardFacts) -> str:
    notes = list(facts.measurement.notes) if facts.measurement is not None else []
    lines = [
        f"It drafts for exactly this target. With other weights, another tokenizer or another chat template than "
        f"`{facts.manifest.target.digest[:16]}` the answers stay right, but fewer proposals are accepted.",
        f"It knows {facts.manifest.mode} answers only.",
        "Figures hold for the prompts, lengths and temperatures that were measured; languages and subjects that are "
        "not in the training data are drafted worse.",
        *_below_lookup(facts.manifest.acceptance),
        *notes,
    ]
    return "## Limits\n\n" + "".join(f"- {line}\n" for line in lines)


def _below_lookup(cells: Sequence[MeasuredAcceptance]) -> list[str]:
    """Where copying the prompt is as good: a drafter that does not say so is overrated."""
    worse = []
    for cell in cells:
        ours = cell.finished.mean_accepted_length
        lookup = cell.lookup_finished.mean_accepted_length if cell.lookup_finished is not None else None
        if ours is not None and lookup is not None and ours <= lookup:
            where = f"{_suite(cell.suite, cell.workload)} at temperature {cell.temperature:g}"
            worse.append(f"{where} ({ours:.2f} against {lookup:.2f})")
    return (
        [f"It accepts no more than prompt lookup, a drafter without weights, on {', '.join(worse)}."] if worse else []
    )


def _license(facts: CardFacts) -> str:
    target = facts.target_license or "see its own card"
    return (
        f"## Licence\n\nThis drafter: {facts.license} (see `LICENSE`). The target, without which it is of no use: "
        f"{target}.\n\nMade with angelspec from the recipe `{facts.manifest.recipe.name}`; the method is that of arXiv "
        "2607.25852.\n"
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A Markdown table; the first ``left`` columns are left-aligned, the others right."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = "|" + "|".join("---" if index < left else "---:" for index in range(len(columns))) + "|"
    return "\n".join([line(columns), rule, *map(line, rows), ""])


def _number(value: float | None) -> str:
    return _MISSING if value is None else f"{value:.2f}"
