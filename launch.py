"""Make JAGG Studio's environment on first use, keep it up to date, and hand over to its commands.

Standard library only: this file runs before anything is installed. Everything it says goes to
standard error; standard output belongs to the command. ``python3 launch.py --help`` lists the
commands and the environment variables that steer this file.
"""

import sys

# Checked before anything that a Python far too old may lack.
if not (3, 11) <= sys.version_info[:2] < (3, 13):
    sys.stderr.write(
        "launch.py: JAGG Studio needs Python 3.11 or 3.12; this is Python %d.%d (%s). "  # noqa: UP031
        "Start it with one of them, for example: python3.12 launch.py\n"
        % (sys.version_info[0], sys.version_info[1], sys.executable)
    )
    sys.exit(1)

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import site
import subprocess
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent

ENVIRONMENT_FORMAT: Final = 1
"""Raised when an environment made by an earlier launch.py can no longer be updated in place."""

STAMP: Final = "jagg-studio.json"
TEST_STAMP: Final = "jagg-studio-test.json"
UNFINISHED: Final = "jagg-studio.unfinished"
"""Present while packages are being installed; what it lies in is thrown away by the next start."""

HANDED_OVER: Final = "JAGG_STUDIO_HANDED_OVER"
"""Set for the one re-execution inside the environment, so that a broken one cannot loop."""

EXIT_FAILED: Final = 1
EXIT_INTERRUPTED: Final = 130

HELP: Final = """
environment:
  The first start makes .venv/ beside launch.py and installs requirements.txt into it; a later
  start updates it when that file has changed, and otherwise calls no installer. Where the Python
  that starts launch.py has PyTorch >= 2.13, < 3, that build is used and none is downloaded.

  JAGG_STUDIO_VENV=FOLDER   keep the environment in FOLDER instead of .venv/
  JAGG_STUDIO_ISOLATED=1    install PyTorch even where the starting Python has one
  JAGG_STUDIO_NO_VENV=1     run in the Python that starts launch.py; create and install nothing
  PIP_INDEX_URL, PIP_CACHE_DIR, HTTPS_PROXY, ...   are obeyed by the installer as usual
"""


class LaunchError(Exception):
    """A reason why the studio cannot start, worded for the person at the terminal."""


class InterruptionError(Exception):
    """Ctrl-C, SIGTERM or SIGHUP arrived while the environment was being made."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


class Signals:
    """Notes an interruption instead of raising in the middle of a step; ``check`` raises.

    Raising from a handler could lose a child that has just been started, which would go on writing.
    """

    def __init__(self) -> None:
        self._number: int | None = None

    def _note(self, number: int, _frame: object) -> None:
        self._number = number

    def check(self) -> None:
        """Raise ``InterruptionError`` if a signal has arrived."""
        if self._number is not None:
            raise InterruptionError(self._number)

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Note signals from here on, and treat them as before afterwards."""
        numbers = [signal.SIGINT, signal.SIGTERM]
        if sys.platform != "win32":
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@dataclass(frozen=True, kw_only=True)
class Guard:
    """What an installation runs under."""

    lock: int
    """Descriptor of the lock, which children share."""
    signals: Signals


@dataclass(frozen=True, kw_only=True)
class BorrowedTorch:
    """A PyTorch of the starting interpreter that the environment uses instead of its own."""

    version: str
    site: Path
    """The folder that holds the ``torch`` package."""

    def visible_by_default(self) -> bool:
        """True where ``--system-site-packages`` alone makes it importable in a new environment."""
        if sys.prefix != sys.base_prefix:
            return False
        folders = [*site.getsitepackages(), site.getusersitepackages()]
        return self.site in {Path(folder).resolve() for folder in folders}


def say(text: str) -> None:
    """Write one line for the person at the terminal."""
    sys.stderr.write(f"launch.py: {text}\n")
    sys.stderr.flush()


def environment_folder(environ: Mapping[str, str]) -> Path:
    """The folder of the environment; need not exist."""
    chosen = environ.get("JAGG_STUDIO_VENV", "")
    return Path(chosen).expanduser().absolute() if chosen else ROOT / ".venv"


def environment_python(folder: Path) -> Path:
    """The interpreter inside an environment."""
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def is_inside(folder: Path) -> bool:
    """True when this very process runs in the environment ``folder``."""
    return Path(sys.prefix).resolve() == folder.resolve()


