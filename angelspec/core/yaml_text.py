"""YAML that loses nothing: a key that stands twice in one mapping is an error, not the last of its values."""

from __future__ import annotations

from typing import Any

import yaml

_MERGE = "tag:yaml.org,2002:merge"


class YamlError(ValueError):
    """Text that is no YAML, or a mapping with a key twice; says where."""


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        first: dict[tuple[str, str], yaml.ScalarNode] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                other = first.setdefault((key.tag, key.value), key)
                if other is not key:
                    lines = f"{other.start_mark.line + 1} and {key.start_mark.line + 1}"
                    raise YamlError(f"'{key.value}' stands twice in one mapping (lines {lines}); keep one")
        return node


def parse_yaml(text: str) -> Any:
    """The value of one YAML document, plain data only.

    Raises:
        YamlError: it can't be read, or a mapping has a key twice.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except YamlError:
        raise
    except (yaml.YAMLError, ValueError) as error:  # PyYAML leaves the ValueError of a date that does not exist as it is
        raise YamlError(str(error)) from None
