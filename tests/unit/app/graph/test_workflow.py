import json
import struct
import zlib

import pytest

from app.graph import (
    Graph,
    GraphNode,
    Link,
    WorkflowError,
    parse_workflow,
    problems_of,
    read_workflow,
    save_ui,
    to_api,
    to_ui,
    workflow_of,
)
from app.graph.workflow import LARGEST_TEXT


def ui(nodes, links=(), **more):
    return {"nodes": nodes, "links": list(links), "version": 0.4, **more}


def sampler(**more):
    return {"id": 3, "type": "Sampler", "widgets_values_named": {"steps": 9}, **more}


TEXTS = [
    ("", "w is empty, expected workflow JSON."),
    (" \n", "w is empty, expected workflow JSON."),
    ('{\n  "nodes": [,]\n}', "w is no valid JSON: line 2, column 13: Expecting value."),
    ("[1]", "w holds a list, expected a JSON object with a workflow."),
    ("null", "w holds null, expected a JSON object with a workflow."),
    ("true", "w holds true or false, expected a JSON object with a workflow."),
    ("3", "w holds a number, expected a JSON object with a workflow."),
    ('"x"', "w holds a text, expected a JSON object with a workflow."),
    (
        "{}",
        "w is an empty object, expected a workflow: `nodes` (UI format), or nodes by id (API format).",
    ),
    (
        '{"a": 1}',
        "w is no workflow: it has no `nodes` (UI format), and `a` is not a node with `class_type` and `inputs` "
        "(API format).",
    ),
    (
        '{"1": {"inputs": {}, "_meta": {"title": "Foo"}}}',
        "w: node 1 (Foo) has no `class_type`; its node type was not installed where the file was made.",
    ),
    (
        '{"1": {"class_type": "X", "inputs": []}}',
        "w: node 1: `inputs` holds a list, expected an object.",
    ),
    (
        '{"1": {"class_type": "X", "_meta": {"jagg_version": "2"}}}',
        "w: node 1: `_meta.jagg_version` is '2', expected an integer.",
    ),
    ('{"nodes": 3}', "w: `nodes` is a int, expected a list."),
    ('{"nodes": null}', "w: `nodes` is missing, expected a list."),
    ('{"nodes": [5]}', "w: node number 1 of `nodes` is a int, expected an object."),
    (
        '{"nodes": [{"type": "X"}]}',
        "w: node number 1 of `nodes`: `id` is None, expected an integer or a text.",
    ),
    (
        '{"nodes": [{"id": true, "type": "X"}]}',
        "w: node number 1 of `nodes`: `id` is True, expected an integer or a text.",
    ),
    (
        '{"nodes": [{"id": 1}]}',
        "w: node number 1 of `nodes` (id 1): `type` is None, expected the name of a node type.",
    ),
    (
        '{"nodes": [{"id": 1, "type": "X"}, {"id": "1", "type": "X"}]}',
        "w: two nodes have the id 1.",
    ),
    (
        '{"nodes": [{"id": 1, "type": "X", "properties": {"jagg_version": 1.5}}]}',
        "w: node number 1 of `nodes` (id 1): `properties.jagg_version` is 1.5, expected an integer.",
    ),
    (
        '{"nodes": [{"id": 1, "type": "X", "mode": "muted"}]}',
        "w: node number 1 of `nodes` (id 1): `mode` is 'muted', expected 0 (runs), 2 (muted) or 4 (bypassed).",
    ),
    (
        '{"nodes": [{"id": 1, "type": "X", "mode": 7}]}',
        "w: node number 1 of `nodes` (id 1): `mode` is 7, expected 0 (runs), 2 (muted) or 4 (bypassed).",
    ),
    (
        '{"nodes": [{"id": 1, "type": "X", "widgets_values": 3}]}',
        "w: node number 1 of `nodes` (id 1): `widgets_values` is int, expected a list or an object.",
    ),
    (
        '{"nodes": [{"id": 1, "type": "X", "inputs": [{"link": 1}]}]}',
        "w: node number 1 of `nodes` (id 1): input number 1: `name` is None, expected a text.",
    ),
    (
        '{"nodes": [], "links": [[1, 2]]}',
        "w: link number 1 of `links`: it has 2 entries, expected 6.",
    ),
    (
        '{"nodes": [], "links": [[1, 2, "x", 3, 0]]}',
        "w: link number 1 of `links`: the slot that it starts at is 'x', expected an integer.",
    ),
    (
        '{"nodes": [], "extra": {"jagg": 3}}',
        "w: the run settings `jagg` hold a number, expected an object.",
    ),
    (
        '{"nodes": ' + "[" * 101 + "]" * 101 + "}",
        "w is nested more than 100 levels deep; that is no workflow.",
    ),
    (
        "[" * 200_000,
        "w cannot be read as JSON: it is nested too deeply, or holds a number that is too long.",
    ),
    (
        "9" * 5000,
        "w cannot be read as JSON: it is nested too deeply, or holds a number that is too long.",
    ),
    (" " * (LARGEST_TEXT + 1), "w is larger than 32 MiB; that is no workflow."),
]