def borrowed_torch(environ: Mapping[str, str]) -> BorrowedTorch | None:
    """The starting interpreter's PyTorch when it is one that the studio runs with."""
    if environ.get("JAGG_STUDIO_ISOLATED", "") not in {"", "0"}:
        return None
    try:
        distribution = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    version = re.match(r"(\d+)\.(\d+)", distribution.version)
    if version is None or not (2, 13) <= (int(version[1]), int(version[2])) < (3, 0):
        return None
    folder = Path(str(distribution.locate_file(""))).resolve()
    if not (folder / "torch").is_dir():
        return None
    return BorrowedTorch(version=distribution.version, site=folder)


def digest(*files: Path) -> str:
    """SHA-256 over requirement files, the same for Windows and Unix line ends."""
    whole = hashlib.sha256()
    for file in files:
        whole.update(file.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return whole.hexdigest()


def read_stamp(file: Path) -> dict[str, object]:
    """The stamp's content, empty where it is missing or unreadable."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def write_stamp(file: Path, content: Mapping[str, object]) -> None:
    """Replace a stamp in one step, so that a reader never sees half of it."""
    aside = file.with_name(file.name + ".tmp")
    aside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    aside.replace(file)


def why_rebuild(folder: Path) -> str | None:
    """Why an existing environment has to be thrown away, or None when it is whole."""
    if (folder / UNFINISHED).exists():
        return "an earlier start was interrupted while it was installing"
    stamp = read_stamp(folder / STAMP)
    if stamp.get("format") != ENVIRONMENT_FORMAT:
        return "it was made by another version of launch.py"
    python = environment_python(folder)
    if not python.exists() or str(python.resolve()) != stamp.get("interpreter"):
        return "the Python that it was made from is gone or has changed"
    torch_site = stamp.get("torch_site")
    if isinstance(torch_site, str) and not Path(torch_site, "torch").is_dir():
        return f"the PyTorch that it borrowed from {torch_site} is gone"
    return None


def is_current(folder: Path, *, tests: bool) -> bool:
    """True when the environment holds what the requirement files ask for."""
    if why_rebuild(folder) is not None:
        return False
    if read_stamp(folder / STAMP).get("requirements") != digest(ROOT / "requirements.txt"):
        return False
    wanted = digest(ROOT / "requirements.txt", ROOT / "requirements-dev.txt") if tests else None
    return not tests or read_stamp(folder / TEST_STAMP).get("requirements") == wanted


def try_lock(descriptor: int) -> bool:
    """Take the lock on an open file without waiting."""
    try:
        if sys.platform == "win32":
            import msvcrt  # exists on Windows only

            os.lseek(descriptor, 1 << 20, os.SEEK_SET)  # past the text, which stays readable
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl  # does not exist on Windows

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def only_one(folder: Path, signals: Signals) -> Iterator[Guard]:
    """Hold the lock beside the environment.

    An installer that outlives a killed launch.py keeps the shared lock, so that the next start
    waits for it instead of deleting files under it.
    """
    file = folder.with_name(folder.name + ".lock")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise cannot_write(folder, error) from error
    try:
        said = 0.0
        while not try_lock(descriptor):
            if time.monotonic() - said > 30 or not said:  # a reminder every half minute
                holder = file.read_text(encoding="utf-8", errors="replace").strip() or "unknown"
                say(f"another start (process {holder}) is preparing {folder}; waiting for it")
                said = time.monotonic()
            time.sleep(0.2)
            signals.check()
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield Guard(lock=descriptor, signals=signals)
    finally:
        os.close(descriptor)


def cannot_write(folder: Path, error: OSError) -> LaunchError:
    """The error for a place where the environment cannot be kept."""
    return LaunchError(
        f"cannot write the environment {folder}: {error.strerror or error}. "
        "Move the checkout to a folder you may write, or set JAGG_STUDIO_VENV to one."
    )


def remove(folder: Path) -> None:
    """Remove an environment: renamed first, so that no half of it keeps the name."""
    aside = folder.with_name(f"{folder.name}.removed-{os.getpid()}")
    try:
        folder.rename(aside)
    except FileNotFoundError:
        return
    shutil.rmtree(aside, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what an earlier, killed start renamed and did not finish removing."""
    for left in folder.parent.glob(f"{folder.name}.removed-*"):
        shutil.rmtree(left, ignore_errors=True)


def check_tools() -> None:
    """Refuse to start the installation where Python lacks the modules it takes."""
    missing = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
    if missing:
        raise LaunchError(
            f"this Python ({sys.executable}) lacks the module {' and '.join(missing)}, which makes "
            "environments. Install it (Debian and Ubuntu: sudo apt install python3-venv) and "
            "start again."
        )


def expected_size(torch: BorrowedTorch | None) -> tuple[str, float]:
    """What an installation downloads, in words, and the free space it cannot do without, in GB."""
    if torch is not None:
        return f"about 120 MB (PyTorch {torch.version} of {torch.site} is used)", 1.0
    if sys.platform.startswith("linux"):
        return "up to 3 GB with PyTorch's GPU libraries, about 320 MB where a CPU build is set", 2.5
    return "about 300 MB", 2.0


def check_space(folder: Path, needed_gb: float) -> None:
    """Refuse to begin what cannot be finished for want of disk space."""
    free_gb = shutil.disk_usage(folder.parent).free / 1e9
    if free_gb < needed_gb:
        raise LaunchError(
            f"only {free_gb:.1f} GB are free where {folder} would be made and at least "
            f"{needed_gb:.1f} GB are needed. Free some space, or set JAGG_STUDIO_VENV to a folder "
            "on another disk."
        )


def run_child(command: Sequence[str | Path], guard: Guard) -> int:
    """Run a child with its output on standard error; it never outlives an interrupted launch.py."""
    environ = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "PYTHONHOME"}}
    for misplacing in ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER"):
        environ.pop(misplacing, None)  # each would install somewhere else than the environment
    posix = os.name != "nt"
    child = subprocess.Popen(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        stdout=2,
        env=environ,
        pass_fds=(guard.lock,) if posix else (),
        process_group=0 if posix else None,
    )
    try:
        while True:
            guard.signals.check()
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(timeout=0.2)
    except InterruptionError:
        stop(child)
        raise


