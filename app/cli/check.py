"""`validate`, `nodes` and `convert`: what can be said of workflows and nodes without running anything."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from app.cli.graphs import add_custom_nodes, check_readable, nodes_for, read
from app.cli.output import EXIT_INVALID, EXIT_OK, answer, complain, tell
from app.graph.catalogue import object_info
from app.graph.compile import problems_of
from app.graph.errors import WorkflowError
from app.graph.write import to_api


def add_commands(commands: Any) -> None:
    """Declare the three commands."""
    validate = commands.add_parser("validate", help="list every problem of workflows")
    validate.add_argument("files", nargs="+", type=Path, metavar="FILE")
    validate.add_argument(
        "--json", action="store_true", help="print the problems as one JSON object"
    )
    add_custom_nodes(validate)
    validate.set_defaults(command=_validate)
    nodes = commands.add_parser("nodes", help="list the installed nodes")
    nodes.add_argument("--json", action="store_true", help="print the catalogue (/object_info)")
    add_custom_nodes(nodes)
    nodes.set_defaults(command=_nodes)
    convert = commands.add_parser("convert", help="print a workflow as API JSON")
    convert.add_argument("file", type=Path, metavar="FILE")
    add_custom_nodes(convert)
    convert.set_defaults(command=_convert)


def _validate(options: argparse.Namespace) -> int:
    tell(f"Validating {', '.join(str(file) for file in options.files)}")
    registry = nodes_for(options)
    found: dict[str, list[dict[str, Any]]] = {}
    for file in options.files:
        try:
            workflow = read(file, registry)
            problems = [asdict(problem) for problem in problems_of(workflow.graph, registry)]
        except WorkflowError as error:
            problems = [
                {
                    "code": "unreadable",
                    "node": None,
                    "title": "",
                    "field": None,
                    "message": str(error),
                }
            ]
        found[str(file)] = problems
        if problems:
            complain(*(f"{file}: {problem['message']}" for problem in problems))
        else:
            tell(f"{file}: valid")
    if options.json:
        answer(json.dumps(found, ensure_ascii=False))
    return EXIT_INVALID if any(found.values()) else EXIT_OK


def _nodes(options: argparse.Namespace) -> int:
    tell("Loading nodes ...")
    registry = nodes_for(options)
    if options.json:
        answer(json.dumps(object_info(registry), ensure_ascii=False))
    else:
        specs = sorted(registry, key=lambda spec: (spec.category, spec.type))
        answer("\n".join(f"{spec.category:14} {spec.type:22} {spec.description}" for spec in specs))
    return EXIT_OK


def _convert(options: argparse.Namespace) -> int:
    tell(f"Converting {options.file}")
    try:
        check_readable(options.file)
        registry = nodes_for(options)
        workflow = read(options.file, registry)
    except WorkflowError as error:
        return complain(str(error))
    if workflow.graph.problems:
        return complain(*(problem.message for problem in workflow.graph.problems))
    answer(json.dumps(to_api(workflow.graph, registry), indent=2, ensure_ascii=False))
    return EXIT_OK
