"""Imports go down only, function-level imports included."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
FLOOR = {
    "core": 0,
    "ops": 1, "objectives": 1, "targets": 1, "hub": 1, "serving": 1,
    "drafters": 2, "data": 2, "demo": 2,
    "decoding": 3,
    "training": 4,
    "evaluation": 5,
    "pipeline": 6,
    "cli": 7,
}  # fmt: skip
PLUGIN_MAY_USE = {"core", "ops", "drafters"}


def imported_packages(path: Path) -> set[str]:
    """Packages of angelspec (or 'sglang', 'sglang_ext') that a file imports anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module]
            if node.module == "angelspec":
                names = [f"angelspec.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            raise AssertionError(f"{path}: relative import; name the package in full")
        for name in names:
            parts = name.split(".")
            if parts[0] == "angelspec" and len(parts) > 1:
                found.add(parts[1])
            elif parts[0] in ("sglang", "sglang_ext"):
                found.add(parts[0])
    return found


def package_of(path: Path) -> str | None:
    parts = path.relative_to(ROOT / "angelspec").parts
    return parts[0] if len(parts) > 1 else None


def violations(root: Path) -> list[str]:
    bad = []
    for path in sorted((root / "angelspec").rglob("*.py")):
        package = path.relative_to(root / "angelspec").parts
        if len(package) == 1:
            continue
        here = package[0]
        if here not in FLOOR:
            bad.append(f"{path.relative_to(root)}: package '{here}' has no floor")
            continue
        for other in imported_packages(path):
            if other in ("sglang", "sglang_ext"):
                bad.append(f"{path.relative_to(root)}: imports {other}")
            elif other in FLOOR and other != here and FLOOR[other] >= FLOOR[here]:
                bad.append(f"{path.relative_to(root)}: {here} imports {other}")
    return bad


def test_imports_go_down():
    assert violations(ROOT) == []


def test_the_law_sees_a_climbing_function_level_import(tmp_path):
    folder = tmp_path / "angelspec" / "ops"
    folder.mkdir(parents=True)
    (folder / "bad.py").write_text("def f():\n    from angelspec.cli.main import main\n    return main\n")
    assert violations(tmp_path) == ["angelspec/ops/bad.py: ops imports cli"]


def test_the_plugin_uses_only_what_it_may():
    for path in (ROOT / "sglang_ext").rglob("*.py"):
        assert imported_packages(path) <= PLUGIN_MAY_USE | {"sglang", "sglang_ext"}, path
