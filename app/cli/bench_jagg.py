"""`bench jagg`: fidelity and cost of gradient estimators on the quick start's trained policy, interleaved in one process.

Cosines are regression tests, not a measure of how well a run learns: an estimator that drops signals can score high and
learn badly, so two that do stand beside JAGG. Acceptance rests on `bench quickstart`.

An update here is the gradient alone, without the optimizer's step; a tick is sampling, scoring and that update.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.cli.bench_graph import TrainingGraph, load_training_graph
from jagg.gradients import (
    ExactGradient,
    JaggGradient,
    NodePlan,
    Objective,
    Tally,
    accumulate,
    node_velocities,
    windows_of,
)
from jagg.losses import upstream_signal
from jagg.policy import Policy
from jagg.probe import compare_gradients
from jagg.randomness import generator
from jagg.update import advantages_of, objective_of, torch_backward
from jagg.values import Reward, Rollout

_WORKFLOW = "quickstart.json"
_BASELINES = ("random_steps", "largest_signals")
"""Methods that drop signals: what a cosine must be read against, not ways to train."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """A way to get the gradient of a rollout: (policy, objective, span, equalise) adds it to the parameters."""

    name: str
    backward_passes: int
    run: Callable[[Policy, Objective, tuple[int, int], bool], None]


@dataclass(kw_only=True, slots=True)
class Measurement:
    """What was seen of one method, one entry per batch (fidelity) or round (seconds)."""

    cosine: list[float] = field(default_factory=list)
    rel_error: list[float] = field(default_factory=list)
    cosine_equalised: list[float] = field(default_factory=list)
    rel_error_equalised: list[float] = field(default_factory=list)
    update_seconds: list[float] = field(default_factory=list)
    peak_activation_mib: float = 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmark's own options."""
    parser.add_argument(
        "--batches",
        type=int,
        default=3,
        help="rollouts over which fidelity is averaged (default 3)",
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help="interleaved timing rounds (default 7)"
    )
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every method; returns the object that `--json` prints."""
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="jagg-bench-") as folder:
        graph = load_training_graph(_WORKFLOW, Path(folder))
        batches = [graph.draw(tick) for tick in range(1, options.batches + 1)]
        window = int(graph.optimizer_params.jagg().window)
        methods = _methods(window, batches[0][0])
        measured = {method.name: Measurement() for method in methods}
        for rollout, reward in batches:
            _fidelity(graph, rollout, reward, methods, measured)
        rollout_seconds = _timing(graph, batches[0], methods, measured, options.rounds)
    return _report(graph, batches[0][0], window, methods, measured, rollout_seconds, options)


def table(report: Mapping[str, Any]) -> str:
    """The report as a Markdown table."""
    lines = [
        "| method | backward passes | cosine / rel. error | equalised | update x | tick x | activations MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['method']} | {r['backward_passes']} | {r['cosine']:.3f} / {r['rel_error']:.3f} | "
        f"{r['cosine_equalised']:.3f} / {r['rel_error_equalised']:.3f} | {r['update_speedup']:.2f} | "
        f"{r['tick_speedup']:.2f} | {r['peak_activation_mib']:.0f} |"
        for r in (*report["rows"], *report["baselines"])
    ]
    return "\n".join(lines)


def _methods(window: int, rollout: Rollout) -> list[Method]:
    exact = ExactGradient()
    jagg = JaggGradient(window=window, jagg_frac=1.0)
    plan, full = jagg.plan(rollout), exact.plan(rollout)

    def with_plan(chosen: NodePlan, chunk: int, *, on_policy: bool) -> Callable[..., None]:
        def go(policy: Policy, objective: Objective, span: tuple[int, int], equalise: bool) -> None:
            _accumulate(
                policy, objective, chosen, span, chunk, on_policy=on_policy, equalise=equalise
            )

        return go

    def released(
        policy: Policy, objective: Objective, span: tuple[int, int], equalise: bool
    ) -> None:
        _released(policy, objective, plan, span, equalise=equalise)

    return [
        Method(
            name="exact", backward_passes=len(full.nodes), run=with_plan(full, 1, on_policy=True)
        ),
        Method(name="jagg_released", backward_passes=len(plan.nodes), run=released),
        Method(
            name="jagg_paper",
            backward_passes=len(plan.nodes),
            run=with_plan(plan, 0, on_policy=False),
        ),
        Method(
            name="jagg_windows",
            backward_passes=len(plan.nodes),
            run=with_plan(plan, 0, on_policy=True),
        ),
        _dropping(
            "random_steps", len(plan.nodes), lambda objective: _random_steps(objective, window)
        ),
        _dropping(
            "largest_signals",
            len(plan.nodes),
            lambda objective: _largest_signals(objective, len(plan.nodes)),
        ),
    ]


def _dropping(
    name: str, backward_passes: int, choose: Callable[[Objective], Mapping[int, float]]
) -> Method:
    """A baseline that keeps the chosen steps' signals, each times its weight, and drops the others."""

    def go(policy: Policy, objective: Objective, span: tuple[int, int], equalise: bool) -> None:
        kept = choose(objective)
        nodes = tuple(sorted(kept))
        rows = tuple(
            ((nodes.index(step), kept[step]),) if step in kept else ()
            for step in range(objective.rollout.trained_steps)
        )
        plan = NodePlan(nodes=nodes, rows=rows)
        _accumulate(policy, objective, plan, span, 0, on_policy=True, equalise=equalise)

    return Method(name=name, backward_passes=backward_passes, run=go)


