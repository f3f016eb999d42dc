"""The bundle file: read, written, and every mistake named with its key and what is allowed."""

import json

import pytest
import yaml

from angelspec.core.acceptance import AcceptanceCounts, count_steps
from angelspec.core.bundle import Bundle, WorkloadAcceptance, check_bundle, load_bundle, of_checkpoint, parse_bundle
from angelspec.core.calibration import Calibration
from angelspec.core.errors import BundleError
from angelspec.core.manifest import DrafterManifest, MeasuredAcceptance, TargetIdentity, TrainingRecord
from angelspec.core.recipe_files import load_recipe
from angelspec.core.step_costs import DraftPoint, MeasuredFor, StepCosts, VerifyPoint

MODE = "no-think"


def _document(**changes):
    document = {
        "target": {"source": "./target", "mode_family": "smollm2"},
        "drafters": [
            {"name": "mtp", "source": "./mtp", "family": "mtp", "mode": MODE, "depth": 3},
            {
                "name": "dfly",
                "source": "./dfly",
                "family": "block",
                "algorithm": "dfly",
                "mode": "no-think",
                "depth": 7,
            },
        ],
        "routes": [{"workload": "code", "route": "dfly"}],
    }
    return {**document, **changes}


def _bundle(**changes):
    return parse_bundle(_document(**changes), where="a test")


def _measured():
    return {
        "costs": StepCosts(
            measured_for=MeasuredFor(hardware="2 cores", engine="sglang 0.5.23", target="ab"),
            drafting={"dfly": (DraftPoint(rows=1, seconds=0.03),)},
            verification=(VerifyPoint(batch_size=1, slots=1, seconds=0.08),),
        ).model_dump(mode="json"),
        "acceptance": [{"drafter": "mtp", "workload": "chat", "cumulative": [0.8, 0.6, 0.5], "steps": 200}],
        "calibrations": {"dfly": Calibration(slope=0.7).model_dump(mode="json")},
        "dcut": {"ratios": [0.25, 0.5, 1.0]},
    }


@pytest.mark.parametrize("name", ["bundle.yaml", "bundle.json"])
def test_written_and_read_is_the_same(name, tmp_path):
    for changes in ({}, _measured()):
        bundle = _bundle(**changes)
        path = bundle.save(tmp_path / name)
        assert load_bundle(path) == bundle.located(tmp_path)
    read = json.loads if name.endswith("json") else yaml.safe_load
    assert read(path.read_text())["format_version"] == 1


def test_a_person_writes_little(tmp_path):
    text = _bundle().save(tmp_path / "bundle.yaml").read_text()
    assert "costs" not in text and "calibrations" not in text
    assert Bundle.model_validate(yaml.safe_load("target: {source: org/model}")).drafters == ()


def test_paths_are_relative_to_the_file(tmp_path):
    (tmp_path / "mtp").mkdir()
    path = _bundle().save(tmp_path / "bundle.yaml")
    loaded = load_bundle(path)
    assert loaded.drafter("mtp").source == str(tmp_path / "mtp")
    assert _bundle(target={"source": "org/model"}).located(tmp_path).target.source == "org/model"
    problems = check_bundle(path)
    assert [problem.split(":")[0] for problem in problems] == ["target.source", "drafters.dfly.source"]


def test_lookups():
    bundle = _bundle(**_measured())
    assert bundle.depths == {"mtp": 3, "dfly": 7}
    assert bundle.measured == {("mtp", workload): (0.8, 0.6, 0.5) for workload in ("chat", "code", "math")}
    assert bundle.acceptance[0].accepted_length == pytest.approx(2.9)
    assert [d.name for d in bundle.of_mode("no-think")] == ["mtp", "dfly"]
    assert bundle.of_mode("high-think") == bundle.of_mode(None) == ()
    assert bundle.drafter("dfly").aliases == ("dfly", "block")
    with pytest.raises(BundleError, match=r"'dfyl' \(did you mean 'dfly'\?\)"):
        bundle.drafter("dfyl")


