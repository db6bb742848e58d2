"""`run`: a workflow from a file to its end, without a page."""

import argparse
import contextlib
import io
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from app.cli.graphs import (
    InvalidInputError,
    add_custom_nodes,
    check_readable,
    first_difference,
    nodes_for,
    read,
    source_iterations,
    with_settings,
)
from app.cli.output import EXIT_CANCELLED, EXIT_FAILED, EXIT_OK, answer, complain, tell
from app.cli.progress import ProgressView, told
from app.graph.compile import CompiledGraph, compile_graph
from app.graph.errors import GraphError, WorkflowError, quoted, suggestion
from app.graph.write import to_api, to_ui
from app.paths import INPUT_ROOTS, RUNS
from app.storage.errors import StorageError
from app.storage.events import EventLine, Series, columns, fold_metrics, json_number, read_events
from app.storage.runs import RunDirectory, RunRecord, create_run, find_run, new_run_id

if TYPE_CHECKING:
    from app.worker.local import RunResult
    from app.worker.settings import CancelToken, RunSettings

_EXIT_OF_STATE: Final = {"finished": EXIT_OK, "failed": EXIT_FAILED, "cancelled": EXIT_CANCELLED}

_FILE_SETTINGS: Final[Mapping[str, str]] = {
    "name": "a text",
    "device": "`auto` or `cpu`",
    "precision": "`fp32` or `bf16`",
    "threads": "a whole number of 1 or more",
    "checkpoint_every": "a whole number of 1 or more",
}
"""Run settings that a workflow file may state in `extra.jagg`, and what they hold."""