@pytest.mark.parametrize(("text", "message"), TEXTS, ids=range(len(TEXTS)))
def test_what_is_no_workflow_is_said_clearly(registry, text, message):
    with pytest.raises(WorkflowError) as caught:
        parse_workflow(text, registry, name="w")
    assert str(caught.value) == message


def test_files_that_are_none(tmp_path, registry):
    with pytest.raises(WorkflowError, match=r"There is no file .*gone\.json"):
        read_workflow(tmp_path / "gone.json", registry)
    with pytest.raises(WorkflowError, match=r"is a folder, expected a workflow file"):
        read_workflow(tmp_path, registry)
    binary = tmp_path / "x.json"
    binary.write_bytes(b"ab\xff")
    with pytest.raises(WorkflowError, match=r"x.json is no text in UTF-8 \(byte 2\)"):
        read_workflow(binary, registry)
    with binary.open("wb") as file:
        file.truncate(LARGEST_TEXT + 1)
    with pytest.raises(WorkflowError, match="larger than 32 MiB"):
        read_workflow(binary, registry)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(WorkflowError, match="loop cannot be read: "):
        read_workflow(tmp_path / "loop", registry)


def test_a_byte_order_mark_is_no_harm(tmp_path, registry, training):
    file = tmp_path / "w.json"
    file.write_text(json.dumps(to_api(training, registry)), encoding="utf-8-sig")
    assert len(read_workflow(file, registry).graph.nodes) == 6


def test_api_links_values_and_versions(registry):
    read = workflow_of(
        {
            "3": {
                "class_type": "Sampler",
                "inputs": {
                    "policy": ["2", 0],
                    "prompts": [1, 0],
                    "count": 9,
                    "list": {"__value__": ["2", 0]},
                    "pair": [7, 8],
                    "other": {"__value__": 3},
                },
                "_meta": {"title": "Mine", "jagg_version": 1},
            },
            "1": {"class_type": "Prompts"},
        },
        registry,
    )
    assert read.kind == "api"
    node = read.graph.nodes["3"]
    assert (node.title, node.version) == ("Mine", 2)
    assert node.inputs == {
        "policy": Link("2", 0),
        "prompts": Link("1", 0),
        "steps": 9,  # was called `count` in version 1
        "list": ["2", 0],
        "pair": [7, 8],
        "other": {"__value__": 3},
    }


def test_the_body_of_a_request_is_a_workflow_too(registry, training):
    body = {
        "prompt": to_api(training, registry),
        "extra_data": {"jagg": {"device": "cpu"}},
        "client_id": "x",
    }
    read = workflow_of(body, registry)
    assert read.settings == {"device": "cpu"}
    assert list(read.graph.nodes) == list(training.nodes)
    assert workflow_of({"prompt": body["prompt"], "extra_data": None}, registry).settings == {}


def test_run_settings_of_a_drawing(registry):
    assert workflow_of(ui([], extra={"jagg": {"name": "x"}}), registry).settings == {"name": "x"}


def test_named_values_win_and_a_disagreement_is_said(registry):
    node = sampler(
        widgets_values=[8, 1, 4, True],
        widgets_values_named={"steps": 9, "shift": 1.0, "noise_stop": 4, "shared": 1},
    )
    read = workflow_of(ui([node]), registry)
    assert read.graph.nodes["3"].inputs == {"steps": 9, "shift": 1.0, "noise_stop": 4, "shared": 1}
    assert [warning.message for warning in read.warnings] == [
        "Sampler (3): `steps` is 9 (INT) by name, but 8 (INT) by position; the value by name is used.",
        "Sampler (3): `shared` is 1 (INT) by name, but True (BOOLEAN) by position; the value by name is used.",
    ]
    assert read.warnings[0].field == "steps"