def stop(child: subprocess.Popen[bytes]) -> None:
    """End a child and whatever it has started, so that nothing goes on writing.

    On POSIX the whole group is interrupted first (pip then removes its temporary files) and killed
    ten seconds later.
    """
    if sys.platform == "win32":
        child.terminate()
        child.wait()
        return
    for number, patience in ((signal.SIGINT, 10.0), (signal.SIGKILL, 10.0)):
        deadline = time.monotonic() + patience
        try:
            os.killpg(child.pid, number)
            while time.monotonic() < deadline:
                child.poll()  # reaps it, so that an empty group is seen to be empty
                os.killpg(child.pid, 0)
                time.sleep(0.05)
        except ProcessLookupError:
            break
    child.wait()


def create(folder: Path, torch: BorrowedTorch | None, guard: Guard) -> None:
    """Make an empty environment with pip; it stays marked unfinished."""
    command: list[str | Path] = [sys.executable, "-I", "-m", "venv"]
    if torch is not None and torch.visible_by_default():
        command.append("--system-site-packages")
    try:
        folder.mkdir()
        (folder / UNFINISHED).touch()
    except OSError as error:
        raise cannot_write(folder, error) from error
    if run_child([*command, folder], guard) != 0:
        raise LaunchError(
            f"Python could not make the environment {folder}; its message is above. On Debian and "
            "Ubuntu the package python3-venv is often missing: sudo apt install python3-venv"
        )
    if torch is not None and not torch.visible_by_default():
        variables = {"base": str(folder), "platbase": str(folder)}
        packages = sysconfig.get_path("purelib", "venv", variables)
        Path(packages, "borrowed-torch.pth").write_text(f"{torch.site}\n", encoding="utf-8")


FAILURES: Final = (
    (
        r"No space left|Errno 28|not enough space",
        "the disk is full. Free some space and start again",
    ),
    (
        r"NewConnectionError|NameResolutionError|ConnectTimeout|Name or service not known"
        r"|name resolution|getaddrinfo failed|ProxyError|Max retries exceeded|ReadTimeout"
        r"|Connection refused|Connection reset|Network is unreachable|SSLError",
        "the package index could not be reached. Check the network (behind a proxy set "
        "HTTPS_PROXY, for a mirror PIP_INDEX_URL) and start again",
    ),
    (
        r"Permission denied|Read-only file system|Errno 13|Errno 30",
        "a file could not be written. Check who owns the folder and start again",
    ),
    (
        r"No matching distribution found|Could not find a version",
        "a pinned package is not offered for this Python and platform, or the package index was "
        "not reached. The package is named above",
    ),
)
"""Pattern in pip's log -> what it means and what to do; the first that matches is told."""


