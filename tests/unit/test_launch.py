"""launch.py as a real process, on a small copy of the checkout whose packages are local wheels."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import launch

CLI = """
import os, sys
def main(argv):
    if argv[:1] == ["--help"]:
        print("usage: run")
        raise SystemExit(0)
    import pebble
    print(sys.prefix, pebble.VERSION, os.getcwd(), *argv)
    return 7 if argv == ["seven"] else 0
"""

pytestmark = pytest.mark.timeout(240)  # each first start makes a real environment

posix_only = pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")


def write_wheel(folder: Path, name: str, version: str, extra: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", f"VERSION = {version!r}\n{extra}")
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


class Checkout:
    """A small copy of the checkout with the real launch.py."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.wheels = root.parent / "wheels"
        for version in ("1.0", "2.0"):
            write_wheel(self.wheels, "pebble", version)
        write_wheel(self.wheels, "probe", "1.0")
        root.mkdir()
        (root / "launch.py").write_bytes((launch.ROOT / "launch.py").read_bytes())
        for package in ("app/cli", "nodes", "jagg"):
            (root / package).mkdir(parents=True)
            (root / package / "__init__.py").touch()
        (root / "app/__init__.py").touch()
        (root / "app/cli/__init__.py").write_text(CLI)
        self.require("pebble==1.0")
        (root / "requirements-dev.txt").write_text("probe==1.0\n")

    def require(self, *lines: str) -> None:
        local = ["--no-index", f"--find-links {self.wheels}"]
        (self.root / "requirements.txt").write_text("\n".join([*local, *lines]) + "\n")

    def environ(self, **more: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAGG_", "PYTHON"))}
        return {**kept, "JAGG_STUDIO_ISOLATED": "1", "PIP_CONFIG_FILE": os.devnull, **more}

    def start(
        self,
        *arguments: str,
        cwd: Path | None = None,
        python: tuple[str, ...] = (sys.executable,),
        **environ: str,
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*python, str(self.root / "launch.py"), *arguments],
            cwd=cwd or self.root,
            env=self.environ(**environ),
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    def begin(self, *arguments: str) -> subprocess.Popen[str]:
        """Start without waiting, in a process group of its own."""
        return subprocess.Popen(
            [sys.executable, str(self.root / "launch.py"), *arguments],
            cwd=self.root,
            env=self.environ(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def left(self) -> list[str]:
        """What lies about of environments, the lock file apart."""
        return sorted(p.name for p in self.root.glob(".venv*") if p.name != ".venv.lock")


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "check out")


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout after its first start, for tests that leave the environment whole."""
    checkout = Checkout(tmp_path_factory.mktemp("launch") / "checkout")
    first = checkout.start("run", "a.json")
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"{checkout.root / '.venv'} 1.0 {checkout.root} run a.json\n"
    assert "first start: making the environment" in first.stderr
    return checkout


def wait_until(condition: object, process: subprocess.Popen[str]) -> None:
    assert callable(condition)
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the moment to interrupt at never came"
        time.sleep(0.01)


def test_second_start_is_fast_and_calls_no_installer(ready: Checkout) -> None:
    pip = next((ready.root / ".venv").glob("**/site-packages/pip"))
    hidden = pip.with_name("pip-hidden")
    pip.rename(hidden)  # any call of pip would now fail
    try:
        begun = time.monotonic()
        second = ready.start("seven")
        took = time.monotonic() - begun
    finally:
        hidden.rename(pip)
    assert (second.returncode, second.stderr) == (7, "")
    assert took < 1.5, f"a warm start took {took:.2f} s"


def test_works_from_another_directory(ready: Checkout, tmp_path: Path) -> None:
    done = ready.start("run", cwd=tmp_path)
    assert done.stdout == f"{ready.root / '.venv'} 1.0 {tmp_path} run\n"
    assert ready.left() == [".venv"]
    assert list(tmp_path.iterdir()) == []


def test_test_command_adds_its_own_requirements(ready: Checkout) -> None:
    first = ready.start("test", "-q")
    assert first.returncode == 0, first.stderr
    assert "packages that the tests need" in first.stderr
    assert list((ready.root / ".venv").glob("**/site-packages/probe"))
    assert ready.start("test", "-q").stderr == ""


def test_a_changed_requirement_updates_the_environment(ready: Checkout) -> None:
    ready.require("pebble==2.0")
    updated = ready.start("run")
    assert "requirements.txt has changed: updating" in updated.stderr
    assert updated.stdout.split()[1] == "2.0"
    assert ready.start("run").stderr == ""


def test_a_failed_update_keeps_the_environment_and_says_why(ready: Checkout) -> None:
    before = (ready.root / "requirements.txt").read_bytes()
    ready.require("pebble==2.0", "granite==9")
    failed = ready.start("run")
    assert failed.returncode == 1
    assert "a pinned package is not offered" in failed.stderr
    assert "Traceback" not in failed.stderr
    (ready.root / "requirements.txt").write_bytes(before)
    assert ready.start("run").stderr == ""


def test_no_network_is_named(ready: Checkout) -> None:
    before = (ready.root / "requirements.txt").read_bytes()
    (ready.root / "requirements.txt").write_text("--index-url http://127.0.0.1:9/\npebble==4.0\n")
    failed = ready.start("run", PIP_RETRIES="0", PIP_NO_CACHE_DIR="1")
    assert failed.returncode == 1
    assert "the package index could not be reached. Check the network" in failed.stderr
    (ready.root / "requirements.txt").write_bytes(before)
    assert ready.start("run").stderr == ""


def test_another_projects_package_is_refused(ready: Checkout, tmp_path: Path) -> None:
    (tmp_path / "jagg").mkdir()
    (tmp_path / "jagg/__init__.py").touch()
    ours = ready.root / "jagg"
    ours.rename(ready.root / "kept")
    try:
        refused = ready.start("run", PYTHONPATH=str(tmp_path))
        missing = ready.start("run")
    finally:
        (ready.root / "kept").rename(ours)
    assert refused.returncode == missing.returncode == 1
    assert f"jagg would come from {tmp_path / 'jagg'} and not from {ours}" in refused.stderr
    assert "Take that place off PYTHONPATH" in refused.stderr
    assert "jagg was not found beside" in missing.stderr


def test_safe_path_is_explained(ready: Checkout) -> None:
    refused = ready.start("run", PYTHONSAFEPATH="1")
    assert refused.returncode == 1
    assert "unset PYTHONSAFEPATH" in refused.stderr


def test_a_vanished_interpreter_makes_the_environment_again(ready: Checkout) -> None:
    stamp = ready.root / ".venv" / launch.STAMP
    content = json.loads(stamp.read_text())
    stamp.write_text(json.dumps({**content, "interpreter": "/nowhere/python3.11"}))
    again = ready.start("run")
    assert again.returncode == 0, again.stderr
    assert "the Python that it was made from is gone or has changed" in again.stderr
    assert json.loads(stamp.read_text()) == content


def test_help_installs_nothing(checkout: Checkout) -> None:
    shown = checkout.start("--help")
    assert shown.returncode == 0
    assert shown.stdout.startswith("usage: run")
    assert "JAGG_STUDIO_VENV" in shown.stdout
    assert checkout.left() == []


def test_no_venv_runs_in_the_starting_interpreter(checkout: Checkout) -> None:
    write_wheel(checkout.wheels, "pebble", "3.0")
    done = checkout.start(
        "run",
        JAGG_STUDIO_NO_VENV="1",
        PYTHONPATH=str(checkout.wheels / "pebble-3.0-py3-none-any.whl"),
    )
    assert done.stdout.split()[:2] == [sys.prefix, "3.0"]
    assert checkout.left() == []


@posix_only
def test_ctrl_c_leaves_nothing(checkout: Checkout) -> None:
    process = checkout.begin("run")
    wait_until((checkout.root / ".venv" / launch.UNFINISHED).exists, process)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=100)
    assert process.returncode == launch.EXIT_INTERRUPTED
    assert said.endswith(
        "launch.py: interrupted; nothing half-made is used. Start again when you like.\n"
    )
    assert checkout.left() == []


@posix_only
@pytest.mark.parametrize("moment", range(4))
def test_sigterm_leaves_nothing(checkout: Checkout, moment: int) -> None:
    process = checkout.begin("run")
    wait_until((checkout.root / ".venv" / launch.UNFINISHED).exists, process)
    time.sleep(moment / 20)
    process.terminate()
    process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGTERM
    assert checkout.left() == []


@posix_only
def test_a_kill_is_repaired_by_two_starts_at_once(checkout: Checkout) -> None:
    killed = checkout.begin("run")
    wait_until((checkout.root / ".venv/pyvenv.cfg").exists, killed)
    os.kill(killed.pid, signal.SIGKILL)  # its child goes on for a while and keeps the lock
    pair = [checkout.begin("run"), checkout.begin("run")]
    ends = [(process.communicate(timeout=200), process.returncode) for process in pair]
    assert [code for _, code in ends] == [0, 0], ends
    texts = [said for (_, said), _ in ends]
    assert sum("first start: making the environment" in said for said in texts) == 1
    assert any("an earlier start was interrupted" in said for said in texts)
    assert all("waiting for it" in said for said in texts)
    killed.communicate(timeout=100)
    assert checkout.left() == [".venv"]


def test_an_install_that_fails_leaves_nothing(checkout: Checkout) -> None:
    checkout.require("granite==9")
    failed = checkout.start("run")
    assert failed.returncode == 1
    assert "the packages could not be installed: a pinned package is not offered" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert checkout.left() == []


def test_a_place_that_cannot_be_written(checkout: Checkout) -> None:
    (checkout.root / "file").touch()
    failed = checkout.start("run", JAGG_STUDIO_VENV=str(checkout.root / "file" / "venv"))
    assert failed.returncode == 1
    assert "cannot write the environment" in failed.stderr
    assert "set JAGG_STUDIO_VENV" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_an_environment_of_somebody_else_is_left_alone(checkout: Checkout) -> None:
    (checkout.root / ".venv").mkdir()
    (checkout.root / ".venv/mine.txt").write_text("mine")
    refused = checkout.start("run")
    assert refused.returncode == 1
    assert "was not made by launch.py, so it is left alone" in refused.stderr
    assert (checkout.root / ".venv/mine.txt").read_text() == "mine"


def test_a_borrowed_torch_is_not_downloaded(checkout: Checkout, tmp_path: Path) -> None:
    """The starting interpreter is an environment with a (toy) PyTorch of its own."""
    write_wheel(checkout.wheels, "torch", "2.14.1")
    checkout.require("torch==2.13.0", "pebble==1.0")
    parent = tmp_path / "parent"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(parent)], check=True)
    packages = next(parent.glob("**/site-packages"))
    with zipfile.ZipFile(checkout.wheels / "torch-2.14.1-py3-none-any.whl") as wheel:
        wheel.extractall(packages)
    (checkout.root / "app/cli/__init__.py").write_text(
        "def main(argv):\n    import torch\n    print(torch.__file__)\n    return 0\n"
    )
    python = (str(launch.environment_python(parent)),)
    done = checkout.start("run", python=python, JAGG_STUDIO_ISOLATED="0")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == packages / "torch/__init__.py"
    (packages / "torch").rename(packages / "gone")
    failed = checkout.start("run", JAGG_STUDIO_ISOLATED="1")
    assert f"the PyTorch that it borrowed from {packages} is gone" in failed.stderr


def other_pythons() -> Iterator[Path]:
    for folder in (Path.home() / ".pyenv/versions").glob("3.*"):
        python = folder / "bin/python3"
        if python.exists() and not folder.name.startswith(("3.11.", "3.12.")):
            yield python


def test_another_python_is_refused_in_words(checkout: Checkout) -> None:
    """The version is what a made-up interpreter reports, so that none needs to be installed."""
    source = (checkout.root / "launch.py").read_text()
    old = re.sub(
        r"^import sys$", "import sys\nsys.version_info = (3, 8, 1)", source, count=1, flags=re.M
    )
    (checkout.root / "launch.py").write_text(old)
    refused = checkout.start("run")
    assert refused.returncode == 1
    assert refused.stderr == (
        f"launch.py: JAGG Studio needs Python 3.11 or 3.12; this is Python 3.8 ({sys.executable}). "
        "Start it with one of them, for example: python3.12 launch.py\n"
    )


@pytest.mark.parametrize(
    "python", list(other_pythons()), ids=lambda python: python.parent.parent.name
)
def test_installed_other_pythons_are_refused(checkout: Checkout, python: Path) -> None:
    refused = checkout.start("run", python=(str(python),))
    assert refused.returncode == 1
    assert refused.stderr.startswith(
        "launch.py: JAGG Studio needs Python 3.11 or 3.12; this is Python 3."
    )


@pytest.mark.parametrize(
    ("log", "meaning"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("NewConnectionError('<pip._vendor.urllib3>')", "the package index could not be reached"),
        ("PermissionError: [Errno 13] Permission denied: 'x'", "a file could not be written"),
        ("something else", "pip stopped with exit status 2"),
    ],
)
def test_why_failed(tmp_path: Path, log: str, meaning: str) -> None:
    (tmp_path / "pip.log").write_text(log)
    assert launch.why_failed(tmp_path / "pip.log", 2).startswith(meaning)


def test_too_little_space_is_said_beforehand(tmp_path: Path) -> None:
    with pytest.raises(launch.LaunchError, match=r"only .* GB are free .* JAGG_STUDIO_VENV"):
        launch.check_space(tmp_path / ".venv", 1e9)


def test_without_torch_takes_only_that_line() -> None:
    text = "torch==2.13.0\ntorchmetrics==1\n# torch stays in words\nTorch-like==2\nnumpy==2\n"
    assert launch.without_torch(text) == text.removeprefix("torch==2.13.0\n")
