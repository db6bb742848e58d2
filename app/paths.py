"""Where the checkout keeps what runs and people make; independent of the current directory."""

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
"""The directory that holds `app`, `nodes`, `jagg` and `launch.py`."""

RUNS = CHECKOUT / "runs"
"""Run directories, unless a command names another place."""

CUSTOM_NODES = CHECKOUT / "custom_nodes"
"""A user's own nodes, loaded by file."""

WORKFLOWS = CHECKOUT / "workflows"
"""Shipped workflows."""

USER = CHECKOUT / "user"
"""A user's own files; nodes reach them by the names in `INPUT_ROOTS`."""

INPUT_ROOTS = {"input": USER / "input", "models": USER / "models", "workflows": USER / "workflows"}
"""Folders in which a workflow may name files."""
