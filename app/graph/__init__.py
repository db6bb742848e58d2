"""The node SDK and the graph model: standard library only, imported in milliseconds.

A node author imports from here:

    from app.graph import Changes, Field, NeedsEvery, Node, Params, RunContext, Ticks, default_of, doc_of, params
"""

from app.graph.catalogue import object_info
from app.graph.compile import CompiledGraph, CompiledNode, compile_graph, problems_of
from app.graph.context import RunContext
from app.graph.errors import Cancelled, GraphError, NodeError, Problem, WorkflowError
from app.graph.model import Graph, GraphNode, Link
from app.graph.node import Migration, Node, NodeSpec, spec_of
from app.graph.ports import Changes, InputSpec, NeedsEvery, OutputSpec, Ticks, wire_name
from app.graph.rates import runs_on
from app.graph.registry import Registry, UnknownNodeError, load_registry
from app.graph.widgets import (
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

__all__ = [
    "Cancelled",
    "Changes",
    "CompiledGraph",
    "CompiledNode",
    "Field",
    "Graph",
    "GraphError",
    "GraphNode",
    "InputSpec",
    "Issue",
    "Link",
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
    "compile_graph",
    "default_of",
    "doc_of",
    "load_registry",
    "object_info",
    "params",
    "problems_of",
    "runs_on",
    "spec_of",
    "wire_name",
]