def test_costs_hold_only_where_they_were_measured():
    bundle = _bundle(**_measured())
    here = MeasuredFor(hardware="2 cores", engine="sglang 0.5.23", target="ab")
    assert bundle.stale_costs(here) == []
    assert bundle.stale_costs(here.model_copy(update={"target": "cd"})) == ["target was ab, is cd"]
    assert _bundle().stale_costs(here) == ["no costs were measured"]


def test_settings_of_the_cut():
    assert _bundle().dcut.ratio is None
    assert _bundle(dcut={"ratio": 0.5}).dcut.ratio == 0.5
    with pytest.raises(BundleError, match="ratio is fixed, so there is nothing to choose from ratios"):
        _bundle(dcut={"ratio": 0.5, "ratios": [0.25, 0.5]})


def test_a_workload_that_was_not_measured_has_the_mean_of_the_others():
    acceptance = [
        {"drafter": "mtp", "workload": "chat", "cumulative": [0.8, 0.6, 0.5], "steps": 200},
        {"drafter": "mtp", "workload": "code", "cumulative": [0.6, 0.4, 0.1], "steps": 200},
    ]
    measured = _bundle(acceptance=acceptance).measured
    assert measured["mtp", "math"] == pytest.approx((0.7, 0.5, 0.3))
    assert ("dfly", "math") not in measured


def test_counters_become_acceptance_at_the_depth_that_is_drafted():
    counts = AcceptanceCounts(
        generated_tokens=30, verify_steps=20, proposed_tokens=60, drafted_tokens=60, full_depth_steps=20,
        accepted_through=(6, 3, 1),
    )  # fmt: skip
    cut = WorkloadAcceptance.of(counts, drafter="x", workload="code", depth=2)
    assert cut.cumulative == (0.3, 0.15) and cut.steps == 20
    with pytest.raises(BundleError, match="'x' proposes 7 tokens, but was measured on code with 3"):
        WorkloadAcceptance.of(counts, drafter="x", workload="code", depth=7)
    assert WorkloadAcceptance.of(AcceptanceCounts(), drafter="x", workload="code", depth=7) is None