def _random_steps(objective: Objective, window: int) -> dict[int, float]:
    """Two random steps of each window, weighted so that their sum is that of the window on average."""
    random = generator(0, "bench jagg", "steps", objective.rollout.id)
    kept: dict[int, float] = {}
    for first, last in windows_of(objective.rollout.trained_steps, window):
        width = last - first + 1
        chosen = torch.randperm(width, generator=random)[:2].tolist()
        kept |= {first + step: width / len(chosen) for step in chosen}
    return kept


def _largest_signals(objective: Objective, count: int) -> dict[int, float]:
    """The steps whose signals have the largest norms over the batch, unweighted."""
    rollout = objective.rollout
    norms = [
        float(
            upstream_signal(
                rollout.velocities[step], objective.terms(step, 0, len(rollout)), on_policy=True
            ).gradient.norm()
        )
        for step in range(rollout.trained_steps)
    ]
    return dict.fromkeys(sorted(range(len(norms)), key=lambda step: -norms[step])[:count], 1.0)


def _accumulate(
    policy: Policy,
    objective: Objective,
    plan: NodePlan,
    span: tuple[int, int],
    chunk: int,
    *,
    on_policy: bool,
    equalise: bool,
) -> None:
    accumulate(
        policy,
        objective,
        plan,
        span=span,
        node_chunk=chunk,
        on_policy=on_policy,
        backward=torch_backward,
        tally=Tally(objective.rollout.latents.device),
        on_forward=_nothing,
        equalise=equalise,
    )


def _released(
    policy: Policy, objective: Objective, plan: NodePlan, span: tuple[int, int], *, equalise: bool
) -> None:
    """The scheme of the released training script: W forwards without a graph, then each end forwarded and backpropagated alone."""
    start, stop = span
    with torch.no_grad():
        velocities = [
            node_velocities(policy, objective, [step], start, stop)[0]
            for step in range(len(plan.rows))
        ]
    signals = [
        upstream_signal(velocity, objective.terms(step, start, stop), on_policy=False).gradient
        for step, velocity in enumerate(velocities)
    ]
    if equalise:
        signals = [signal / signal.norm() for signal in signals]
    for number, node in enumerate(plan.nodes):
        total = sum(
            weight * signals[step]
            for step, row in enumerate(plan.rows)
            for column, weight in row
            if column == number
        )
        torch_backward(node_velocities(policy, objective, [node], start, stop)[0], total)  # type: ignore[arg-type]


def _gradient(
    policy: Policy, objective: Objective, method: Method, *, equalise: bool
) -> dict[str, Tensor]:
    """The gradient over all micro-batches by parameter name."""
    trainable = policy.trainable()
    for parameter in trainable.values():
        parameter.grad = None
    for span in objective.rollout.micro_batches:
        method.run(policy, objective, span, equalise)
    found = {name: p.grad for name, p in trainable.items() if p.grad is not None}
    for parameter in trainable.values():
        parameter.grad = None
    return found


