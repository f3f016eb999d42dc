"""What a confidence is worth: learnt from verified proposals only, per drafter, position and request."""

import math
import random

import pytest
from pydantic import ValidationError

from angelspec.core.calibration import AcceptanceModel, Calibration, RequestEffect, evidence


def _serve(model, *, chance, confidence, requests=60, steps=60, depth=3, seed=0):
    """Draft and verify whole drafts; chance(rng, request) and confidence(rng, chance) make each proposal."""
    rng = random.Random(seed)
    effect = RequestEffect()
    for request in range(requests):
        effect = RequestEffect()
        for _ in range(steps):
            true = [chance(rng, request) for _ in range(depth)]
            drafted = evidence([confidence(rng, p) for p in true])
            accepted = next((k for k, p in enumerate(true) if rng.random() >= p), depth)
            model.learn(drafted, effect, verified=depth, accepted=accepted)
        model.ended(effect)
    return effect


def test_before_anything_is_learnt_a_confidence_means_what_it_says():
    chances = AcceptanceModel(3).predict(evidence([0.9, 0.5, 0.2]), RequestEffect())
    assert chances == pytest.approx([0.9, 0.5, 0.2])


def test_extreme_and_broken_confidences_are_kept_in_bounds():
    low, lowest, nan, highest = AcceptanceModel(4).predict(evidence([0.0, -1.0, math.nan, 2.0]), RequestEffect())
    assert low == lowest == nan == pytest.approx(0.01)
    assert highest == pytest.approx(0.99)


@pytest.mark.parametrize("truth", [0.15, 0.8])
def test_confidences_that_say_nothing_are_learnt_to_say_nothing(truth):
    model = AcceptanceModel(3)
    _serve(model, chance=lambda rng, _: truth, confidence=lambda rng, p: rng.random())
    assert model.predict(evidence([0.05, 0.5, 0.95]), RequestEffect()) == pytest.approx([truth] * 3, abs=0.07)


def test_overconfidence_is_learnt():
    def four_times_the_odds(_, p):
        return 4 * p / (1 - p + 4 * p)

    model = AcceptanceModel(3)
    _serve(model, chance=lambda rng, _: rng.uniform(0.2, 0.9), confidence=four_times_the_odds)
    predicted = model.predict(evidence([four_times_the_odds(None, p) for p in (0.3, 0.6, 0.85)]), RequestEffect())
    assert predicted == pytest.approx([0.3, 0.6, 0.85], abs=0.07)


def test_a_request_unlike_its_peers_is_told_apart_and_equal_ones_are_not():
    mixed, equal = AcceptanceModel(3), AcceptanceModel(3)
    last = _serve(mixed, chance=lambda rng, n: (0.1, 0.9)[n % 2], confidence=lambda rng, p: 0.7)
    assert mixed.predict(evidence([0.7]), last) == pytest.approx([0.9], abs=0.06)  # the last request was a good one
    assert mixed.stored().spread > 1
    last = _serve(equal, chance=lambda rng, n: 0.5, confidence=lambda rng, p: 0.7)
    assert equal.stored().spread < 0.1
    assert equal.predict(evidence([0.7]), last) == pytest.approx([0.5], abs=0.06)


def test_drafting_that_stops_on_bad_luck_biases_nothing():
    """Requests are all alike, but each is drafted for only until its first miss (and at most four times)."""
    model, rng = AcceptanceModel(1), random.Random(3)
    for _ in range(1500):
        effect = RequestEffect()
        for _ in range(4):
            hit = rng.random() < 0.6
            model.learn(evidence([0.6]), effect, verified=1, accepted=int(hit))
            if not hit:
                break
        model.ended(effect)
    assert model.predict(evidence([0.6]), RequestEffect()) == pytest.approx([0.6], abs=0.05)
    assert model.stored().spread < 0.15


def test_what_was_cut_teaches_nothing():
    model, effect = AcceptanceModel(4), RequestEffect()
    model.learn(evidence([0.9, 0.1, 0.1, 0.1]), effect, verified=0, accepted=0)
    assert model.stored() == AcceptanceModel(4).stored() and effect == RequestEffect()
    model.learn(evidence([0.9, 0.2, 0.8, 0.8]), effect, verified=2, accepted=1)  # a hit, a miss, two cut
    assert model.stored().outcomes == 2
    only = AcceptanceModel(4)
    only.learn(evidence([0.9, 0.2]), RequestEffect(), verified=2, accepted=1)
    assert model.stored() == only.stored()  # whatever the confidence of what was cut
    hit, miss, *cut = model.stored().position_logits
    assert cut[0] == cut[1] and hit > cut[0] > miss


def test_a_position_that_is_always_cut_is_judged_by_those_before_it():
    """Or else depth collapses: what was believed at first would keep it from ever being tried."""
    for chance in (0.95, 0.1):
        model, rng = AcceptanceModel(7), random.Random(1)
        for _ in range(400):
            accepted = next((k for k in range(3) if rng.random() >= chance), 3)
            drafted = evidence([rng.random() for _ in range(7)])
            model.learn(drafted, RequestEffect(), verified=3, accepted=accepted)
        assert model.predict(evidence([0.5] * 7), RequestEffect())[3:] == pytest.approx([chance] * 4, abs=0.13)


def test_after_a_miss_the_rest_teaches_nothing():
    model = AcceptanceModel(4)
    model.learn(evidence([0.5] * 4), RequestEffect(), verified=4, accepted=1)
    assert model.stored().outcomes == 2  # positions 3 and 4 followed a rejected token


def test_one_outcome_moves_a_prediction_only_so_far():
    model, effect = AcceptanceModel(1), RequestEffect()
    model.learn(evidence([1.0]), effect, verified=1, accepted=0)
    (after,) = model.predict(evidence([1.0]), effect)
    assert after == pytest.approx(1 / (1 + math.exp(-(math.log(99) - 2))))  # two logits below 0.99


def test_an_old_outcome_gives_way():
    model, effect = AcceptanceModel(1), RequestEffect()
    for hit in [1] * 100 + [0] * 100:
        model.learn(evidence([0.5]), effect, verified=1, accepted=hit)
    (chance,) = model.predict(evidence([0.5]), effect)
    assert chance < 0.15


def test_what_was_learnt_is_stored_and_taken_up_again():
    model = AcceptanceModel(3)
    _serve(model, chance=lambda rng, _: 0.4, confidence=lambda rng, p: rng.random())
    stored = Calibration.model_validate_json(model.stored().model_dump_json())
    again = AcceptanceModel(3, stored)
    assert again.predict(evidence([0.9, 0.1, 0.5]), RequestEffect()) == pytest.approx([0.4] * 3, abs=0.07)
    assert AcceptanceModel(7, stored).predict(evidence([0.9] * 7), RequestEffect())[6] > 0.45  # unknown positions add 0


def test_equal_histories_give_equal_numbers():
    models = [AcceptanceModel(3) for _ in range(2)]
    for model in models:
        _serve(model, chance=lambda rng, _: rng.random(), confidence=lambda rng, p: rng.random(), requests=5)
    assert models[0].stored() == models[1].stored()


def test_refusals():
    with pytest.raises(ValidationError, match="one number per position each"):
        Calibration(position_logits=(0.0,))
    with pytest.raises(ValidationError, match="must lie in"):
        Calibration(position_logits=(1e9,), position_information=(1.0,))
    with pytest.raises(ValidationError, match="positive"):
        Calibration(position_logits=(0.0,), position_information=(0.0,))
    with pytest.raises(ValidationError):
        Calibration.model_validate({"slop": 1.0})
