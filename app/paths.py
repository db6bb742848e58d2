"""Where the checkout keeps what runs and people make; independent of the current directory."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The directory that holds `app`, `nodes`, `jagg` and `launch.py`."""

RUNS = ROOT / "runs"
"""Run directories, unless a command names another place."""

CUSTOM_NODES = ROOT / "custom_nodes"
"""A user's own nodes, loaded by file."""

WORKFLOWS = ROOT / "workflows"
"""Shipped workflows."""

USER = ROOT / "user"
"""A user's own files; nodes reach them by the names in `INPUT_ROOTS`."""

INPUT_ROOTS = {"input": USER / "input", "models": USER / "models", "workflows": USER / "workflows"}
"""Folders in which a workflow may name files."""
