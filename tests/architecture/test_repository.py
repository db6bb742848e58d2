"""What the repository ships: workflows that load, and files that name no particular machine."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import launch

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.timeout(240)  # fresh interpreters that import torch, on a busy machine

MACHINE = re.compile(
    r"(?<![\w.])/(?:work|root)/"  # somebody's folders
    r"|pypi\.org|pytorch\.org|pythonhosted\.org|npmjs\.|deb\.debian"  # hosts of package registries
)


def tracked() -> list[Path]:
    done = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"not a git checkout: {done.stderr.strip()}")
    files = [ROOT / name for name in done.stdout.split("\0") if name]
    return [file for file in files if file.is_file()]


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "app.cli", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_no_file_names_a_machine_or_a_registry() -> None:
    found = []
    for file in tracked():
        if file == Path(__file__) or b"\0" in file.read_bytes()[:4096]:
            continue
        for number, line in enumerate(
            file.read_text(encoding="utf-8", errors="replace").splitlines(), 1
        ):
            if MACHINE.search(line):
                found.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert found == []


def test_only_small_files_are_tracked() -> None:
    """Weights apart, a large file in the history is there for good."""
    large = [f for f in tracked() if f.stat().st_size > 500_000 and f.suffix != ".safetensors"]
    assert [str(f.relative_to(ROOT)) for f in large] == []


def test_every_shipped_workflow_validates() -> None:
    files = [str(file) for file in sorted((ROOT / "workflows").glob("**/*.json"))]
    assert str(ROOT / "workflows/quickstart.json") in files
    done = run_cli("validate", *files)
    assert done.returncode == 0, done.stdout + done.stderr


def test_readme_names_commands_that_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text.partition("## Commands")[2].partition("\n## ")[0]
    commands = set(re.findall(r"^\| `(?:python3 launch\.py |\.\.\. )?([a-z-]+)", table, flags=re.M))
    assert {"run", "validate", "nodes", "convert", "test"} <= commands
    listed = run_cli("--help").stdout
    assert {name for name in commands if not re.search(rf"\b{name}\b", listed)} == set()


def test_readme_and_help_know_the_same_environment_variables() -> None:
    def named(text: str) -> set[str]:
        return set(re.findall(r"JAGG_STUDIO_[A-Z_]+", text))

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    code = (ROOT / "launch.py").read_text(encoding="utf-8")
    assert named(readme) == named(launch.HELP)
    assert named(code) - named(launch.HELP) == {launch.HANDED_OVER}


def test_readme_links_lead_somewhere() -> None:
    for page in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        targets = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", text)
        assert [target for target in targets if not (ROOT / target).exists()] == []


def test_readme_lists_every_paper_that_the_code_cites() -> None:
    cited = {
        number
        for room in ("jagg", "nodes")
        for file in (ROOT / room).rglob("*.py")
        for number in re.findall(r"arXiv[ :]([0-9]{4}\.[0-9]{5})", file.read_text(encoding="utf-8"))
    }
    listed = set(
        re.findall(r"arXiv ([0-9.]+[0-9])", (ROOT / "README.md").read_text(encoding="utf-8"))
    )
    assert cited <= listed, sorted(cited - listed)
