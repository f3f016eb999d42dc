"""A built wheel, installed apart from the clone, holds every module, recipe, prompt and template."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, text=True)
    (wheel,) = folder.glob("*.whl")
    site = folder / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True, text=True)
    return site


def tracked(pattern: str) -> set[str]:
    """Files of the repository (tracked, or new and not ignored) that match a git path pattern."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern]
    out = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return {line for line in out.splitlines() if (ROOT / line).is_file()}


def test_holds_every_file_of_the_package(installed):
    missing = {name for name in tracked("angelspec/*") if not (installed / name).is_file()}
    assert missing == set()


@pytest.mark.parametrize("name", ["recipes", "checkpoints"])
def test_holds_the_shipped_folders(installed, name):
    missing = {item for item in tracked(f"{name}/*") if not (installed / "angelspec" / "_resources" / item).is_file()}
    assert missing == set()


def test_holds_the_licence_that_publications_carry(installed):
    carried = installed / "angelspec" / "_resources" / "LICENSE"
    assert carried.read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_runs_apart_from_the_clone(installed, tmp_path):
    script = (
        "import json, angelspec\n"
        "from angelspec.core.recipe_files import list_recipes, load_recipe\n"
        "from angelspec.core.locations import prompt_folder\n"
        "names = [s.name for s in list_recipes()]\n"
        "for name in names: load_recipe(name)\n"
        "print(json.dumps([angelspec.__file__, names, len(list(prompt_folder().rglob('*.jsonl')))]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    )
    file, names, prompts = json.loads(done.stdout)
    assert Path(file).is_relative_to(installed)
    assert "smollm2-dfly-nothink" in names
    assert prompts == 6
