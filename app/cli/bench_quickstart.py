"""`bench quickstart`: does the quick start learn, over seeds, against the exact gradient and against shuffled advantages?

Every run is the shipped workflow in a process of its own, so that start-up, evaluation and saving count.
"""

import argparse
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.paths import ROOT
from app.storage.events import metrics_of_run

_WORKFLOW = ROOT / "workflows" / "quickstart.json"
_OPTIMIZER = "GRPO + JAGG Optimizer"
_ARMS: Mapping[str, tuple[str, ...]] = {
    "jagg": ("estimator=windows",),
    "exact": ("estimator=exact",),
    "shuffled": ("estimator=windows", "advantage_control=shuffle"),
}
_MEASURES: Mapping[str, str] = {
    "fully right (CNN)": "eval/shape_check/mean",
    "fully right (contour)": "eval/shape_check/contour",
    "reward": "eval/shape_margin/mean",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One finished run: seconds of wall and of processor time, and each measure at tick 0 and at the end."""

    arm: str
    seed: int
    wall: float
    cpu: float
    before: Mapping[str, float]
    after: Mapping[str, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmark's own options."""
    parser.add_argument(
        "--jagg-seeds", type=int, default=5, help="seeds of the JAGG runs (default 5)"
    )
    parser.add_argument(
        "--exact-seeds",
        type=int,
        default=3,
        help="seeds of the runs with the exact gradient (default 3)",
    )
    parser.add_argument(
        "--shuffled-seeds", type=int, default=2, help="seeds of the control runs (default 2)"
    )
    parser.add_argument(
        "--parallel", type=int, default=2, help="runs at a time, one thread each (default 2)"
    )
    parser.add_argument(
        "--iterations", type=int, help="ticks of each run (default: the workflow's)"
    )
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="where to put seed 0's grid before and after"
    )
    parser.add_argument(
        "--keep", type=Path, help="folder that keeps the run directories (default: a temporary one)"
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run every arm and seed; returns the object that `--json` prints."""
    jobs = [("jagg", s) for s in range(options.jagg_seeds)]
    jobs += [("exact", s) for s in range(options.exact_seeds)]
    jobs += [("shuffled", s) for s in range(options.shuffled_seeds)]
    # Arms take turns, so that a load that comes and goes falls on all of them.
    jobs.sort(key=lambda job: job[1])
    folder = options.keep or Path(os.environ.get("TMPDIR", "/tmp")) / f"jagg-bench-{os.getpid()}"  # noqa: S108
    folder = folder.resolve()  # the runs start in another directory
    try:
        with ThreadPoolExecutor(options.parallel) as pool:
            results = list(
                pool.map(lambda job: _one(job[0], job[1], folder, options.iterations), jobs)
            )
        if options.picture is not None:
            shutil.copyfile(folder / "jagg-0" / "samples" / "before_after.png", options.picture)
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    return {
        "runs": [_as_json(r) for r in results],
        "summary": summarise(results),
        "paired": {f"jagg - {arm}": paired(results, "jagg", arm) for arm in _ARMS if arm != "jagg"},
    }


def _one(arm: str, seed: int, folder: Path, iterations: int | None) -> Result:
    directory = folder / f"{arm}-{seed}"
    command = [
        sys.executable,
        "-m",
        "app.cli",
        "run",
        str(_WORKFLOW),
        "--json",
        "--seed",
        str(seed),
    ]
    command += ["--run-dir", str(directory), "--threads", "1"]
    if iterations is not None:
        command += ["--iterations", str(iterations)]
    for setting in _ARMS[arm]:
        command += ["--set", f"{_OPTIMIZER}.{setting}"]
    started = time.monotonic()
    directory.parent.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen(  # noqa: S603  our own launcher with our own arguments
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        error = process.stderr.read() if process.stderr else ""
        cpu = _wait(process)
    if process.returncode != 0:
        msg = f"bench quickstart: the {arm} run with seed {seed} ended with {process.returncode}:\n{error[-2000:]}"
        raise RuntimeError(msg)
    wall = time.monotonic() - started
    metrics = metrics_of_run(directory)
    before = {label: metrics[name][0][1] for label, name in _MEASURES.items()}
    after = {label: metrics[name][-1][1] for label, name in _MEASURES.items()}
    print(
        f"{arm:9s} seed {seed}: "
        + ", ".join(f"{label} {before[label]:.3f} -> {after[label]:.3f}" for label in _MEASURES)
        + f"; {wall:.0f} s wall, {cpu:.0f} s CPU",
        file=sys.stderr,
        flush=True,
    )
    return Result(
        arm=arm,
        seed=seed,
        wall=wall,
        cpu=cpu,
        before=before,
        after=after,
    )


def _wait(process: subprocess.Popen[str]) -> float:
    """Wait for the end of a process; the processor seconds it took, NaN where the system does not tell (Windows)."""
    if not hasattr(os, "wait4"):
        process.wait()
        return math.nan
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime + usage.ru_stime


def summarise(results: Sequence[Result]) -> dict[str, Any]:
    """Mean and standard deviation over seeds of each measure by arm, and the paired rise.

    `rise` is after - before of the same run; `sd` is the sample standard deviation over seeds, 0 for a single one.
    """
    summary: dict[str, Any] = {}
    for arm in _ARMS:
        own = [r for r in results if r.arm == arm]
        if not own:
            continue
        measures = {}
        for label in _MEASURES:
            before, after = [r.before[label] for r in own], [r.after[label] for r in own]
            rise = [a - b for a, b in zip(after, before, strict=True)]
            measures[label] = {
                "before": statistics.mean(before),
                "after": statistics.mean(after),
                "after_sd": _sd(after),
                "rise": statistics.mean(rise),
                "rise_sd": _sd(rise),
            }
        summary[arm] = {
            "seeds": len(own),
            "measures": measures,
            "wall_seconds": statistics.median(r.wall for r in own),
            "cpu_seconds": statistics.median(r.cpu for r in own),
        }
    return summary


def paired(results: Sequence[Result], one: str, other: str) -> dict[str, dict[str, float]]:
    """The final measures of one arm minus those of another with the same seed: mean and sample standard deviation."""
    after = {(r.arm, r.seed): r.after for r in results}
    seeds = [seed for arm, seed in after if arm == one and (other, seed) in after]
    found = {}
    for label in _MEASURES if seeds else ():
        differences = [after[one, seed][label] - after[other, seed][label] for seed in seeds]
        found[label] = {
            "seeds": len(seeds),
            "mean": statistics.mean(differences),
            "sd": _sd(differences),
        }
    return found


def table(report: Mapping[str, Any]) -> str:
    """The report as a Markdown table."""
    lines = [
        "| arm (seeds) | " + " | ".join(_MEASURES) + " | CPU s | wall s |",
        "|---" * (len(_MEASURES) + 3) + "|",
    ]
    for arm, entry in report["summary"].items():
        cells = [
            f"{m['before']:.3f} → {m['after']:.3f} (rise {m['rise']:+.3f}, sd {m['rise_sd']:.3f})"
            for m in entry["measures"].values()
        ]
        lines.append(
            f"| {arm} ({entry['seeds']}) | "
            + " | ".join(cells)
            + f" | {entry['cpu_seconds']:.0f} | {entry['wall_seconds']:.0f} |"
        )
    lines += [
        "",
        "| final, same seeds | " + " | ".join(_MEASURES) + " |",
        "|---" * (len(_MEASURES) + 1) + "|",
    ]
    for name, entry in report["paired"].items():
        cells = [f"{m['mean']:+.3f} (sd {m['sd']:.3f})" for m in entry.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _sd(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _as_json(result: Result) -> dict[str, Any]:
    return {
        "arm": result.arm,
        "seed": result.seed,
        "wall_seconds": result.wall,
        "cpu_seconds": result.cpu,
        "before": dict(result.before),
        "after": dict(result.after),
    }
