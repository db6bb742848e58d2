"""What nodes get to see of a run: the `RunContext` of the node SDK over Accelerate."""

import io
import math
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from app.graph.errors import quoted, suggestion
from app.storage.events import Artefact, Event, Metric, Progress
from app.storage.files import write_atomically
from app.storage.runs import RunDirectory
from app.worker.cache import Observed
from app.worker.settings import CancelToken, Clock, Precision
from jagg.randomness import generator

if TYPE_CHECKING:
    from app.graph.context import RunContext

# Progress is for eyes: more reports than this, in seconds between two, would only make the event file long.
_PROGRESS_INTERVAL = 0.25

_MOST_LISTED = 12
"""Files that an error about a missing one lists."""


def make_accelerator(*, cpu: bool, precision: Precision = "fp32") -> Accelerator:
    """The device and precision of this process; jagg itself accumulates gradients, so that is off here."""
    wanted = "no" if precision == "fp32" else precision
    known: dict[str, Any] = AcceleratorState._shared_state
    if known and known.get("_mixed_precision") != wanted:
        # Accelerate keeps one precision per process; a warm process may run one graph after another.
        AcceleratorState._reset_state()
    return Accelerator(cpu=cpu, mixed_precision=wanted, gradient_accumulation_steps=1)


class NodeContext:
    """The run as seen by one node; the scheduler moves `tick` on."""

    def __init__(
        self,
        *,
        node: str,
        seed: int,
        total_ticks: int,
        accelerator: Accelerator,
        run: RunDirectory,
        emit: Callable[[Event], None],
        cancel: CancelToken,
        clock: Clock,
        input_roots: Mapping[str, Path],
        metadata: Mapping[str, str],
        observed: Observed,
    ) -> None:
        """Bind a node to its run; what the node looks at and reports is noted in `observed`."""
        self._node = node
        self._seed = seed
        self._total_ticks = total_ticks
        self._accelerator = accelerator
        self._run = run
        self._send = emit
        self._cancel = cancel
        self._clock = clock
        self._input_roots = input_roots
        self._metadata = metadata
        self._observed = observed
        self._event_tick: int | None = None
        self._last_progress = -math.inf
        self._artefacts: dict[str, None] = {}
        self._previews = 0

    def enter(self, tick: int | None) -> None:
        """Begin a call of the node: at a tick, or at None in the once-region."""
        self._event_tick = tick
        self._last_progress = -math.inf
        self._artefacts = {}
        self._previews = 0

    def report_artefacts(self) -> None:
        """Emit an event for every file that the node asked a path for and then wrote."""
        for relative in self._artefacts:
            if (self._run.path / relative).is_file():
                path = Path(relative)
                self._emit(
                    Artefact(
                        node=self._node,
                        name=path.name,
                        kind=path.parts[0] if len(path.parts) > 1 else "file",
                        path=path.as_posix(),
                        tick=self._event_tick,
                    )
                )

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return torch.device(self._accelerator.device)

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the run's forwards; their results are float32 either way."""
        return torch.bfloat16 if self._accelerator.mixed_precision == "bf16" else torch.float32

    @property
    def tick(self) -> int:
        """The current tick; 0 before training and in the once-region."""
        return self._event_tick or 0

    @property
    def total_ticks(self) -> int:
        """The horizon of schedules."""
        self._observed.run["total_ticks"] = self._total_ticks
        return self._total_ticks

    @property
    def node(self) -> str:
        """Id of the node."""
        return self._node

    def generator(self, name: str, index: tuple[int, ...] = ()) -> torch.Generator:
        """A generator on the CPU, so that a run draws the same numbers on every device."""
        self._observed.run |= {"seed": self._seed, "node": self._node}
        return generator(self._seed, self._node, self.tick, name, *index)

    def progress(self, value: int, maximum: int, text: str = "") -> None:
        """Report work done; the last piece is always reported, the others a few times a second.

        Raises:
            Cancelled: the run was asked to stop.
        """
        self._cancel.check()
        now = self._clock()
        if value >= maximum or now - self._last_progress >= _PROGRESS_INTERVAL:
            self._last_progress = now
            self._emit(
                Progress(
                    node=self._node,
                    value=value,
                    total=maximum,
                    text=text or None,
                    tick=self._event_tick,
                )
            )

    def preview(self, images: Tensor, caption: str = "") -> None:
        """Show images in the card; shape (n, C, H, W), float in [0, 1].

        Written to `samples/tick-000010/<node>-<number within the call>.png`.
        """
        self._previews += 1
        name = f"{re.sub(r'[^A-Za-z0-9_-]', '_', self._node)}-{self._previews}.png"
        relative = f"samples/tick-{self.tick:06d}/{name}"
        write_atomically(self._run.file(relative), _png_sheet(images))
        self._emit(
            Artefact(
                node=self._node,
                name=name,
                kind="samples",
                path=relative,
                caption=caption or None,
                tick=self._event_tick,
            )
        )

    def metric(self, name: str, value: float, unit: str = "") -> None:
        """Record a number of this tick."""
        self._emit(
            Metric(
                name=name,
                value=float(value),
                unit=unit or None,
                node=self._node,
                tick=self._event_tick,
            )
        )

    def artefact(self, relative: str) -> Path:
        """An absolute path in the run directory; its folder exists. An event follows when the node returns.

        Raises:
            StorageError: the path leads out of the run directory.
        """
        self._observed.told = True
        path = self._run.file(relative)
        self._artefacts[path.relative_to(self._run.path.resolve()).as_posix()] = None
        return path

    def resolve(self, root: str, name: str) -> Path:
        """An existing file below one of the configured roots.

        Raises:
            ValueError: the root is unknown, or the name leads out of it.
            FileNotFoundError: no such file.
        """
        if root not in self._input_roots:
            msg = f"No folder is called `{root}`. Folders are {quoted(self._input_roots)}.{suggestion(root, self._input_roots)}"
            raise ValueError(msg)
        folder = self._input_roots[root].resolve()
        path = (folder / name).resolve()
        if not path.is_relative_to(folder):
            msg = f"{name!r} leads out of the folder `{root}` ({folder}). Name a file inside it."
            raise ValueError(msg)
        if not path.exists():
            there = sorted(
                entry.relative_to(folder).as_posix()
                for entry in folder.rglob("*")
                if entry.is_file()
            )
            listed = quoted(there[:_MOST_LISTED]) if there else "nothing"
            msg = f"The folder `{root}` ({folder}) has no {name!r}. It holds {listed}.{suggestion(name, there)}"
            raise FileNotFoundError(msg)
        self._observed.read(path)
        return path

    def cancelled(self) -> bool:
        """Whether the run was asked to stop."""
        return self._cancel.requested

    def check_cancelled(self) -> None:
        """Leave the node if the run was asked to stop.

        Raises:
            Cancelled: it was.
        """
        self._cancel.check()

    def prepare(self, value: Any) -> Any:
        """A module moved to the device, never wrapped for data parallelism; anything else unchanged.

        A DDP wrapper gives wrong gradients when several forwards are kept before their backwards.
        """
        if isinstance(value, nn.Module):
            return self._accelerator.prepare_model(value, evaluation_mode=True)
        return value

    def backward(self, tensor: Tensor, gradient: Tensor | None = None) -> None:
        """Accumulate gradients of (tensor · gradient).sum() into the parameters."""
        scalar = tensor.sum() if gradient is None else (tensor * gradient).sum()
        self._accelerator.backward(scalar)

    def no_sync(self) -> AbstractContextManager[None]:
        """A block in which gradients are not reduced: nothing to do, since `reduce` alone reduces."""
        return nullcontext()

    def reduce(self, tensor: Tensor) -> Tensor:
        """The tensor summed over ranks; itself where there is one."""
        if self._accelerator.num_processes == 1:
            return tensor
        reduced: Tensor = self._accelerator.reduce(tensor, reduction="sum")
        return reduced

    def metadata(self) -> Mapping[str, str]:
        """`prompt` and `workflow` as JSON text; empty where embedding is switched off."""
        self._observed.told = True
        return self._metadata

    def _emit(self, event: Event) -> None:
        if not isinstance(event, Progress):
            self._observed.told = True
        self._send(event)


def _png_sheet(images: Tensor) -> bytes:
    """Images (n, C, H, W) side by side, in rows as square as they go, as a PNG."""
    from PIL import Image

    pixels = images.detach().float().cpu().clamp(0, 1).mul(255).round().to(torch.uint8)
    count, channels, height, width = pixels.shape
    per_row = math.ceil(math.sqrt(count))
    rows = math.ceil(count / per_row)
    mode = {1: "L", 3: "RGB", 4: "RGBA"}[channels]
    sheet = Image.new(mode, (per_row * width, rows * height))
    for index, image in enumerate(pixels):
        array = (
            image.permute(1, 2, 0).squeeze(-1).numpy()
            if channels == 1
            else image.permute(1, 2, 0).numpy()
        )
        place = (index % per_row * width, index // per_row * height)
        sheet.paste(Image.fromarray(array, mode=mode), place)
    file = io.BytesIO()
    sheet.save(file, format="PNG")
    return file.getvalue()


def _conforms(context: NodeContext) -> "RunContext":
    """Let the type checker say when the protocol and this class part ways."""
    return context
