"""Errors of the graph room, and how they word names that do not exist."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing that keeps a graph from running, or is worth saying about it."""

    code: str
    """A stable word for programs; where the ComfyUI protocol has one for the case, it is that one."""
    node: str | None
    """Id of the node, or None where the graph as a whole is meant."""
    title: str
    """Title of the node, or an empty string."""
    field: str | None
    """Name of the input, or None where the whole node is meant."""
    message: str
    """One complete sentence for a person."""


class GraphError(ValueError):
    """A graph cannot run; `problems` holds every reason."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(problem.message for problem in self.problems))


class WorkflowError(ValueError):
    """A file or text is not a workflow that can be read."""


class NodeError(TypeError):
    """A node class breaks the rules of the SDK; the message is for its author."""


class Cancelled(Exception):  # noqa: N818  it is no error: the user asked for it
    """The run was asked to stop; nodes let it pass."""


def quoted(names: Iterable[str]) -> str:
    """Names in backticks, separated by commas."""
    return ", ".join(f"`{name}`" for name in names)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` most likely was meant to be, or None."""
    folded = {candidate.casefold(): candidate for candidate in known}
    close = get_close_matches(name.casefold(), list(folded), n=1, cutoff=0.6)
    return folded[close[0]] if close else None


def suggestion(name: str, known: Iterable[str]) -> str:
    """The tail of a sentence about an unknown name: the nearest valid one, or nothing; starts with a space."""
    close = nearest(name, known)
    return f" Did you mean `{close}`?" if close else ""