def why_failed(log: Path, code: int) -> str:
    """A sentence on why pip failed, from its log."""
    with contextlib.suppress(OSError):
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-400:])
        for pattern, meaning in FAILURES:
            if re.search(pattern, tail):
                return meaning
    return f"pip stopped with exit status {code}; its message is above"


def without_torch(text: str) -> str:
    """Requirements less the PyTorch line, for an environment that borrows one."""
    return "".join(
        line
        for line in text.splitlines(keepends=True)
        if not re.match(r"\s*torch\s*[=<>!~;]", line)
    )


def install(folder: Path, files: Sequence[Path], *, borrows: bool, guard: Guard) -> None:
    """Install requirement files into an environment.

    Raises:
        LaunchError: pip failed; says why.
    """
    log = folder / "pip.log"
    command: list[str | Path] = [environment_python(folder), "-P", "-m", "pip", "install"]
    command += ["--disable-pip-version-check", "--no-input", "--log", log]
    for file in files:
        listed = file
        if borrows and file.name == "requirements.txt":
            listed = folder / "requirements-without-torch.txt"
            listed.write_text(without_torch(file.read_text(encoding="utf-8")), encoding="utf-8")
        command += ["-r", listed]
    code = run_child(command, guard)
    if code != 0:
        raise LaunchError(f"the packages could not be installed: {why_failed(log, code)}.")
    log.unlink(missing_ok=True)


def build(folder: Path, guard: Guard) -> None:
    """Make an environment from nothing; leaves none behind when it cannot be finished."""
    torch = borrowed_torch(os.environ)
    check_tools()
    download, needed_gb = expected_size(torch)
    check_space(folder, needed_gb)
    say(f"first start: making the environment {folder}; it downloads {download}")
    begun = time.monotonic()
    try:
        create(folder, torch, guard)
        say("step 2 of 2: installing the packages of requirements.txt")
        install(folder, [ROOT / "requirements.txt"], borrows=torch is not None, guard=guard)
        python = environment_python(folder)
        write_stamp(
            folder / STAMP,
            {
                "format": ENVIRONMENT_FORMAT,
                "python": ".".join(map(str, sys.version_info[:3])),
                "interpreter": str(python.resolve()),
                "requirements": digest(ROOT / "requirements.txt"),
                "torch_site": None if torch is None else str(torch.site),
            },
        )
        (folder / UNFINISHED).unlink()
    except BaseException:
        remove(folder)
        raise
    say(f"the environment is ready after {time.monotonic() - begun:.0f} s")


def update(folder: Path, *, tests: bool, guard: Guard) -> None:
    """Bring a whole environment up to the requirement files."""
    files = [ROOT / "requirements.txt"] + ([ROOT / "requirements-dev.txt"] if tests else [])
    stamp = read_stamp(folder / STAMP)
    changed = stamp.get("requirements") != digest(ROOT / "requirements.txt")
    say(
        f"requirements.txt has changed: updating {folder}"
        if changed
        else "installing the packages that the tests need (about 40 MB)"
    )
    marker = folder / UNFINISHED
    try:
        marker.touch()
        install(folder, files, borrows=stamp.get("torch_site") is not None, guard=guard)
        write_stamp(folder / STAMP, {**stamp, "requirements": digest(files[0])})
        if tests:
            write_stamp(folder / TEST_STAMP, {"requirements": digest(*files)})
    except OSError as error:
        raise cannot_write(folder, error) from error
    except LaunchError:
        marker.unlink(missing_ok=True)  # pip undoes its own failed step: the old state is whole
        raise
    marker.unlink()