@pytest.mark.parametrize(
    ("row", "values", "warning"),
    [
        ([5, 3, "a"], {"iterations": 5, "seed": 3, "text": "a"}, None),
        ([5, 3, "fixed", "a"], {"iterations": 5, "seed": 3, "text": "a"}, None),
        ([5, 3, "fixed"], {"iterations": 5, "seed": 3, "text": "fixed"}, None),
        ([5, 3, "fixed", "fixed"], {"iterations": 5, "seed": 3, "text": "fixed"}, None),
        (
            [5],
            {"iterations": 5},
            "Prompts (1): 1 values are stored for 3 widgets; `seed`, `text` keep their defaults.",
        ),
        (
            [5, 3, "a", 7, None],
            {"iterations": 5, "seed": 3, "text": "a"},
            "Prompts (1): 5 values are stored for 3 widgets; not used: 7 (INT), None (null).",
        ),
        ({"iterations": 5, "control_after_generate": "fixed"}, {"iterations": 5}, None),
    ],
)
def test_values_by_position(registry, row, values, warning):
    read = workflow_of(ui([{"id": 1, "type": "Prompts", "widgets_values": row}]), registry)
    assert read.graph.nodes["1"].inputs == values
    assert [problem.message for problem in read.warnings] == ([warning] if warning else [])


def test_old_versions_are_migrated_and_broken_ones_said(registry):
    node = sampler(properties={"jagg_version": 1}, widgets_values_named={"count": 7})
    read = workflow_of(ui([node]), registry)
    assert read.graph.nodes["3"].inputs == {"steps": 7}
    node["properties"]["jagg_version"] = 0
    with pytest.raises(
        WorkflowError, match="written by version 0 of Sampler, which cannot be brought to version 2"
    ):
        workflow_of(ui([node]), registry)
    node["properties"]["jagg_version"] = 3
    (problem, *_) = problems_of(workflow_of(ui([node]), registry).graph, registry)
    assert problem.code == "newer_node_version"


def test_a_migration_that_fails_is_said(registry, monkeypatch):
    cls = registry.get("Sampler").cls
    monkeypatch.setattr(cls, "migrations", {1: lambda values: values["gone"]})
    node = sampler(properties={"jagg_version": 1})
    with pytest.raises(WorkflowError, match=r"from version 1 to 2 failed: KeyError: 'gone'"):
        workflow_of(ui([node]), registry)


def test_odd_but_valid_drawings_are_read(registry):
    document = {
        "nodes": [
            {
                "id": "3",
                "type": "Sampler",
                "title": None,
                "mode": None,
                "pos": {"0": 1, "1": 2},
                "inputs": [
                    {"name": "policy", "type": 0, "link": 7},
                    {"name": "steps", "type": ["a"], "link": None, "widget": {}},
                ],
                "outputs": None,
                "properties": None,
            },
            {"id": 2, "type": "Loader", "outputs": [{"name": "policy"}]},
        ],
        "links": [None, [7, 2, "0", 3, 0, "POLICY"]],
    }
    assert workflow_of(document, registry).graph.nodes["3"].inputs == {"policy": Link("2", 0)}


def _chunk(kind, body):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def _png(*chunks):
    return (
        b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", b"\0" * 13) + b"".join(chunks) + _chunk(b"IEND", b"")
    )


