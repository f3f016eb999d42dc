"""A key that stands twice is an error; merges and plain data are read as PyYAML reads them."""

import pytest
import yaml

from angelspec.core.yaml_text import YamlError, parse_yaml


@pytest.mark.parametrize("text", ["a: 1\nb: {a: 2}\n", "[{a: 1}, {a: 2}]", "", '{"x": [1, null]}', "1: a\n'1': b\n"])
def test_reads_what_pyyaml_reads(text):
    assert parse_yaml(text) == yaml.safe_load(text)


def test_a_merged_key_may_be_stated_again():
    text = "one: &one {a: 1, b: 2}\ntwo: {<<: *one, b: 3}\nthree: {<<: *one, a: 4}\n"
    assert parse_yaml(text) == {"one": {"a": 1, "b": 2}, "two": {"a": 1, "b": 3}, "three": {"a": 4, "b": 2}}


@pytest.mark.parametrize(
    "text, told",
    [
        ("a: 1\nb: 2\na: 3\n", r"'a' stands twice in one mapping \(lines 1 and 3\)"),
        ("x:\n  - {b: 1, 'b': 2}\n", r"'b' stands twice in one mapping \(lines 2 and 2\)"),
        ("day: 2024-13-45", "month"),
        ("a: [1", "expected"),
    ],
)
def test_refuses(text, told):
    with pytest.raises(YamlError, match=told):
        parse_yaml(text)
