"""The faults of tests/mutations.py fit the code as it is; that each is noticed is a slow test."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]


def load():
    spec = importlib.util.spec_from_file_location("mutations", TESTS / "mutations.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


mutations = load()


@pytest.mark.parametrize("change", mutations.MUTATIONS, ids=lambda m: m.row)
def test_every_fault_fits_the_code_and_names_a_test(change):
    text = (mutations.ROOT / change.file).read_text()
    assert text.count(change.original) == 1
    assert change.mutated != change.original
    ast.parse(text.replace(change.original, change.mutated))
    file, name = change.test.split("::")
    assert f"def {name}(" in (mutations.ROOT / file).read_text()


def test_the_table_in_the_readme_lists_every_fault():
    readme = (TESTS / "README.md").read_text()
    rows = [
        line.split("|")[1].strip()
        for line in readme.splitlines()
        if line.startswith("| ") and "`test_" in line
    ]
    assert rows == [change.row.replace("|", "\\|") for change in mutations.MUTATIONS]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_fault_is_noticed():
    command = [sys.executable, str(TESTS / "mutations.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
