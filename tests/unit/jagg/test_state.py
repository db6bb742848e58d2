import json
import math

import pytest
import torch

from jagg.errors import JaggError
from jagg.randomness import generator
from jagg.state import load_state, save_state

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (2, 1, 4)])
def test_tensors_keep_dtype_shape_and_bits(tmp_path, dtype, shape):
    tensor = (torch.randn(shape, generator=generator(0, "state")) * 100).to(dtype)
    save_state(tmp_path / "x", {"t": tensor})
    loaded = load_state(tmp_path / "x")["t"]
    assert loaded.dtype == dtype
    assert torch.equal(loaded, tensor)
    assert loaded.shape == tensor.shape


def test_values_come_back_exactly(tmp_path):
    state = {
        "float": 0.1 + 0.2,
        "tiny": 5e-324,
        "big": 1.7976931348623157e308,
        "int": 2**63 + 1,
        "bool": True,
        "none": None,
        "text": 'größer / quoted " \n',
        "list": [1, 1.0, "1", [2, []]],
        "tuple": (1, (2.5,)),
        "empty": {},
        "nested": {"a": {"b/c": [torch.tensor([1.5]), {"d": torch.tensor(2)}]}},
        "inf": [math.inf, -math.inf],
        "negative zero": -0.0,
    }
    save_state(tmp_path / "tick-000001.v2", state)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "tick-000001.v2.json",
        "tick-000001.v2.safetensors",
    ]
    loaded = load_state(tmp_path / "tick-000001.v2")
    inner = loaded.pop("nested")["a"]["b/c"]
    state.pop("nested")
    assert loaded == state
    assert list(loaded) == list(state)
    assert type(loaded["list"][1]) is float
    assert type(loaded["bool"]) is bool
    assert type(loaded["tuple"]) is tuple
    assert math.copysign(1, loaded["negative zero"]) == -1
    assert inner[0].tolist() == [1.5]
    assert inner[1]["d"].shape == ()


def test_nan_keeps_its_place(tmp_path):
    save_state(tmp_path / "x", {"a": math.nan, "t": torch.tensor([math.nan, 1.0])})
    loaded = load_state(tmp_path / "x")
    assert math.isnan(loaded["a"])
    assert torch.isnan(loaded["t"]).tolist() == [True, False]
    json.loads((tmp_path / "x.json").read_text(), parse_constant=pytest.fail)


def test_a_generators_state_goes_on_where_it_was(tmp_path):
    source = generator(3, "g")
    torch.randn(7, generator=source)
    save_state(tmp_path / "g", {"rng": source.get_state()})
    expected = torch.randn(5, generator=source)
    fresh = torch.Generator()
    fresh.set_state(load_state(tmp_path / "g")["rng"])
    assert torch.equal(torch.randn(5, generator=fresh), expected)


def test_tensors_that_share_memory_or_are_strided_are_saved_whole(tmp_path):
    base = torch.arange(12.0).view(3, 4)
    save_state(tmp_path / "x", {"base": base, "same": base, "column": base[:, 1], "turned": base.T})
    loaded = load_state(tmp_path / "x")
    assert torch.equal(loaded["column"], base[:, 1])
    assert torch.equal(loaded["turned"], base.T)
    assert torch.equal(loaded["same"], base)


def test_places_that_would_share_a_name_stay_apart(tmp_path):
    one, two, three = torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])
    save_state(tmp_path / "x", {"a": {"b": one}, "a/b": two, "c/0": three, "c": [one]})
    loaded = load_state(tmp_path / "x")
    assert torch.equal(loaded["a"]["b"], one)
    assert torch.equal(loaded["a/b"], two)
    assert torch.equal(loaded["c/0"], three)
    assert torch.equal(loaded["c"][0], one)


def test_a_state_without_tensors(tmp_path):
    save_state(tmp_path / "x", {"a": 1})
    assert load_state(tmp_path / "x") == {"a": 1}


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": {"b": object()}}, "a/b"),
        ({1: 2}, "key 1"),
        ({"$tensor": 2}, "'\\$'"),
        ({"a": [b"x"]}, "bytes at a/0"),
    ],
)
def test_what_has_no_form_is_named_and_nothing_is_written(tmp_path, state, words):
    with pytest.raises(JaggError, match=words):
        save_state(tmp_path / "x", state)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_format_is_refused(tmp_path):
    save_state(tmp_path / "x", {"a": 1})
    (tmp_path / "x.json").write_text('{"format": 9, "state": {}}')
    with pytest.raises(JaggError, match="format 9"):
        load_state(tmp_path / "x")
