import json
from typing import Annotated

from app.graph import Field, Params, object_info, params
from app.graph.catalogue import INT_LIMIT, widget_options
from app.graph.widgets import param_specs


def test_entries_have_the_shape_that_front_ends_need(registry):
    info = object_info(registry)
    assert list(info) == sorted(spec.type for spec in registry)
    json.loads(json.dumps(info, allow_nan=False))
    for name, entry in info.items():
        assert entry["name"] == name
        assert entry["input_order"] == {kind: list(names) for kind, names in entry["input"].items()}
        assert len(entry["output"]) == len(entry["output_name"]) == len(entry["output_is_list"])
        assert len(entry["output"]) == len(entry["jagg"]["ticks"])
        assert entry["display_name"]
        assert entry["python_module"]


def test_ports_widgets_and_flags(registry):
    entry = object_info(registry)["Sampler"]
    assert entry["input"]["required"] == {
        "policy": ["POLICY", {}],
        "prompts": ["PROMPT_BATCH", {}],
        "steps": ["INT", {"default": 8, "min": 1, "max": 200, "step": 1}],
        "shift": ["FLOAT", {"default": 1.0, "min": 0.0, "max": 1e300, "step": 0.1, "round": False}],
        "noise_stop": ["INT", {"default": 4, "min": -INT_LIMIT, "max": INT_LIMIT, "step": 1}],
        "shared": ["BOOLEAN", {"default": False}],
    }
    assert entry["jagg"]["version"] == 2
    assert entry["jagg"]["params"]["shift"]["live"] is True
    assert entry["jagg"]["params"]["steps"]["unit"] == "steps"
    assert entry["jagg"]["accepts"]["shift"] == ["FLOAT", "INT"]
    optimizer = object_info(registry)["Optimizer"]
    assert optimizer["jagg"]["changes"] == ["policy"]
    assert optimizer["jagg"]["needs_every"] == ["reward"]
    assert optimizer["output_node"] is True
    assert optimizer["input"]["required"]["learning_rate"][1]["step"] == 1e-4
    assert object_info(registry)["Loader"]["input"]["required"]["train"][0] == [
        "full",
        "match",
        "lora",
    ]
    prompts = object_info(registry)["Prompts"]
    assert prompts["jagg"]["ticks"] == [True, False]
    assert prompts["input"]["required"]["text"][1] == {
        "default": "",
        "tooltip": "One per line.",
        "multiline": True,
    }
    assert object_info(registry)["Mix"]["input"]["optional"] == {"reward_2": ["REWARD", {}]}


def test_advanced_widgets_are_marked():
    @params
    class Hidden(Params):
        rate: Annotated[float, Field(advanced=True, step=0.5)] = 0.0

    (param,) = param_specs(Hidden)
    assert widget_options(param) == {
        "default": 0.0,
        "advanced": True,
        "min": -1e300,
        "max": 1e300,
        "step": 0.5,
        "round": False,
    }
