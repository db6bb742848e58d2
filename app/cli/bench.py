"""`bench NAME`: benchmarks, each a module of this package that is imported only when it is asked for.

Such a module has `add_arguments(parser)`, `run(options) -> dict` (JSON values) and, to be readable without `--json`,
`table(report) -> str`.
"""

import argparse
import importlib
import json
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Final

from app.cli.output import EXIT_OK, answer, complain, tell

BENCHMARKS: Final[Mapping[str, str]] = {
    "jagg": "app.cli.bench_jagg",
    "quickstart": "app.cli.bench_quickstart",
}
"""Module of each benchmark."""

NOT_THERE_YET: Final = ("tick", "scaling", "server", "editor")
"""Names that are promised and not written yet."""


def command(arguments: Sequence[str]) -> int:
    """Run a benchmark with the arguments after `bench`; the exit code."""
    name = arguments[0] if arguments else ""
    if name in NOT_THERE_YET:
        return complain(f"bench {name}: this benchmark is not there yet.")
    if name in ("-h", "--help"):
        tell(
            f"usage: launch.py bench NAME [--json] [options]. Benchmarks are {', '.join(BENCHMARKS)}; bench NAME --help lists the options."
        )
        return EXIT_OK
    module = _find(name)
    if module is None:
        known = ", ".join(BENCHMARKS)
        return complain(f"bench: no benchmark is called {name!r}. Benchmarks are {known}.")
    parser = argparse.ArgumentParser(
        prog=f"launch.py bench {name}", description=(module.__doc__ or "").strip()
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    module.add_arguments(parser)
    options = parser.parse_args(list(arguments[1:]))
    report = module.run(options)
    as_table = getattr(module, "table", None)
    answer(json.dumps(report) if options.json or as_table is None else as_table(report))
    return EXIT_OK


def _find(name: str) -> ModuleType | None:
    path = BENCHMARKS.get(name)
    if path is None:
        return None
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
        return None