def _fidelity(
    graph: TrainingGraph,
    rollout: Rollout,
    reward: Reward,
    methods: Sequence[Method],
    measured: Mapping[str, Measurement],
) -> None:
    objective = _objective(graph, rollout, reward)
    for equalise in (False, True):
        exact = _gradient(graph.policy, objective, methods[0], equalise=equalise)
        for method in methods:
            cosine, error = compare_gradients(
                _gradient(graph.policy, objective, method, equalise=equalise), exact
            )
            entry = measured[method.name]
            (entry.cosine_equalised if equalise else entry.cosine).append(cosine)
            (entry.rel_error_equalised if equalise else entry.rel_error).append(error)


def _timing(
    graph: TrainingGraph,
    batch: tuple[Rollout, Reward],
    methods: Sequence[Method],
    measured: Mapping[str, Measurement],
    rounds: int,
) -> list[float]:
    """Processor seconds of each method in turn, round after round; returns those of sampling and scoring."""
    objective = _objective(graph, *batch)
    for method in methods:
        measured[method.name].peak_activation_mib = _activations(graph.policy, objective, method)
    sampling = []
    for number in range(rounds):
        started = time.process_time()
        graph.draw(number + 1)
        sampling.append(time.process_time() - started)
        for method in methods:
            started = time.process_time()
            _gradient(graph.policy, objective, method, equalise=False)
            measured[method.name].update_seconds.append(time.process_time() - started)
    return sampling


def _activations(policy: Policy, objective: Objective, method: Method) -> float:
    """Most MiB that graphs held at once, parameters and repeated storages apart."""
    own = {p.untyped_storage().data_ptr() for p in policy.module.parameters()}
    held: dict[int, tuple[int, int]] = {}
    now = peak = 0

    def pack(tensor: Tensor) -> tuple[Tensor, int]:
        nonlocal now, peak
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in own:
            count, size = held.get(key, (0, storage.nbytes()))
            held[key] = (count + 1, size)
            if count == 0:
                now += size
                peak = max(peak, now)
        return tensor, key

    def unpack(packed: tuple[Tensor, int]) -> Tensor:
        nonlocal now
        tensor, key = packed
        if key in held:
            count, size = held.pop(key)
            if count > 1:
                held[key] = (count - 1, size)
            else:
                now -= size
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        _gradient(policy, objective, method, equalise=False)
    return peak / 2**20


def _objective(graph: TrainingGraph, rollout: Rollout, reward: Reward) -> Objective:
    config = graph.optimizer_params.grpo()
    return objective_of(
        rollout,
        advantages_of(rollout, reward, config=config, generator=graph.generator),
        config=config,
    )


def _report(
    graph: TrainingGraph,
    rollout: Rollout,
    window: int,
    methods: Sequence[Method],
    measured: Mapping[str, Measurement],
    sampling: Sequence[float],
    options: argparse.Namespace,
) -> dict[str, Any]:
    exact = measured[methods[0].name].update_seconds
    rows = []
    for method in methods:
        entry = measured[method.name]
        ratios = [a / b for a, b in zip(exact, entry.update_seconds, strict=True)]
        ticks = [
            (s + a) / (s + b) for s, a, b in zip(sampling, exact, entry.update_seconds, strict=True)
        ]
        rows.append(
            {
                "method": method.name,
                "backward_passes": method.backward_passes,
                "cosine": statistics.mean(entry.cosine),
                "rel_error": statistics.mean(entry.rel_error),
                "cosine_equalised": statistics.mean(entry.cosine_equalised),
                "rel_error_equalised": statistics.mean(entry.rel_error_equalised),
                "update_speedup": statistics.median(ratios),
                "update_speedup_range": [min(ratios), max(ratios)],
                "tick_speedup": statistics.median(ticks),
                "peak_activation_mib": entry.peak_activation_mib,
                "update_cpu_seconds": statistics.median(entry.update_seconds),
            }
        )
    policy = graph.policy
    return {
        "model": {
            "family": policy.family.name,
            "parameters": sum(p.numel() for p in policy.module.parameters()),
            "trainable": sum(p.numel() for p in policy.trainable().values()),
            "latent_shape": list(policy.family.latent_shape),
            "samples": len(rollout),
            "trained_steps": rollout.trained_steps,
            "window": window,
            "transition": rollout.transition.kind,
        },
        "batches": options.batches,
        "rounds": options.rounds,
        "threads": options.threads,
        "sampling_cpu_seconds": statistics.median(sampling),
        "rows": [r for r in rows if r["method"] not in _BASELINES],
        "baselines": [r for r in rows if r["method"] in _BASELINES],
    }


def _nothing() -> None:
    """No progress to report."""