_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "device": ("auto", "cpu"),
    "precision": ("fp32", "bf16"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """What is to be run and where."""

    graph: CompiledGraph
    run: RunDirectory
    settings: "RunSettings"
    resume: bool
    iterations: int | None


def add_command(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "run",
        help="run a workflow without a page",
        description="Run a workflow (UI or API JSON, or a PNG or safetensors file that carries one). "
        "Progress goes to stderr; stdout stays empty without --json.",
    )
    add = parser.add_argument
    add(
        "file",
        nargs="?",
        metavar="FILE",
        help="the workflow; with --resume it may be left out, or be a run id",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="NODE.param=value",
        help="set a widget; NODE is an id, or a title that one node has; may be repeated",
    )
    add("--iterations", type=int, metavar="N", help="ticks, set on the only prompt source")
    add("--seed", type=int, metavar="N", help="seed of the run, set on the only prompt source")
    add(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="the run's own directory (default: a new one in the runs directory)",
    )
    add(
        "--runs-dir",
        type=Path,
        default=RUNS,
        metavar="DIR",
        help="directory of all runs (default: runs in the checkout)",
    )
    add("--name", help="a name for people (default: the file's)")
    add(
        "--resume",
        nargs="?",
        const=True,
        metavar="RUN",
        help="go on with the run in --run-dir, or with this run id, from its last checkpoint",
    )
    add("--json", action="store_true", help="print one JSON object on stdout at the end")
    add(
        "--checkpoint-every",
        type=_positive,
        metavar="N",
        help="ticks between checkpoints where no card sets them (default 50)",
    )
    add(
        "--threads",
        type=_positive,
        metavar="N",
        help="processor threads of one torch operation (recorded; a resume uses the recorded number)",
    )
    add(
        "--device",
        choices=_CHOICES["device"],
        help="where to compute (default: the first accelerator there is)",
    )
    add(
        "--precision",
        choices=_CHOICES["precision"],
        help="what forwards compute in (default fp32); weights and log-probs are float32 either way",
    )
    add(
        "--no-metadata",
        action="store_true",
        help="leave the workflow out of images and exported weights",
    )
    add(
        "--executor",
        default="local",
        choices=("local", "accelerate", "ray"),
        help="only local is there yet",
    )
    add("--num-processes", type=_positive, default=1, metavar="N", help="only 1 is there yet")
    add("--fork", action="store_true", help="not there yet")
    add_custom_nodes(parser)
    parser.set_defaults(command=_command)


def _command(options: argparse.Namespace) -> int:
    refusal = _not_there_yet(options)
    if refusal:
        return complain(refusal)
    try:
        job = _resumed_job(options) if options.resume else _new_job(options)
    except (WorkflowError, StorageError) as error:
        return complain(str(error))
    except GraphError as error:
        return complain(*(problem.message for problem in error.problems))
    except InvalidInputError as error:
        return complain(*error.problems)
    return _execute(job, as_json=options.json)


def _not_there_yet(options: argparse.Namespace) -> str | None:
    if options.executor != "local":
        return f"run: --executor {options.executor} is not there yet; leave it out to run in one process."
    if options.num_processes > 1:
        return "run: --num-processes above 1 is not there yet; leave it out to run in one process."
    if options.fork:
        return "run: --fork is not there yet; start a new run with the changed workflow."
    return None


def _new_job(options: argparse.Namespace) -> _Job:
    """Everything that can be wrong is found before the run directory is made."""
    if options.file is None:
        raise InvalidInputError(["run: name a workflow FILE, or --resume a run."])
    path = Path(options.file)
    tell(f"Running {path}")
    check_readable(path)
    registry = nodes_for(options)
    workflow = read(path, registry)
    graph = with_settings(
        workflow.graph,
        registry,
        assignments=options.set,
        iterations=options.iterations,
        seed=options.seed,
    )
    compiled = compile_graph(graph, registry)
    settings = _settings(options, _file_settings(workflow.settings, path))
    run_id = new_run_id()
    record = RunRecord(
        id=run_id,
        state="queued",
        name=options.name or str(workflow.settings.get("name") or path.stem),
        created=time.time(),
    )
    document = (
        workflow.document if workflow.kind == "ui" else to_ui(graph, registry, workflow.settings)
    )
    run = create_run(
        (options.run_dir or options.runs_dir / run_id).absolute(),
        record,
        workflow=document,
        prompt=to_api(graph, registry),
    )
    return _Job(graph=compiled, run=run, settings=settings, resume=False, iterations=None)


def _resumed_job(options: argparse.Namespace) -> _Job:
    run, file = _run_to_resume(options)
    tell(f"Resuming {run.path}")
    record = run.read_record()
    run.check_graph(record)
    threads = record.settings.get("threads")
    if threads is not None and (type(threads) is not int or threads < 1):
        raise InvalidInputError(
            [f"{run.record_path}: the setting `threads` is {threads!r}; expected 1 or more."]
        )
    if file is not None:
        check_readable(file)
    registry = nodes_for(options)
    stored = read(run.prompt_path, registry).graph
    given = read(file, registry).graph if file is not None else stored
    given = with_settings(given, registry, assignments=options.set, seed=options.seed)
    difference = first_difference(given, stored, registry)
    if difference is not None:
        raise InvalidInputError(
            [
                f"--resume goes on with the run's own graph, and this one differs: {difference} "
                "Leave FILE and --set out to go on unchanged, or start a new run."
            ]
        )
    if options.iterations is None and source_iterations(given, registry) != source_iterations(
        stored, registry
    ):
        tell(
            f"The file asks for another number of iterations; going on with the run's {record.iterations} (use --iterations)."
        )
    elif options.iterations is not None:
        with_settings(stored, registry, iterations=options.iterations)
        done = run.checkpoints.latest()
        if done is not None and done.tick > options.iterations:
            raise InvalidInputError(
                [
                    f"--iterations {options.iterations}: the run has done {done.tick} ticks already; ask for more."
                ]
            )
    settings = _settings(options, _recorded_settings(record))
    return _Job(
        graph=compile_graph(stored, registry),
        run=run,
        settings=settings,
        resume=True,
        iterations=options.iterations,
    )


def _run_to_resume(options: argparse.Namespace) -> tuple[RunDirectory, Path | None]:
    """The run and the workflow file, out of FILE, --resume [RUN] and --run-dir, which may each stand for either."""
    names = [name for name in (options.file, options.resume) if isinstance(name, str)]
    files = [Path(name) for name in names if Path(name).is_file()]
    runs = [name for name in names if not Path(name).is_file()]
    if options.run_dir is not None and not runs and len(files) <= 1:
        run = RunDirectory(options.run_dir.absolute())
    elif options.run_dir is None and len(runs) == 1 and len(files) <= 1:
        is_directory = (Path(runs[0]) / "run.json").is_file()
        run = (
            RunDirectory(Path(runs[0]).absolute())
            if is_directory
            else find_run(options.runs_dir, runs[0])
        )
    else:
        if options.run_dir is not None and runs:
            problem = f"--resume: {runs[0]!r} is no file, and --run-dir names the run already."
        else:
            problem = "--resume: name one run, by --run-dir DIR or by its id."
        raise InvalidInputError([problem])
    if not run.record_path.is_file():
        raise InvalidInputError([f"--resume: {run.path} holds no run (no run.json)."])
    return run, files[0] if files else None


def _file_settings(settings: Mapping[str, Any], path: Path) -> dict[str, Any]:
    problems = []
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in _FILE_SETTINGS:
            tell(
                f"Warning: {path}: the run setting `{name}` is not known and not used; "
                f"known are {quoted(_FILE_SETTINGS)}.{suggestion(name, _FILE_SETTINGS)}"
            )
            continue
        if value is None:
            continue
        if name == "name":
            fits = isinstance(value, str)
        elif name in _CHOICES:
            fits = value in _CHOICES[name]
        else:
            fits = type(value) is int and value >= 1
        if not fits:
            problems.append(
                f"{path}: the run setting `{name}` is {value!r}, expected {_FILE_SETTINGS[name]}."
            )
        found[name] = value
    if problems:
        raise InvalidInputError(problems)
    return found


def _recorded_settings(record: RunRecord) -> dict[str, Any]:
    """The settings of the run so far; its thread count is the worker's to restore."""
    recorded = dict(record.settings)
    device = "cpu" if recorded.get("device") == "cpu" else None
    return {
        "device": device,
        "precision": recorded.get("precision"),
        "checkpoint_every": recorded.get("checkpoint_every"),
        "embed_metadata": recorded.get("embed_metadata", True),
    }


def _settings(options: argparse.Namespace, lower: Mapping[str, Any]) -> "RunSettings":
    """Flags before what the file or the run itself says."""
    from app.worker.settings import RunSettings

    chosen: dict[str, Any] = {"input_roots": INPUT_ROOTS}
    for name in ("device", "precision", "threads", "checkpoint_every"):
        flag = getattr(options, name)
        value = flag if flag is not None else lower.get(name)
        if value is not None:
            chosen[name] = value
    chosen["embed_metadata"] = not options.no_metadata and lower.get("embed_metadata", True)
    return RunSettings(**chosen)


def _execute(job: _Job, *, as_json: bool) -> int:
    from app.worker.settings import CancelToken

    view = ProgressView(sys.stderr or io.StringIO())  # stderr may be closed
    files: dict[tuple[str, str], str] = {}

    def see(line: EventLine) -> None:
        view.see(line)
        if line.type == "artefact" and line.data["kind"] in ("samples", "export"):
            files[str(line.data["kind"]), str(line.data["node"])] = str(line.data["path"])

    token = CancelToken()
    tell(f"Run directory: {job.run.path}")
    try:
        with _cancelled_by_signals(token):
            from app.worker.local import run_graph  # seconds of imports, in which Ctrl-C counts

            result = run_graph(
                job.graph,
                job.run,
                job.settings,
                resume=job.resume,
                iterations=job.iterations,
                on_event=see,
                cancel=token,
            )
    except StorageError as error:
        view.end_line()
        return complain(str(error))
    view.end_line()
    series = fold_metrics(read_events(job.run.events_path, tell))
    _tell_summary(result, series, files)
    if as_json:
        answer(json.dumps(_report(result, series), ensure_ascii=False))
    return _EXIT_OF_STATE.get(result.state, EXIT_FAILED)


@contextmanager
def _cancelled_by_signals(token: "CancelToken") -> Iterator[None]:
    """The first SIGINT, SIGTERM or SIGHUP asks the run to stop, the second one ends the process."""

    def say(text: bytes) -> None:
        # Written past the buffer of sys.stderr, in the middle of whose use a signal may come. A Ctrl-C ends `| tee`
        # first, and an error here would be raised in the middle of a node.
        if sys.stderr is not None:
            with contextlib.suppress(OSError):
                os.write(2, text)

    def handle(_number: int, _frame: object) -> None:
        if token.requested:
            say(b"\nKilled.\n")
            os._exit(EXIT_CANCELLED)
        token.request()
        say(b"\nCancelling: the state is saved first. Press Ctrl-C again to kill the run.\n")

    # A closed terminal (SIGHUP, not on Windows) asks for the same: the state is saved.
    names = ("SIGINT", "SIGTERM", "SIGHUP")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tell_summary(
    result: "RunResult", series: list[Series], files: Mapping[tuple[str, str], str]
) -> None:
    run = result.run.path
    if result.state == "failed":
        tell(result.error or "The run failed.")
        tell(f"The traceback is in {result.run.log_path}.")
    word = {"finished": "Finished", "failed": "Failed", "cancelled": "Cancelled"}.get(
        result.state, result.state
    )
    tell(f"{word} after tick {result.tick} of {result.total_ticks}.")
    tell(f"  run         {run}")
    if result.checkpoint:
        tell(f"  checkpoint  {run / result.checkpoint}")
    tell(f"  metrics     {result.run.metrics_path}")
    for kind, path in dict.fromkeys((kind, path) for (kind, _), path in files.items()):
        tell(f"  {kind:10}  {run / path}")
    for title, entry in columns(series).items():
        if told(entry.name):
            first = f"{entry.first:.4f} -> " if len(entry.points) > 1 else ""
            tell(f"  {title}: {first}{entry.last:.4f}")
    if result.state != "finished":
        tell(f"Go on with: python3 launch.py run --resume --run-dir {run}")


def _report(result: "RunResult", series: list[Series]) -> dict[str, Any]:
    """The one object of --json."""
    record = result.run.read_record()
    return {
        "run": record.id,
        "state": result.state,
        "ticks": result.tick,
        "total_ticks": result.total_ticks,
        "error": result.error,
        "metrics": {
            title: {"first": json_number(entry.first), "last": json_number(entry.last)}
            for title, entry in columns(series).items()
        },
        "checkpoint": str(result.run.path / result.checkpoint) if result.checkpoint else None,
        "run_dir": str(result.run.path),
    }


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        msg = f"expected a whole number of 1 or more, got {text!r}"
        raise argparse.ArgumentTypeError(msg)
    return value
