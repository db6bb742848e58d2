"""What a node gets to see of the run that it is part of."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class RunContext(Protocol):
    """The run as seen by one node at one tick; the worker fills it."""

    @property
    def device(self) -> "torch.device":
        """Where this rank computes."""

    @property
    def dtype(self) -> "torch.dtype":
        """The precision of the run's forwards."""

    @property
    def tick(self) -> int:
        """The current tick; 0 before training, and while the once-region runs."""

    @property
    def total_ticks(self) -> int:
        """The horizon of schedules: the ticks of the run when it was started."""

    @property
    def node(self) -> str:
        """Id of the node that runs."""

    def generator(self, name: str, index: tuple[int, ...] = ()) -> "torch.Generator":
        """A generator keyed by (run seed, node, tick, name, index).

        `index` is global, such as (prompt, member): rank, world size and micro-batch must never enter it.
        """

    def progress(self, value: int, maximum: int, text: str = "") -> None:
        """Report `value` of `maximum` units of this node's work done.

        Raises:
            Cancelled: the run was asked to stop.
        """

    def preview(self, images: "torch.Tensor", caption: str = "") -> None:
        """Show images in the card; shape (n, C, H, W), float in [0, 1]."""

    def metric(self, name: str, value: float, unit: str = "") -> None:
        """Record a number of this tick; names are listed in the README."""

    def artefact(self, relative: str) -> Path:
        """An absolute path in the run directory to write a file to; its folder exists."""

    def resolve(self, root: str, name: str) -> Path:
        """An existing file below one of the configured roots (`input`, `models`, ...).

        Raises:
            ValueError: the root is unknown, or the name leads out of it.
            FileNotFoundError: no such file; the message lists what is there.
        """

    def cancelled(self) -> bool:
        """Whether the run was asked to stop."""

    def check_cancelled(self) -> None:
        """Leave the node if the run was asked to stop.

        Raises:
            Cancelled: it was.
        """

    def prepare(self, value: Any) -> Any:
        """A module or optimizer made ready for the run's devices."""

    def backward(self, tensor: "torch.Tensor", gradient: "torch.Tensor | None" = None) -> None:
        """Accumulate gradients of (tensor · gradient).sum() into the parameters."""

    def no_sync(self) -> AbstractContextManager[None]:
        """A block in which gradients are not reduced over ranks."""

    def reduce(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """The tensor summed over ranks; itself where there is one."""

    def metadata(self) -> Mapping[str, str]:
        """`prompt` and `workflow` as JSON text, to embed in images and weights; empty where switched off."""
