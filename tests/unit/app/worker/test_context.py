from pathlib import Path

import pytest
import torch
from PIL import Image

from app.graph import Cancelled
from app.storage.events import Artefact, Event, Metric, Progress
from app.worker.cache import Observed
from app.worker.context import NodeContext, make_accelerator
from app.worker.settings import CancelToken
from tests.integration.toy_graphs import new_run


class Bench:
    """A context whose events, clock and cancel token are at hand."""

    def __init__(self, folder: Path, node: str = "4", seed: int = 1) -> None:
        self.events: list[Event] = []
        self.now = 0.0
        self.cancel = CancelToken()
        self.observed = Observed()
        (folder / "input" / "more").mkdir(parents=True, exist_ok=True)
        (folder / "input" / "more" / "prompts.txt").write_text("a")
        run = folder / "run"
        self.context = NodeContext(
            node=node,
            seed=seed,
            total_ticks=10,
            accelerator=make_accelerator(cpu=True),
            run=new_run(run) if not run.exists() else new_run(folder / f"run-{node}-{seed}"),
            emit=self.events.append,
            cancel=self.cancel,
            clock=lambda: self.now,
            input_roots={"input": folder / "input"},
            metadata={},
            observed=self.observed,
        )


def test_generators_depend_on_seed_node_tick_name_and_index_alone(tmp_path: Path) -> None:
    def draw(
        node: str = "4",
        seed: int = 1,
        tick: int = 2,
        name: str = "noise",
        index: tuple[int, ...] = (0, 1),
    ) -> float:
        bench = Bench(tmp_path / f"{node}-{seed}-{tick}-{name}-{index}", node, seed)
        bench.context.enter(tick)
        bench.context.generator("other")
        return float(torch.rand((), generator=bench.context.generator(name, index)))

    (tmp_path / "again").mkdir()
    base = draw()
    bench = Bench(tmp_path / "again")
    bench.context.enter(2)
    assert float(torch.rand((), generator=bench.context.generator("noise", (0, 1)))) == base
    others = [
        draw(node="5"),
        draw(seed=2),
        draw(tick=3),
        draw(name="initial"),
        draw(index=(1, 0)),
        draw(index=()),
    ]
    assert len({base, *others}) == 7


def test_backward_is_that_of_the_weighted_sum(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    weights = torch.tensor([1.0, 2.0], requires_grad=True)
    upstream = torch.tensor([3.0, 5.0])
    bench.context.backward(weights * weights, upstream)
    bench.context.backward(weights * weights, upstream)
    assert weights.grad is not None
    assert weights.grad.tolist() == [12.0, 40.0]


def test_prepare_wraps_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    assert bench.context.prepare(module) is module
    assert bench.context.prepare(optimizer) is optimizer
    with bench.context.no_sync():
        assert bench.context.reduce(upstream := torch.ones(2)) is upstream


def test_progress_is_thinned_but_its_end_is_told_and_it_listens_for_cancel(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.context.enter(1)
    for done in range(1, 101):
        bench.now += 0.01
        bench.context.progress(done, 100)
    told = [event.value for event in bench.events if isinstance(event, Progress)]
    assert len(told) < 10
    assert told[-1] == 100
    bench.cancel.request()
    assert bench.context.cancelled()
    with pytest.raises(Cancelled):
        bench.context.progress(1, 100)
    with pytest.raises(Cancelled):
        bench.context.check_cancelled()


def test_metrics_and_files_carry_node_and_tick(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.context.enter(7)
    bench.context.metric("loss/policy", torch.tensor(0.5), "nats")  # type: ignore[arg-type]
    bench.context.artefact("export/a.txt").write_text("x")
    bench.context.artefact("export/never.txt")
    bench.context.report_artefacts()
    assert bench.events == [
        Metric(name="loss/policy", value=0.5, unit="nats", node="4", tick=7),
        Artefact(node="4", name="a.txt", kind="export", path="export/a.txt", tick=7),
    ]
    assert bench.observed.told


def test_previews_are_png_sheets(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.context.enter(3)
    images = torch.zeros(3, 3, 4, 5)
    images[1, 0] = 1.0
    bench.context.preview(images, "three")
    (event,) = bench.events
    assert isinstance(event, Artefact)
    assert (event.path, event.caption) == ("samples/tick-000003/4-1.png", "three")
    with Image.open(tmp_path / "run" / event.path) as sheet:
        assert sheet.size == (10, 8)
        assert sheet.getpixel((5, 0)) == (255, 0, 0)
        assert sheet.getpixel((0, 0)) == (0, 0, 0)


def test_files_are_found_in_named_folders_alone(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    path = bench.context.resolve("input", "more/prompts.txt")
    assert path.read_text() == "a"
    assert list(bench.observed.files) == [path]
    with pytest.raises(ValueError, match="Did you mean `input`"):
        bench.context.resolve("inputs", "more/prompts.txt")
    for name in ("../run/run.json", "/etc/passwd"):
        with pytest.raises(ValueError, match="leads out"):
            bench.context.resolve("input", name)
    with pytest.raises(FileNotFoundError, match=r"It holds `more/prompts.txt`"):
        bench.context.resolve("input", "prompts.txt")