def test_images_carry_workflows(tmp_path, registry, training):
    file = tmp_path / "x.png"
    text = json.dumps(to_api(training, registry)).encode()
    drawn = json.dumps(to_ui(training, registry)).encode()
    for chunk in (
        _chunk(b"tEXt", b"prompt\0" + text),
        _chunk(b"zTXt", b"prompt\0\0" + zlib.compress(text)),
        _chunk(b"iTXt", b"prompt\0\0\0en\0prompt\0" + text),
        _chunk(b"iTXt", b"prompt\0\1\0\0\0" + zlib.compress(text)),
    ):
        file.write_bytes(_png(chunk))
        read = read_workflow(file, registry)
        assert read.kind == "api"
        assert list(read.graph.nodes) == list(training.nodes)
    file.write_bytes(
        _png(_chunk(b"tEXt", b"prompt\0" + text), _chunk(b"tEXt", b"workflow\0" + drawn))
    )
    assert read_workflow(file, registry).kind == "ui"
    file.write_bytes(_png()[:-12])
    with pytest.raises(WorkflowError, match=r"x.png carries no workflow"):
        read_workflow(file, registry)
    file.write_bytes(_png(_chunk(b"zTXt", b"prompt\0\0nonsense")))
    with pytest.raises(WorkflowError, match="cannot be read"):
        read_workflow(file, registry)
    file.write_bytes(_png(_chunk(b"zTXt", b"prompt\0\0" + zlib.compress(b"0" * (2**25 + 1)))))
    with pytest.raises(WorkflowError, match="unpacks to more than 32 MiB"):
        read_workflow(file, registry)
    file.write_bytes(_png()[:-12] + struct.pack(">I", 2**31) + b"tEXt")
    with pytest.raises(WorkflowError, match="the file is damaged"):
        read_workflow(file, registry)


def test_weights_carry_workflows(tmp_path, registry, training):
    file = tmp_path / "x.safetensors"

    def write(header):
        file.write_bytes(struct.pack("<Q", len(header)) + header)

    write(
        json.dumps({"__metadata__": {"workflow": json.dumps(to_ui(training, registry))}}).encode()
    )
    assert len(read_workflow(file, registry).graph.nodes) == 6
    write(b'{"x": 1}')
    with pytest.raises(WorkflowError, match="carries no workflow"):
        read_workflow(file, registry)
    write(b'{"x": ')
    with pytest.raises(WorkflowError, match="header of the safetensors file cannot be read"):
        read_workflow(file, registry)
    file.write_bytes(struct.pack("<Q", 2**40) + b"{")
    with pytest.raises(WorkflowError, match="header of the safetensors file cannot be read"):
        read_workflow(file, registry)


def test_saving_keeps_what_it_does_not_know(registry):
    unknown = {
        "id": 9,
        "type": "SomeonesNode",
        "pos": {"0": 1, "1": 2},
        "widgets_values": [1, {"deep": [None, "x"]}],
        "properties": {"cnr_id": "pack", "ver": "1.2"},
        "mystery": {"a": [1]},
    }
    document = ui(
        [unknown, sampler(color="#222", widgets_values=[8, 1.0, 4, False])],
        groups=[{"title": "g"}],
        extra={"ds": {"scale": 2}},
        floatingLinks=[],
        custom=1,
    )
    before = json.loads(json.dumps(document))
    saved = save_ui(workflow_of(document, registry), registry)
    assert document == before
    assert saved["nodes"][0] == unknown
    assert {key: saved[key] for key in ("groups", "extra", "floatingLinks", "custom")} == {
        key: document[key] for key in ("groups", "extra", "floatingLinks", "custom")
    }
    assert saved["nodes"][1]["widgets_values"] == [9, 1.0, 4, False]
    assert saved["nodes"][1]["widgets_values_named"] == {
        "steps": 9,
        "shift": 1.0,
        "noise_stop": 4,
        "shared": False,
    }
    assert saved["nodes"][1]["properties"] == {"jagg_version": 2}
    assert saved["nodes"][1]["color"] == "#222"
    assert save_ui(workflow_of(saved, registry), registry) == saved


def test_saving_migrates_names_of_inputs_too(registry):
    node = sampler(
        properties={"jagg_version": 1},
        widgets_values_named={"count": 7, "extra": 1},
        inputs=[{"name": "count", "type": "INT", "link": 1, "widget": {"name": "count"}}],
    )
    other = {"id": 1, "type": "Later", "properties": {"jagg_version": 9}}
    newer = sampler(id=4, properties={"jagg_version": 9})
    saved = save_ui(workflow_of(ui([node, other, newer]), registry), registry)
    assert saved["nodes"][0]["inputs"][0] == {
        "name": "steps",
        "type": "INT",
        "link": 1,
        "widget": {"name": "steps"},
    }
    assert saved["nodes"][0]["widgets_values_named"]["extra"] == 1
    assert saved["nodes"][2] == newer


