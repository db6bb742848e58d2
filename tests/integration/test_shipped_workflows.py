"""The shipped workflows: each compiles, states what it must, and the small version of each runs on a processor."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from app.cli import main
from app.graph import compile_graph, load_registry, read_workflow
from app.paths import WORKFLOWS
from app.storage.events import read_events

ROOT = Path(__file__).parents[2]

SMALL = {
    "quickstart": [
        "--iterations",
        "2",
        "--set",
        "1.prompts_per_tick=2",
        "--set",
        "1.group_size=3",
        "--set",
        "9.images_per_prompt=1",
        "--set",
        "9.steps=2",
        "--set",
        "1.held_out_count=4",
    ],
    "pretrain_tiny": ["--iterations", "2", "--set", "1.batch=4"],
    "pretrain_noisy": ["--iterations", "2", "--set", "1.batch=4"],
    "train_shape_check": ["--iterations", "2", "--set", "1.batch=4", "--set", "1.test_drawings=4"],
}
SMALL["quickstart_exact"] = SMALL["reward_hacking"] = SMALL["quickstart"]


def _node(name: str, kind: str):
    registry = load_registry()
    compiled = compile_graph(read_workflow(WORKFLOWS / f"{name}.json", registry).graph, registry)
    return next(node.params for node in compiled.order if node.spec.type == kind)


def test_every_shipped_workflow_is_tested():
    assert {path.stem for path in WORKFLOWS.glob("*.json")} == set(SMALL)


@pytest.mark.parametrize("name", sorted(SMALL))
def test_the_small_version_runs(name, tmp_path, capsys):
    code = main(
        [
            "run",
            str(WORKFLOWS / f"{name}.json"),
            "--run-dir",
            str(tmp_path / "run"),
            "--json",
            *SMALL[name],
        ]
    )
    out, err = capsys.readouterr()
    assert code == 0, err
    report = json.loads(out)
    assert (report["state"], report["ticks"]) == ("finished", 2)
    assert (tmp_path / "run" / "metrics.csv").is_file()
    assert list((tmp_path / "run" / "export").glob("*.safetensors"))
    if "Evaluate" in (tmp_path / "run" / "prompt.json").read_text():
        assert (tmp_path / "run" / "samples" / "before_after.png").is_file()
        with (tmp_path / "run" / "metrics.csv").open() as file:
            ticks = [
                int(row["tick"]) for row in csv.DictReader(file) if row["eval/shape_check/mean"]
            ]
        assert ticks == [0, 2]


def test_the_quick_start_states_its_recipe_and_the_exact_one_differs_in_the_estimator_alone():
    sampler = _node("quickstart", "SDESampler")
    assert (sampler.transition, sampler.noise_level, sampler.shift, sampler.steps) == (
        "cps",
        0.8,
        1.0,
        8,
    )
    assert (
        sampler.noise_start,
        sampler.noise_stop,
        sampler.shared_noise,
        sampler.guidance_scale,
    ) == (0, 4, True, 1.0)
    optimizer = _node("quickstart", "GRPOJAGGOptimizer")
    assert (optimizer.estimator, optimizer.window, optimizer.jagg_frac) == ("windows", 4, 1.0)
    assert (optimizer.normalise, optimizer.advantage_epsilon, optimizer.advantage_clamp) == (
        "group_std",
        1e-4,
        4.0,
    )
    assert (
        optimizer.learning_rate,
        optimizer.beta_1,
        optimizer.beta_2,
        optimizer.weight_decay,
    ) == (6e-4, 0.9, 0.95, 0.0)
    assert (optimizer.warmup, optimizer.decay, optimizer.kl_weight, optimizer.ema_decay) == (
        5,
        "linear",
        0.0,
        0.0,
    )
    assert optimizer.clip_native == 1e-4
    evaluate = _node("quickstart", "Evaluate")
    assert (evaluate.every, evaluate.baseline, evaluate.weights, evaluate.images_per_prompt) == (
        50,
        True,
        "raw",
        2,
    )
    texts = [
        json.loads((WORKFLOWS / f"{name}.json").read_text())
        for name in ("quickstart", "quickstart_exact")
    ]
    for text in texts:
        text["extra"]["jagg"].pop("name")
        text.pop("id")
    for node, other in zip(texts[0]["nodes"], texts[1]["nodes"], strict=True):
        if node["type"] == "GRPOJAGGOptimizer":
            assert node["widgets_values_named"].pop("estimator") == "windows"
            assert other["widgets_values_named"].pop("estimator") == "exact"
            node.pop("widgets_values"), other.pop("widgets_values")
    assert texts[0] == texts[1]


def _numbers(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "memory/"))} for row in rows
    ]


def _last_checkpoint(run: Path) -> dict[str, torch.Tensor]:
    return load_file(sorted((run / "checkpoints").glob("tick-*"))[-1] / "state.safetensors")


@pytest.mark.timeout(240)
def test_the_quick_start_killed_in_mid_tick_and_resumed_equals_an_uninterrupted_run(
    tmp_path, capsys
):
    """Weights, optimizer state, running average and metrics, bit for bit; a real process and a real kill -9."""
    size = [
        "--iterations",
        "6",
        "--set",
        "1.prompts_per_tick=2",
        "--set",
        "1.group_size=4",
        "--set",
        "1.held_out_count=4",
    ]
    size += [
        "--set",
        "9.steps=2",
        "--set",
        "9.every=4",
        "--set",
        "7.every=2",
        "--set",
        "6.ema_decay=0.9",
        "--set",
        "6.kl_weight=0.01",
    ]
    size += ["--threads", "1"]
    file = str(WORKFLOWS / "quickstart.json")
    assert main(["run", file, "--run-dir", str(tmp_path / "whole"), *size]) == 0

    script = "import sys; from app.cli import main; sys.exit(main())"
    victim = subprocess.Popen(
        [sys.executable, "-c", script, "run", file, "--run-dir", str(tmp_path / "cut"), *size],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    events, until = tmp_path / "cut" / "events.jsonl", time.monotonic() + 120
    try:
        while not (
            events.is_file()
            and any(
                e.type == "node_started" and e.tick == 4 and e.data["node"] == "3"
                for e in read_events(events, lambda _: None)
            )
        ):
            assert victim.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < until
            time.sleep(0.002)
    finally:
        victim.send_signal(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL
    assert _last_checkpoint(tmp_path / "cut").keys() == _last_checkpoint(tmp_path / "whole").keys()

    capsys.readouterr()
    assert main(["run", "--resume", "--run-dir", str(tmp_path / "cut"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ticks"] == 6
    assert [e.tick for e in read_events(events) if e.type == "resumed"] == [2]
    ours, theirs = _last_checkpoint(tmp_path / "cut"), _last_checkpoint(tmp_path / "whole")
    assert any("exp_avg" in name for name in ours), sorted(ours)[:5]
    assert any("ema" in name for name in ours)
    for name, tensor in theirs.items():
        assert torch.equal(tensor, ours[name]), name
    assert _numbers(tmp_path / "cut") == _numbers(tmp_path / "whole")
    exported = [
        load_file(tmp_path / run / "export" / "policy.safetensors") for run in ("cut", "whole")
    ]
    assert all(torch.equal(tensor, exported[1][name]) for name, tensor in exported[0].items())


def test_other_seeds_give_other_runs_and_equal_seeds_equal_ones(tmp_path):
    size = [*SMALL["quickstart"], "--threads", "1"]
    file = str(WORKFLOWS / "quickstart.json")
    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        assert main(["run", file, "--run-dir", str(tmp_path / name), "--seed", seed, *size]) == 0
    a, b, c = (_last_checkpoint(tmp_path / name) for name in "abc")
    assert all(torch.equal(tensor, b[name]) for name, tensor in a.items())
    assert any(not torch.equal(tensor, c[name]) for name, tensor in a.items())


def test_the_quick_start_runs_in_bfloat16_and_resumes_so(tmp_path, capsys):
    """Forwards in half precision, weights and log-probs in float32; the parity gate holds at clip/10."""
    size = [*SMALL["quickstart"], "--threads", "1"]
    file = str(WORKFLOWS / "quickstart.json")
    full, half = tmp_path / "full", tmp_path / "half"
    assert main(["run", file, "--run-dir", str(full), *size]) == 0
    assert main(["run", file, "--run-dir", str(half), "--precision", "bf16", *size]) == 0
    assert json.loads((half / "run.json").read_text())["settings"]["precision"] == "bf16"
    a, b = _last_checkpoint(full), _last_checkpoint(half)
    weights = [name for name in a if "proj" in name or "embedder" in name]
    assert weights
    assert all(b[name].dtype == torch.float32 for name in weights)
    assert any(not torch.equal(a[name], b[name]) for name in weights)
    rows = _numbers(half)
    assert all(row["jagg/fallback"] == "0.0" for row in rows[1:])
    assert all(float(row["jagg/velocity_error"]) < 0.1 for row in rows[1:])
    capsys.readouterr()
    assert main(["run", "--resume", "--run-dir", str(half), "--iterations", "3", "--json"]) == 0
    assert json.loads((half / "run.json").read_text())["settings"]["precision"] == "bf16"
    # The same process goes back to full precision.
    assert main(["run", file, "--run-dir", str(tmp_path / "again"), *size]) == 0
    assert all(torch.equal(t, a[name]) for name, t in _last_checkpoint(tmp_path / "again").items())
