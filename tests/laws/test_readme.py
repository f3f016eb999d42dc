"""Every `angelspec` command in the README parses, and every recipe it names exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from angelspec.cli.main import cli
from angelspec.core.recipe_files import list_recipes

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
LINES = [line for block in BLOCKS for line in block.splitlines()]
COMMANDS = [line.split("#")[0].strip() for line in LINES if line.startswith("angelspec ")]


def parse(line: str) -> None:
    """Parse one command line as click would, without running it."""
    arguments = shlex.split(line)[1:]
    command: click.Command = cli
    context = click.Context(cli, info_name="angelspec")
    while isinstance(command, click.Group):
        name, found, arguments = command.resolve_command(context, arguments)
        assert found is not None, line
        command = found
        context = click.Context(command, info_name=name, parent=context)
    command.make_context(command.name, arguments, parent=context.parent)


def test_the_readme_shows_commands():
    assert len(COMMANDS) >= 10


@pytest.mark.parametrize("line", COMMANDS)
def test_parses(line):
    parse(line)


def test_the_law_sees_an_unknown_option_and_command():
    with pytest.raises(click.UsageError):
        parse("angelspec recipe run smollm2-dfly-nothink --fast")
    with pytest.raises(click.UsageError):
        parse("angelspec recipe bake smollm2-dfly-nothink")


def test_named_recipes_exist():
    names = {summary.name for summary in list_recipes()}
    named = set(
        re.findall(r"angelspec (?:recipe (?:run|show|check)|bench train) ([a-z][a-z0-9-]*)(?![a-z0-9.-])", README)
    )
    assert named and named <= names