def test_version_1_is_read_and_saved_as_0_4(registry, training):
    drawn = to_ui(training, registry)
    links = [
        {
            "id": row[0],
            "origin_id": row[1],
            "origin_slot": row[2],
            "target_id": row[3],
            "target_slot": row[4],
            "type": row[5],
        }
        for row in drawn["links"]
    ]
    links[0]["parentId"] = 5
    document = {
        "version": 1,
        "state": {"lastNodeId": 6, "lastLinkId": len(links)},
        "nodes": drawn["nodes"],
        "links": links,
        "reroutes": [{"id": 5, "pos": [1, 2], "linkIds": [1]}],
    }
    read = workflow_of(document, registry)
    assert problems_of(read.graph, registry) == ()
    saved = save_ui(read, registry)
    assert saved["version"] == 0.4
    assert saved["links"] == drawn["links"]
    assert (saved["last_node_id"], saved["last_link_id"]) == (6, len(links))
    assert saved["extra"]["reroutes"] == document["reroutes"]
    assert saved["extra"]["linkExtensions"] == [{"id": 1, "parentId": 5}]
    assert "state" not in saved
    del document["state"], document["reroutes"], links[0]["parentId"]
    assert save_ui(workflow_of(document, registry), registry)["last_node_id"] == 6


def test_api_json_is_saved_as_a_drawing(registry, training):
    read = workflow_of(to_api(training, registry), registry)
    assert problems_of(workflow_of(save_ui(read, registry), registry).graph, registry) == ()


def test_both_formats_round_trip(registry, training):
    graph = training.with_node(
        GraphNode(
            id="a:b",
            type="SomeonesNode",
            title="Odd",
            version=4,
            inputs={"list": [1, 2], "in": Link("3", 0), "x": None},
        )
    )
    graph = graph.with_node(
        GraphNode(
            id="007",
            type="Note Down",
            inputs={"value": Link("a:b", 2), "scale": Link("4", 1), "no": 1},
        )
    )
    for text in (json.dumps(to_api(graph, registry)), json.dumps(to_ui(graph, registry, {"a": 1}))):
        read = parse_workflow(text, registry)
        assert read.warnings == ()
        again = read.graph
        assert list(again.nodes) == list(graph.nodes)
        for key, node in graph.nodes.items():
            assert again.nodes[key].type == node.type
            assert again.nodes[key].links() == node.links()
            assert node.values().items() <= again.nodes[key].values().items()
        assert again.nodes["a:b"].version == 4
    assert workflow_of(to_ui(graph, registry, {"a": 1}), registry).settings == {"a": 1}


def test_cards_lie_to_the_right_of_what_they_read_and_do_not_overlap(registry, training):
    drawn = to_ui(training, registry)
    boxes = {card["id"]: (*card["pos"], *card["size"]) for card in drawn["nodes"]}
    for _, source, _, target, _, _ in drawn["links"]:
        assert boxes[source][0] + boxes[source][2] < boxes[target][0]
    for one, (x, y, w, h) in boxes.items():
        for other, (u, v, a, b) in boxes.items():
            assert one == other or x + w <= u or u + a <= x or y + h <= v or v + b <= y
    assert drawn["last_node_id"] == 6
    assert drawn["last_link_id"] == len(drawn["links"])
    assert drawn == to_ui(training, registry)


def test_a_cycle_or_a_wrong_link_can_still_be_drawn(registry):
    graph = Graph(
        nodes={
            "1": GraphNode(id="1", type="Mix", inputs={"reward_1": Link("2", 0)}),
            "2": GraphNode(id="2", type="Mix", inputs={"reward_1": Link("1", 0)}),
            "3": GraphNode(
                id="3", type="Mix", inputs={"reward_1": Link("1", 5), "reward_2": Link("9", 0)}
            ),
        }
    )
    assert len(to_ui(graph, registry)["links"]) == 2
    assert to_ui(Graph(), registry)["nodes"] == []


@pytest.mark.parametrize(
    "text",
    ['{"3": {"class_type": "A"}, "3": {"class_type": "B"}}', '{"1": {"inputs": {"3": 1, "3": 2}}}'],
)
def test_a_key_that_occurs_twice_is_refused(text, registry):
    with pytest.raises(WorkflowError, match="`3` occurs twice in the same object"):
        parse_workflow(text, registry)
