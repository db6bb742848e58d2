"""The node classes as JSON, in the shape of ComfyUI's `/object_info` with a block `jagg` of our own."""

import math
from typing import Any, Final

from app.graph.node import NodeSpec
from app.graph.registry import Registry
from app.graph.widgets import ParamSpec

# A front-end that is told no range assumes 0..2048; these stand for "no limit": what JavaScript counts exactly, and
# a number that JSON readers of every kind hold.
INT_LIMIT: Final = 2**53 - 1
FLOAT_LIMIT: Final = 1e300


def object_info(registry: Registry) -> dict[str, dict[str, Any]]:
    """Every node class by type: the answer of `/object_info` and of `nodes --json`."""
    return {
        spec.type: node_info(spec, registry)
        for spec in sorted(registry, key=lambda spec: spec.type)
    }


def node_info(spec: NodeSpec, registry: Registry) -> dict[str, Any]:
    """One class in ComfyUI's shape; ports come before widgets, optional ports last."""
    table = registry.accept_table()
    required: dict[str, list[Any]] = {}
    optional: dict[str, list[Any]] = {}
    for port in spec.inputs:
        (required if port.required else optional)[port.name] = [
            port.wire,
            {"tooltip": port.tooltip} if port.tooltip else {},
        ]
    for param in spec.params:
        kind = list(param.field.choices) if param.wire == "COMBO" else param.wire
        required[param.name] = [kind, widget_options(param)]
    wires = {port.name: port.wire for port in spec.inputs} | {
        param.name: param.wire for param in spec.params
    }
    return {
        "input": {"required": required, "optional": optional, "hidden": {}},
        "input_order": {"required": list(required), "optional": list(optional), "hidden": []},
        "is_input_list": False,
        "output": [output.wire for output in spec.outputs],
        "output_is_list": [False for _ in spec.outputs],
        "output_name": [output.name for output in spec.outputs],
        "output_tooltips": [output.tooltip for output in spec.outputs],
        "name": spec.type,
        "display_name": spec.title,
        "description": spec.description,
        "python_module": spec.module,
        "category": spec.category,
        "output_node": spec.output,
        "has_intermediate_output": False,
        "deprecated": spec.deprecated,
        "experimental": spec.experimental,
        "search_aliases": list(spec.aliases),
        "jagg": {
            "version": spec.version,
            "ticks": [output.ticks for output in spec.outputs],
            "changes": [port.name for port in spec.inputs if port.changes],
            "needs_every": [port.name for port in spec.inputs if port.needs_every],
            "accepts": {name: sorted(table.get(wire, {wire})) for name, wire in wires.items()},
            "params": {param.name: _detail(param) for param in spec.params},
        },
    }


def widget_options(param: ParamSpec) -> dict[str, Any]:
    """The options of a widget under ComfyUI's names."""
    details = param.field
    options: dict[str, Any] = {"default": param.default}
    if details.tooltip:
        options["tooltip"] = details.tooltip
    if details.advanced:
        options["advanced"] = True
    if param.wire == "STRING" and details.multiline:
        options["multiline"] = True
    if param.wire == "INT":
        options["min"] = -INT_LIMIT if details.minimum is None else int(details.minimum)
        options["max"] = INT_LIMIT if details.maximum is None else int(details.maximum)
        options["step"] = int(details.step or 1)
    if param.wire == "FLOAT":
        options["min"] = -FLOAT_LIMIT if details.minimum is None else details.minimum
        options["max"] = FLOAT_LIMIT if details.maximum is None else details.maximum
        options["step"] = details.step or _step_for(float(param.default))
        options["round"] = False  # otherwise a front-end rounds a learning rate of 6e-4 to 0
    return options


def _detail(param: ParamSpec) -> dict[str, Any]:
    details = param.field
    return {
        "wire": param.wire,
        "default": param.default,
        "minimum": details.minimum,
        "maximum": details.maximum,
        "step": details.step,
        "unit": details.unit,
        "choices": list(details.choices),
        "tooltip": details.tooltip,
        "multiline": details.multiline,
        "advanced": details.advanced,
        "live": details.live,
    }


def _step_for(default: float) -> float:
    size = abs(default)
    return 0.01 if size == 0 or size >= 0.1 else float(10.0 ** math.floor(math.log10(size)))
