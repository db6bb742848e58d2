"""The node SDK and the graph model: standard library only, imported in milliseconds.

A node author imports from here:

    from app.graph import Changes, Field, NeedsEvery, Node, Params, RunContext, Ticks, default_of, doc_of, params
"""

from app.graph.context import RunContext
from app.graph.errors import Cancelled, GraphError, NodeError, Problem, WorkflowError
from app.graph.node import Migration, Node, NodeSpec, spec_of
from app.graph.params import (
    Field,
    Issue,
    NoParams,
    Params,
    ParamsError,
    ParamSpec,
    build_params,
    default_of,
    doc_of,
    params,
)
from app.graph.ports import Changes, InputSpec, NeedsEvery, OutputSpec, Ticks, wire_name
from app.graph.registry import Registry, UnknownNodeError, load_registry

__all__ = [
    "Cancelled",
    "Changes",
    "Field",
    "GraphError",
    "InputSpec",
    "Issue",
    "Migration",
    "NeedsEvery",
    "NoParams",
    "Node",
    "NodeError",
    "NodeSpec",
    "OutputSpec",
    "ParamSpec",
    "Params",
    "ParamsError",
    "Problem",
    "Registry",
    "RunContext",
    "Ticks",
    "UnknownNodeError",
    "WorkflowError",
    "build_params",
    "default_of",
    "doc_of",
    "load_registry",
    "params",
    "spec_of",
    "wire_name",
]
