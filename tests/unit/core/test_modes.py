"""Which mode a prompt is rendered in."""

import pytest

from angelspec.core.modes import MODE_FAMILIES, mode_family


@pytest.mark.parametrize(
    ("family", "arguments", "mode"),
    [
        ("smollm2", {}, "no-think"),
        ("smollm2", {"enable_thinking": True}, "high-think"),
        ("qwen3", {}, "high-think"),
        ("qwen3", {"enable_thinking": False, "other": 1}, "no-think"),
        ("hy3", {}, "no-think"),
        ("hy3", {"reasoning_effort": "high"}, "high-think"),
        ("hy3", {"reasoning_effort": "low"}, None),
        ("plain", {"enable_thinking": True}, "no-think"),
    ],
)
def test_the_mode_that_arguments_ask_for(family, arguments, mode):
    assert mode_family(family).mode_of(arguments) == mode


def test_a_modes_own_arguments_ask_for_it():
    for family in MODE_FAMILIES.values():
        for mode in family.modes:
            assert family.mode_of(family.arguments(mode)) == mode
