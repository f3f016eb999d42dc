"""The doctor says what is missing and how to get it, word for word."""

from __future__ import annotations

import json

from click.testing import CliRunner

from angelspec.cli.main import cli
from angelspec.pipeline.doctor import examine, print_examination


def test_every_way_to_get_a_missing_part_is_shown_whole(capsys):
    examination = examine()
    for item in examination["optional"].values():
        item["version"] = None
    print_examination(examination)
    shown = " ".join(capsys.readouterr().out.split())
    for extra in ("modelscope", "tracking", "serve,demo", "demo"):
        assert f"pip install -e '.[{extra}]'" in shown


def test_json_lists_versions_caches_and_recipes():
    result = CliRunner().invoke(cli, ["doctor", "--json"])
    assert result.exit_code == 0
    found = json.loads(result.output)
    assert found["packages"]["torch"]
    assert found["recipes"]["smollm2-dfly-nothink"] == []
    assert all(cache["bytes"] >= 0 for cache in found["caches"])
