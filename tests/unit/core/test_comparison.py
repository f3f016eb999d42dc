import pytest
from pydantic import ValidationError

from angelspec.core.comparison import Comparison, comparison_names, load_comparison
from angelspec.core.errors import RecipeError


def comparison(**changes):
    values = {"name": "c", "base": "tiny-dfly-llama", "variants": {"a": {}, "b": {"drafter.head": "none"}}}
    return Comparison.model_validate(values | changes)


def test_shipped_comparisons_resolve():
    assert "paper-orderings" in comparison_names()
    for name in comparison_names():
        shipped = load_comparison(name)
        assert len(list(shipped.runs())) == len(shipped.variants) * len(shipped.seeds)


def test_runs_carry_their_overrides_and_seed():
    runs = list(comparison(set={"training.stages.0.steps": 3}, seeds=[4, 7]).runs())
    assert [(variant, seed) for variant, seed, _ in runs] == [("a", 4), ("a", 7), ("b", 4), ("b", 7)]
    for variant, seed, recipe in runs:
        assert recipe.training.seed == seed and recipe.training.stages[0].steps == 3
        assert recipe.drafter_config().head == ("none" if variant == "b" else "correction")


def test_a_variant_wins_over_set_and_the_command_over_the_file():
    held = comparison(set={"drafter.head": "markov"}).with_overrides(["pack.row_length=99"])
    heads = {variant: recipe.drafter_config().head for variant, _, recipe in held.runs()}
    assert heads == {"a": "markov", "b": "none"}
    assert all(recipe.pack.row_length == 99 for _, _, recipe in held.runs())
    with pytest.raises(RecipeError, match=r"section\.field=value"):
        held.with_overrides(["pack.row_length"])


def test_another_mode_is_asked_of_the_variants_of_its_orderings():
    ordering = {"claim": "x", "better": "a", "worse": "b", "mode": "high-think"}
    named = comparison(variants={"a": {}, "b": {}, "c": {}}, orderings=[ordering])
    assert named.variants_in("high-think") == {"a", "b"} and named.variants_in("no-think") == {"a", "b", "c"}


def test_wrong_variants_are_named():
    with pytest.raises(RecipeError, match=r"(?s)variant 'b': .*drafter\.hed"):
        list(comparison(variants={"a": {}, "b": {"drafter.hed": "none"}}).runs())
    with pytest.raises(RecipeError, match="variant 'b' has another target"):
        list(comparison(variants={"a": {}, "b": {"target.trust_remote_code": True}}).runs())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"orderings": [{"claim": "x", "better": "a", "worse": "bb"}]}, r"names no variant: 'bb'.*did you mean 'b'"),
        ({"seeds": [1, 1]}, "seeds repeat"),
        ({"variants": {}}, "variants"),
        ({"vairants": {}}, "vairants"),
        (
            {"modes": ["no-think"], "orderings": [{"claim": "x", "better": "a", "worse": "b", "mode": "high-think"}]},
            "needs mode high-think",
        ),
    ],
)
def test_a_wrong_comparison_is_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        comparison(**changes)


def test_files_are_found_and_their_errors_name_the_key(tmp_path):
    with pytest.raises(RecipeError, match="unknown comparison 'paper-ordering'.*paper-orderings"):
        load_comparison("paper-ordering")
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nbase: tiny-dfly-llama\nvariants: {a: {}}\nsseds: [1]\n")
    with pytest.raises(RecipeError, match="sseds"):
        load_comparison(str(path))
    path.write_text("name: [")
    with pytest.raises(RecipeError, match=r"mine\.yaml: not readable as YAML"):
        load_comparison(str(path))
