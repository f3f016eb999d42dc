"""How a committed run of tokens ends an answer, and how steps are counted."""

from angelspec.decoding.answers import Decoded, Stopwatch, accept_tokens


def test_a_stop_token_ends_the_answer_and_belongs_to_it():
    assert accept_tokens([5, 1, 6, 1], stop_token_ids={1}, room=10) == ([5, 1], "stop")


def test_the_limit_ends_the_answer():
    assert accept_tokens([5, 6, 7], stop_token_ids={1}, room=2) == ([5, 6], "length")
    assert accept_tokens([5, 6], stop_token_ids={1}, room=2) == ([5, 6], "length")
    assert accept_tokens([5, 6], stop_token_ids={1}, room=3) == ([5, 6], None)


def test_a_stop_token_on_the_last_place_is_a_stop():
    assert accept_tokens([5, 1], stop_token_ids={1}, room=2) == ([5, 1], "stop")
    assert accept_tokens([5, 6, 1], stop_token_ids={1}, room=2) == ([5, 6], "length")


def test_counts_use_what_was_committed():
    answer = Decoded(tokens=[9, 5, 6, 1], accepted=[1, 1], proposed=[3, 3], drafted=[3, 3], committed=[2, 1])
    counts = answer.counts(depth=3)
    assert counts.generated_tokens == 3  # the first token came from the prompt
    assert counts.mean_accepted_length == 1.5


def test_the_stopwatch_adds_spans():
    watch = Stopwatch("cpu")
    with watch.span("draft"):
        sum(range(10_000))
    first = watch.seconds["draft"]
    with watch.span("draft"):
        sum(range(10_000))
    assert watch.seconds["draft"] > first > 0
    assert watch.total() >= watch.seconds["draft"]
