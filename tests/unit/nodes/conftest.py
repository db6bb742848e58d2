"""Fixtures for nodes: a real run context in a temporary run directory, and the embedded policy at random weights."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from app.storage.events import Event
from app.storage.runs import RunDirectory
from app.worker.cache import Observed
from app.worker.context import NodeContext, make_accelerator
from app.worker.settings import CancelToken
from jagg.policy import Policy
from jagg.values import PromptBatch, Rollout
from nodes.policy import DiTLoader, DiTLoaderParams
from nodes.sampler import SDESampler, SDESamplerParams

Contexts = Callable[..., NodeContext]


@pytest.fixture
def emitted() -> list[Event]:
    """Every event that a context of this test emitted."""
    return []


@pytest.fixture
def context(tmp_path: Path, emitted: list[Event]) -> Contexts:
    """Make the context of a node at a tick; files go to `tmp_path/run`, inputs come from `tmp_path/input`."""
    for name in ("run", "input", "models"):
        (tmp_path / name).mkdir(exist_ok=True)

    def make(
        node: str = "1",
        tick: int = 1,
        *,
        seed: int = 0,
        total_ticks: int = 10,
        metadata: dict[str, str] | None = None,
    ) -> NodeContext:
        made = NodeContext(
            node=node,
            seed=seed,
            total_ticks=total_ticks,
            accelerator=make_accelerator(cpu=True),
            run=RunDirectory(tmp_path / "run"),
            emit=emitted.append,
            cancel=CancelToken(),
            clock=time.monotonic,
            input_roots={"input": tmp_path / "input", "models": tmp_path / "models"},
            metadata=metadata or {},
            observed=Observed(),
        )
        made.enter(tick)
        return made

    return make


@pytest.fixture
def policy(context: Contexts) -> Policy:
    """The embedded policy at random weights; the text path learns."""
    params = DiTLoaderParams(
        model="embedded/random", train="match", train_patterns="context_embedder\nproj_out"
    )
    return DiTLoader(params).run(context("2")).policy


@pytest.fixture
def prompts() -> PromptBatch:
    """Two prompts of three images."""
    return PromptBatch(
        prompts=(
            "a large red circle on a white background",
            "a large blue star on a gray background",
        ),
        group_size=3,
    )


@pytest.fixture
def rollout(context: Contexts, policy: Policy, prompts: PromptBatch) -> Rollout:
    """A rollout of three steps, two of them noisy, in two micro-batches."""
    params = SDESamplerParams(
        steps=3,
        shift=1.0,
        transition="cps",
        noise_level=0.8,
        noise_start=0,
        noise_stop=2,
        micro_batch=4,
    )
    return SDESampler(params).run(context("3"), policy=policy, prompts=prompts).rollout
