"""Reading a recipe and asking for help load no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "numpy", "datasets", "matplotlib")

CASES = {
    "core": "import pkgutil, importlib, angelspec.core as c\n"
    "[importlib.import_module('angelspec.core.' + m.name) for m in pkgutil.iter_modules(c.__path__)]",
    "help": "from click.testing import CliRunner\nfrom angelspec.cli.main import cli\n"
    "assert CliRunner().invoke(cli, ['--help']).exit_code == 0",
    "recipe check": "from click.testing import CliRunner\nfrom angelspec.cli.main import cli\n"
    "assert CliRunner().invoke(cli, ['recipe', 'check', 'smollm2-dfly-nothink']).exit_code == 0",
}


@pytest.mark.parametrize("case", CASES)
def test_loads_nothing_heavy(case):
    script = f"{CASES[case]}\nimport sys\nprint([m for m in {HEAVY!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