DRAFTER = {"name": "x", "source": "./x", "family": "mtp", "mode": "no-think", "depth": 3}
WRONG = {
    "unknown key": ({"drafer": []}, r"drafer: unknown key \(did you mean 'drafters'\?\); allowed: format_version, "),
    "unknown key inside": (
        {"drafters": [{**DRAFTER, "dept": 3}]},
        r"drafters\.0\.dept: unknown key \(did you mean 'depth'\?\)",
    ),
    "missing": ({"drafters": [{"name": "x"}]}, r"drafters\.0\.source: is required"),
    "no target": ({"target": None}, r"target: "),
    "literal": (
        {"drafters": [{**DRAFTER, "mode": "nothink"}]},
        r"drafters\.0\.mode: 'nothink' is not allowed \(did you mean 'no-think'\?\); allowed: no-think, high-think",
    ),
    "name": ({"drafters": [{**DRAFTER, "name": "My Drafter"}]}, r"drafters\.0\.name: .*given: 'My Drafter'"),
    "twice": ({"drafters": [DRAFTER, DRAFTER], "routes": []}, "two are called 'x'"),
    "reserved": ({"drafters": [{**DRAFTER, "name": "ar"}], "routes": []}, "'ar' is reserved"),
    "mode of the target": (
        {"target": {"source": "x"}, "drafters": [{**DRAFTER, "mode": "high-think"}], "routes": []},
        r"drafters\.x\.mode: the target has no mode 'high-think'; allowed: no-think",
    ),
    "mode family": (
        {"target": {"source": "x", "mode_family": "qwen"}},
        r"target\.mode_family: unknown 'qwen' \(did you mean 'qwen3'\?\); allowed: plain",
    ),
    "route": ({"routes": [{"route": "dfli"}]}, r"routes\.0\.route: no drafter 'dfli' \(did you mean 'dfly'\?\)"),
    "route of another mode": (
        {"routes": [{"mode": "high-think", "route": "dfly"}]},
        "'dfly' is trained for no-think, not high-think",
    ),
    "acceptance of nobody": (
        {"acceptance": [{"drafter": "mpt", "workload": "chat", "cumulative": [0.5] * 3, "steps": 1}]},
        r"acceptance\.0\.drafter: no drafter 'mpt'",
    ),
    "acceptance of another depth": (
        {"acceptance": [{"drafter": "mtp", "workload": "chat", "cumulative": [0.5], "steps": 1}]},
        r"acceptance\.0\.cumulative: 1 numbers, but 'mtp' proposes 3",
    ),
    "acceptance that rises": (
        {"acceptance": [{"drafter": "mtp", "workload": "chat", "cumulative": [0.5, 0.6, 0.1], "steps": 1}]},
        "never rise",
    ),
    "calibration": ({"calibrations": {"mpt": {}}}, r"calibrations\.mpt: no drafter"),
    "calibration's key": ({"calibrations": {"mtp": {"slop": 1}}}, r"calibrations\.mtp\.slop: unknown key"),
    "costs": ({"costs": {"drafting": {"mpt": [{"rows": 1, "seconds": 1}]}}}, r"costs\.drafting\.mpt: no drafter"),
    "ratio": ({"dcut": {"ratio": 1.5}}, r"dcut\.ratio: .*given: 1\.5"),
    "ratios": ({"dcut": {"ratios": []}}, "one at least"),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_are_named(case):
    changes, message = WRONG[case]
    with pytest.raises(BundleError, match=message):
        _bundle(**changes)


def test_all_mistakes_are_shown_at_once(tmp_path):
    path = tmp_path / "bundle.yaml"
    path.write_text(yaml.safe_dump(_document(drafters=[{**DRAFTER, "dept": 3, "depth": 0}], nmae="x")))
    (problem,) = check_bundle(path)
    assert all(key in problem for key in ("drafters.0.dept", "drafters.0.depth", "nmae"))
    assert str(path) in problem and "mend:" in problem


def test_files_that_are_no_bundle(tmp_path):
    path = tmp_path / "bundle.yaml"
    for text, message in [
        ("a: [", "not readable"),
        ("- 1", "a bundle is a mapping"),
        ("format_version: 9\ntarget: {source: x}", "format version 9"),
    ]:
        path.write_text(text)
        with pytest.raises(BundleError, match=message):
            load_bundle(path)
    with pytest.raises(BundleError, match="does not exist"):
        load_bundle(tmp_path / "missing.yaml")


def test_an_exported_drafter_becomes_an_entry():
    recipe = load_recipe("tiny-dfly-llama")
    depth = recipe.drafter_config().num_proposals

    def counts(hits, steps):
        return count_steps([depth] * hits + [0] * (steps - hits), [depth] * steps, [depth] * steps, depth=depth)

    manifest = DrafterManifest(
        angelspec_version="0.1.0", algorithm="dfly", mode=recipe.mode, drafter=recipe.drafter_config(), recipe=recipe,
        target=TargetIdentity(
            name="x", source="x", digest="ab", mode_family=recipe.target.mode_family, geometry=recipe.target.geometry
        ),
        training=TrainingRecord(steps=1, supervised_positions=1, target_tokens=1),
        acceptance=tuple(
            MeasuredAcceptance(suite=suite, workload="code", temperature=heat, finished=ended, unfinished=rest)
            for suite, heat, ended, rest in [
                ("a", 0.0, counts(3, 4), counts(0, 1)), ("b", 0.0, counts(1, 5), counts(0, 0)),
                ("a", 1.0, counts(0, 9), counts(0, 0)),
            ]
        ),
    )  # fmt: skip
    drafter, measured = of_checkpoint(manifest, name="dfly", source="./dfly")
    assert (drafter.family, drafter.algorithm, drafter.depth, drafter.mode) == ("block", "dfly", depth, recipe.mode)
    (code,) = measured
    assert code.workload == "code" and code.steps == 10 and code.cumulative == (0.4,) * depth
    Bundle(target={"source": "x"}, drafters=(drafter,), acceptance=tuple(measured))
