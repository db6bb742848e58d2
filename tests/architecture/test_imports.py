"""The rooms import in one direction, and the light ones stay light."""

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.timeout(240)  # fresh interpreters that import torch, on a busy machine


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )


def loaded_by(module: str) -> set[str]:
    """Top-level modules that importing ``module`` loads in a fresh interpreter."""
    code = (
        "import sys, json; before = set(sys.modules)\n"
        f"import {module}\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in set(sys.modules) - before})))"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_import_contracts_hold() -> None:
    done = run_python(
        "import sys; from importlinter.cli import lint_imports_command as check; sys.exit(check(['--no-logo']))"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 broken" in done.stdout


def test_graph_is_standard_library_only() -> None:
    assert loaded_by("app.graph") - set(sys.stdlib_module_names) == {"app"}


@pytest.mark.parametrize("module", ["app.graph", "app.storage", "app.cli", "app.paths"])
def test_no_torch_behind_the_light_rooms(module: str) -> None:
    assert not loaded_by(module) & {
        "torch",
        "numpy",
        "diffusers",
        "transformers",
        "accelerate",
        "jagg",
        "nodes",
    }


def test_every_node_module_is_under_the_independence_contract() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = {c["id"]: c for c in config["tool"]["importlinter"]["contracts"]}
    files = {
        f"nodes.{file.stem}" for file in (ROOT / "nodes").glob("*.py") if file.stem != "__init__"
    }
    assert set(contracts["independent-nodes"]["modules"]) == files


@pytest.mark.parametrize("room", ["app", "nodes", "jagg"])
def test_no_module_is_named_after_nothing(room: str) -> None:
    """A module is named after what its functions share; the ban keeps drawers of odds and ends out."""
    names = {file.stem for file in (ROOT / room).rglob("*.py")}
    assert not names & {"utils", "util", "common", "misc", "helpers"}


def test_nothing_is_skipped_without_a_reason() -> None:
    """A skip or an expected failure names its reason where it is written."""
    bare = []
    for file in sorted((ROOT / "tests").rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute):
                continue
            mark = ast.unparse(node)
            if mark not in {
                "pytest.mark.skip",
                "pytest.mark.skipif",
                "pytest.mark.xfail",
                "pytest.skip",
            }:
                continue
            call = called.get(id(node))
            given = call is not None and (
                any(keyword.arg == "reason" for keyword in call.keywords)
                or (mark == "pytest.skip" and call.args)
            )
            if not given:
                bare.append(f"{file.relative_to(ROOT)}:{node.lineno} {mark}")
    assert bare == []
