"""What a request may carry, and what it is told."""

import pytest

from angelspec.core.errors import RequestError
from angelspec.core.request_label import RequestLabel, RequestRecord, parse_label


def test_labels_are_optional():
    assert parse_label(None) == parse_label({}) == RequestLabel()
    auto = {"workload": "auto", "mode": None, "route": "auto", "dcut": "auto"}
    assert parse_label(auto) == RequestLabel()


def test_a_whole_label():
    label = parse_label({"workload": "code", "mode": "high-think", "route": "dfly", "dcut": 0.5})
    assert label == RequestLabel("code", "high-think", "dfly", 0.5)
    assert parse_label({"dcut": "off"}).ratio == 1.0
    assert parse_label({"dcut": 1}).ratio == 1.0


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"workloda": "code"}, r"workloda: unknown label \(did you mean 'workload'\?\)"),
        (
            {"workload": "maths"},
            r"'maths' is not allowed \(did you mean 'math'\?\)\n  mend: use one of: chat,",
        ),
        ({"workload": 3}, "3 is not allowed"),
        ({"mode": "nothink"}, "did you mean 'no-think'"),
        ({"route": 1}, "of type int"),
        ({"route": ""}, "route is ''"),
        ({"dcut": 0}, "0 is not allowed"),
        ({"dcut": 1.5}, "1.5 is not allowed"),
        ({"dcut": True}, "True is not allowed"),
        ({"dcut": "on"}, "give auto, off or a keep ratio"),
        ({"dcut": float("nan")}, "nan is not allowed"),
        ([], "of type list"),
    ],
)
def test_mistakes_are_named(params, message):
    with pytest.raises(RequestError, match=message):
        parse_label(params)


def test_keys_of_others_may_be_left_alone():
    with pytest.raises(RequestError, match="thinking_budget: unknown label"):
        parse_label({"thinking_budget": 5})
    assert parse_label({"thinking_budget": 5, "route": "ar"}, foreign_keys=True).route == "ar"
    with pytest.raises(RequestError, match="did you mean 'route'"):
        parse_label({"rout": "ar"}, foreign_keys=True)


def test_the_record_counts_and_tells():
    record = RequestRecord(why="asked for by the request", workload="code", mode="no-think")
    assert record.metadata.accepted_length is None and record.metadata.route == "ar"
    record.add("dfly", committed=4, drafted=7, verified=3)
    record.add("dfly", committed=1, drafted=7, verified=1)
    record.add("ar", committed=1)
    metadata = record.metadata
    assert metadata.route == "dfly" and metadata.steps_by_route == {"ar": 1, "dfly": 2}
    assert metadata.verify_steps == 3
    assert metadata.accepted_length == pytest.approx(6 / 3)
    assert metadata.kept_ratio == pytest.approx((4 + 3) / (14 + 3))
    assert metadata.counts == record.counts and metadata.speculative_steps == 2
    assert metadata.speculative_share == pytest.approx(2 / 3)
    assert type(metadata).model_validate_json(metadata.model_dump_json()) == metadata
