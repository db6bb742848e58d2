"""The node SDK and the graph model: standard library only, imported in milliseconds.

A node author imports from here:

    from app.graph import Changes, Field, NeedsEvery, Node, Params, RunContext, Ticks, default_of, doc_of, params
"""

from app.graph.catalogue import object_info
from app.graph.compile import CompiledGraph, CompiledNode, compile_graph, problems_of
from app.graph.context import RunContext
from app.graph.edit import SetError, set_source_value, set_value, split_assignment
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
from app.graph.workflow import Workflow, parse_workflow, read_workflow, workflow_of
from app.graph.write import save_ui, to_api, to_ui

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
    "SetError",
    "Ticks",
    "UnknownNodeError",
    "Workflow",
    "WorkflowError",
    "build_params",
    "compile_graph",
    "default_of",
    "doc_of",
    "load_registry",
    "object_info",
    "params",
    "parse_workflow",
    "problems_of",
    "read_workflow",
    "runs_on",
    "save_ui",
    "set_source_value",
    "set_value",
    "spec_of",
    "split_assignment",
    "to_api",
    "to_ui",
    "wire_name",
    "workflow_of",
]
