"""The command line: exit codes, streams, and what is written when input is bad."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import ROOT, CommandLine
from tests.integration.toy_graphs import training

pytestmark = pytest.mark.timeout(240)


def cycle() -> dict[str, Any]:
    graph = training()
    graph["8"] = {"class_type": "ToyTrainer", "inputs": {"policy": ["9", 0], "rollout": ["3", 0]}}
    graph["9"] = {"class_type": "ToyTrainer", "inputs": {"policy": ["8", 0], "rollout": ["3", 0]}}
    graph["10"] = {"class_type": "ToySaver", "inputs": {"policy": ["9", 0]}}
    return graph


def two_writers() -> dict[str, Any]:
    graph = training()
    graph["8"] = {"class_type": "ToyTrainer", "inputs": {"policy": ["2", 0], "rollout": ["3", 0]}}
    graph["9"] = {"class_type": "ToySaver", "inputs": {"policy": ["8", 0]}}
    return graph


def missing_link() -> dict[str, Any]:
    graph = training()
    del graph["3"]["inputs"]["batch"]
    return graph


def unknown_node() -> dict[str, Any]:
    graph = training()
    graph["7"]["class_type"] = "ToySavr"
    return graph


BAD: dict[str, tuple[Any, str]] = {
    "typo in a parameter": (training(n4={"rat": 0.1}), "Did you mean `rate`?"),
    "wrong type": (training(n5={"every": 1.5}), "`every` is 1.5"),
    "text for a number": (training(n4={"rate": "fast"}), "`rate` is 'fast'"),
    "out of range": (training(n1={"iterations": 0}), "expected 1 or more"),
    "cycle": (cycle(), "cycle"),
    "two writers": (two_writers(), "Toy Trainer"),
    "missing link": (missing_link(), "`batch` is not linked"),
    "unknown node": (unknown_node(), "Did you mean `ToySaver`?"),
    "JSON syntax": ('{"1": {"class_type": ', "no valid JSON: line 1"),
    "empty": ("", "is empty"),
    "a list": ("[1, 2]", "expected a JSON object"),
    "no workflow": ({"a": 1}, "no workflow"),
}


def test_bad_workflows_exit_2_say_why_and_write_nothing(cli: CommandLine) -> None:
    for what, (content, expected) in BAD.items():
        file = cli.write("bad.json", content)
        done = cli("run", file, "--run-dir", "made", "--runs-dir", "all")
        assert done.returncode == 2, what
        assert expected in done.stderr, (what, done.stderr)
        assert "Traceback" not in done.stderr, what
        assert done.stdout == "", what
        assert sorted(path.name for path in cli.directory.iterdir()) == ["bad.json"], what


def test_validate_names_every_problem_of_every_file(cli: CommandLine) -> None:
    files = [
        cli.write(f"{number}.json", content) for number, (content, _) in enumerate(BAD.values())
    ]
    good = cli.write("good.json", training())
    many = cli.write("many.json", training(n4={"rat": 0.1}, n5={"every": 1.5}))
    done = cli("validate", *files, good, many, "nowhere.json", ".")
    assert done.returncode == 2
    for number, (what, (_, expected)) in enumerate(BAD.items()):
        lines = [line for line in done.stderr.splitlines() if line.startswith(f"{number}.json: ")]
        assert any(expected in line for line in lines), (what, lines)
    assert "good.json: valid" in done.stderr
    assert sum(line.startswith("many.json: ") for line in done.stderr.splitlines()) == 2
    assert "There is no file nowhere.json" in done.stderr
    assert "is a folder" in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    fine = cli("validate", good, "--json")
    assert fine.returncode == 0
    assert json.loads(fine.stdout) == {"good.json": []}


@pytest.mark.parametrize("place", ["file/below", "/proc/runs/a"])
def test_an_unwritable_run_directory_is_one_sentence(cli: CommandLine, place: str) -> None:
    cli.write("file", "in the way")
    workflow = cli.write("toy.json", training())
    done = cli("run", workflow, "--run-dir", place)
    assert done.returncode == 2
    assert "cannot be made" in done.stderr
    assert "--run-dir" in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in cli.directory.iterdir()) == ["file", "toy.json"]


def test_set_iterations_and_seed(cli: CommandLine) -> None:
    workflow = cli.write("toy.json", training())
    done = cli(
        "run", workflow, "--run-dir", "a", "--json", "--iterations", "2", "--seed", "9",
        "--set", "Toy Trainer.rate=0.1", "--set", "5.every=1", "--name", "mine", "--checkpoint-every", "1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["state"], report["ticks"]) == ("finished", 2)
    assert report["run_dir"] == str(cli.directory / "a")
    prompt = json.loads((cli.directory / "a" / "prompt.json").read_text())
    assert prompt["1"]["inputs"] == {"iterations": 2, "seed": 9}
    assert prompt["4"]["inputs"]["rate"] == 0.1
    record = json.loads((cli.directory / "a" / "run.json").read_text())
    assert (record["name"], record["seed"], record["total_ticks"]) == ("mine", 9, 2)
    assert set(report["metrics"]["reward/mean"]) == {"first", "last"}
    # One line for each tick, with the tick, its total and the reward.
    ticks = [line for line in done.stderr.splitlines() if line.startswith("tick ")]
    assert [line.split()[1] for line in ticks] == ["0/2", "1/2", "2/2"]
    assert "reward/mean" in ticks[1]


def test_what_cannot_be_set_is_all_said_at_once(cli: CommandLine) -> None:
    workflow = cli.write("toy.json", training())
    done = cli(
        "run",
        workflow,
        "--set",
        "4.rat=1",
        "--set",
        "nonsense",
        "--set",
        "Toy.rate=1",
        "--seed",
        "-1",
    )
    assert done.returncode == 2
    assert "Did you mean `rate`?" in done.stderr
    assert "`nonsense`: expected NODE.param=value" in done.stderr
    assert "no node with the id or title `Toy`" in done.stderr
    assert "--seed -1" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_node_that_fails_exits_1_with_a_sentence_and_a_log(cli: CommandLine) -> None:
    workflow = cli.write("toy.json", training(n3={"fail_at": 2}))
    done = cli("run", workflow, "--run-dir", "a", "--json")
    assert done.returncode == 1
    assert "Toy Sampler (3) at tick 2: the toy broke" in done.stderr
    assert "Traceback" not in done.stderr.replace("The traceback is in", "")
    assert "Traceback" in (cli.directory / "a" / "log.txt").read_text()
    report = json.loads(done.stdout)
    assert (report["state"], report["ticks"]) == ("failed", 1)


def test_convert_and_nodes_print_json_alone(cli: CommandLine) -> None:
    workflow = cli.write("toy.json", training())
    converted = cli("convert", workflow)
    assert converted.returncode == 0
    assert json.loads(converted.stdout)["4"]["inputs"]["policy"] == ["2", 0]
    nodes = cli("nodes", "--json")
    assert nodes.returncode == 0
    catalogue = json.loads(nodes.stdout)
    assert catalogue["ToyTrainer"]["jagg"]["changes"] == ["policy"]


def test_unknown_commands_and_files_name_the_nearest(cli: CommandLine) -> None:
    wrong = cli("valdate", "x.json")
    assert wrong.returncode == 2
    assert "No command is called 'valdate'." in wrong.stderr
    assert "Did you mean `validate`?" in wrong.stderr
    cli.write("quickstart.json", "{}")
    missing = cli("run", "quickstrat.json")
    assert missing.returncode == 2
    assert "There is no file quickstrat.json. Did you mean `quickstart.json`?" in missing.stderr
    assert cli("bench", "--help").returncode == 0
    assert cli("help").returncode == 0


@pytest.mark.parametrize("delay", [0.3, 0.8, 1.5])
def test_ctrl_c_while_libraries_are_imported_leaves_no_traceback(
    cli: CommandLine, delay: float
) -> None:
    workflow = cli.write("toy.json", training())
    victim = cli.start("run", workflow, "--run-dir", "cut", "--threads", "1")
    assert victim.stderr is not None
    victim.stderr.readline()
    time.sleep(delay)
    victim.send_signal(signal.SIGINT)
    _, err = victim.communicate(timeout=120)
    # On a fast machine the toy run may be over before the signal comes.
    assert victim.returncode in (0, 130), err
    assert "Traceback" not in err
    assert victim.returncode == 0 or "Cancel" in err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--port", "1"],
        ["compare"],
        ["reproduce", "x"],
        ["reward-server"],
        ["bench", "tick"],
        ["run", "toy.json", "--executor", "ray"],
        ["run", "toy.json", "--num-processes", "2"],
        ["run", "toy.json", "--fork"],
    ],
)
def test_what_is_not_there_yet_says_so(cli: CommandLine, arguments: list[str]) -> None:
    done = cli(*arguments)
    assert done.returncode == 2
    assert "not there yet" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["run", "a", "--threads", "0"], ["bench", "nonsense"], ["run"]]
)
def test_bad_arguments_exit_2(cli: CommandLine, arguments: list[str]) -> None:
    done = cli(*arguments)
    assert done.returncode == 2
    assert done.stderr
    assert "Traceback" not in done.stderr


def test_commands_and_the_first_line_come_before_torch() -> None:
    script = (
        "import sys, app.cli.commands, app.cli.run, app.cli.check\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'accelerate', 'nodes')))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False)
    assert done.returncode == 0


def test_a_reader_of_stdout_that_goes_away_or_a_full_disk_is_no_traceback(cli: CommandLine) -> None:
    workflow = cli.write("toy.json", training())
    gone = cli.start("convert", workflow)
    gone.stdout.close()
    assert gone.stderr.read() == "Converting toy.json\n"
    assert gone.wait() == 130
    full = cli.start("convert", workflow, stdout=Path("/dev/full"))
    assert "stdout cannot be written to (No space left on device)" in full.stderr.read()
    assert full.wait() == 1