def prepare(folder: Path, signals: Signals, *, tests: bool) -> None:
    """Make or update the environment under the lock."""
    with only_one(folder, signals) as guard:
        remove_leftovers(folder)
        if is_current(folder, tests=tests):
            return  # another start has done it meanwhile
        reason = why_rebuild(folder)
        if reason is not None and folder.exists():
            ours = any((folder / name).exists() for name in (STAMP, UNFINISHED))
            if not ours and any(folder.iterdir()):
                raise LaunchError(
                    f"{folder} exists and was not made by launch.py, so it is left alone. Rename "
                    "or remove it, or set JAGG_STUDIO_VENV to another folder."
                )
            if is_inside(folder):
                raise LaunchError(
                    f"the environment {folder} has to be made again ({reason}), which cannot be "
                    "done from inside it. Start with the Python you made it from: "
                    "python3 launch.py"
                )
            if ours:
                say(f"making {folder} again: {reason}")
            remove(folder)
        if reason is not None:
            build(folder, guard)
        if not is_current(folder, tests=tests):
            update(folder, tests=tests, guard=guard)


def prepare_or_explain(folder: Path, *, tests: bool) -> None:
    """``prepare``, with an interruption turned into a clean ending."""
    signals = Signals()
    try:
        with signals.caught():
            prepare(folder, signals, tests=tests)
            signals.check()
    except InterruptionError as interruption:
        say("interrupted; nothing half-made is used. Start again when you like.")
        sys.exit(128 + interruption.number)


def re_execute(folder: Path, arguments: Sequence[str]) -> int:
    """Run launch.py again inside the environment; returns only on Windows."""
    if os.environ.get(HANDED_OVER):
        raise LaunchError(
            f"{environment_python(folder)} does not run in {folder}: the environment is damaged. "
            "Remove that folder and start again."
        )
    command = [str(environment_python(folder)), str(Path(__file__).resolve()), *arguments]
    environ = {**os.environ, HANDED_OVER: "1"}
    environ.pop("PYTHONHOME", None)  # would point the environment at another installation
    if os.name != "nt":
        os.execve(command[0], command, environ)  # noqa: S606 - no shell is wanted
    child = subprocess.Popen(command, env=environ)
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:
            continue  # the child got it too and ends in its own way


def check_packages() -> None:
    """Refuse to run another project's ``app``, ``nodes`` or ``jagg``."""
    for name in ("app", "nodes", "jagg"):
        spec = importlib.util.find_spec(name)
        if spec is None:
            hint = (
                "Python was told not to look there: unset PYTHONSAFEPATH and start without -P."
                if getattr(sys.flags, "safe_path", False)
                else "The checkout is incomplete: get it again."
            )
            raise LaunchError(
                f"the package {name} was not found beside {ROOT / 'launch.py'}. {hint}"
            )
        places = [Path(place).resolve() for place in spec.submodule_search_locations or ()]
        if not places and spec.origin:
            places = [Path(spec.origin).resolve()]
        if (ROOT / name) not in places:
            raise LaunchError(
                f"the package {name} would come from {places[0] if places else 'nowhere'} and not "
                f"from {ROOT / name}. Take that place off PYTHONPATH, or uninstall it, and start "
                "again."
            )


def hand_over(arguments: Sequence[str]) -> int:
    """Run a command of the studio in this interpreter."""
    os.environ.pop(HANDED_OVER, None)
    check_packages()
    from app.cli import main as command  # only now is it known to be ours

    try:
        return command(list(arguments))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def show_help() -> int:
    """Print the commands and how the environment is made; installs nothing."""
    try:
        hand_over(["--help"])
    except SystemExit:
        pass  # argparse leaves this way
    except ModuleNotFoundError as error:  # a command module wants a package not yet installed
        say(f"the commands are listed once the environment is there ({error})")
    print(HELP)
    return 0


def main(arguments: Sequence[str]) -> int:
    """Make sure of the environment, then run the command; returns its exit status."""
    folder = environment_folder(os.environ)
    if list(arguments) in (["--help"], ["-h"]):
        return show_help()
    if os.environ.get("JAGG_STUDIO_NO_VENV", "") not in {"", "0"}:
        return hand_over(arguments)
    tests = arguments[:1] == ["test"]
    if not is_current(folder, tests=tests):
        prepare_or_explain(folder, tests=tests)
    if is_inside(folder):
        return hand_over(arguments)
    return re_execute(folder, arguments)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LaunchError as problem:
        say(str(problem))
        sys.exit(EXIT_FAILED)
