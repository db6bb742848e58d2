"""The commands of JAGG Studio; imported without torch."""

from app.cli.commands import main

__all__ = ["main"]
