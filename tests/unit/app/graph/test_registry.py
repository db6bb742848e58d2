import sys

import pytest

from app.graph import NodeError, Registry, UnknownNodeError, load_registry

GOOD = """
from typing import NamedTuple
from app.graph import Node, RunContext

class {name}(Node):
    type = "{name}"
    title = "T"
    category = "c"
    description = "d"
    class Outputs(NamedTuple):
        x: int
    def run(self, ctx: RunContext) -> Outputs:
        return self.Outputs(1)

class _Hidden({name}):
    type = "Hidden"
"""


def test_get_suggests(registry):
    assert registry.get("Sampler").title == "Sampler"
    assert "Sampler" in registry
    assert len(registry) == 8
    assert registry.find("Samplr") is None
    with pytest.raises(
        UnknownNodeError, match=r"no node of type `Samplr` is installed\. Did you mean `Sampler`\?"
    ):
        registry.get("Samplr")


def test_a_type_is_defined_once(registry):
    again = registry.get("Score").cls
    registry.add(again)
    other = type("Other", (again,), {"__module__": "elsewhere"})
    with pytest.raises(
        NodeError, match=r"`Score` is defined twice: by .*Score and by elsewhere.Other"
    ):
        registry.add(other)


@pytest.fixture
def package(tmp_path, monkeypatch):
    name = "toy_shipped_nodes"
    folder = tmp_path / name
    (folder / "backends").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "one.py").write_text(GOOD.format(name="One"))
    (folder / "_private.py").write_text("raise RuntimeError")
    (folder / "backends" / "__init__.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    for module in [module for module in sys.modules if module.startswith(name)]:
        del sys.modules[module]


def test_package_gives_its_flat_modules(package):
    registry = load_registry(package=package)
    assert [spec.type for spec in registry] == ["One"]
    assert registry.get("One").module == f"{package}.one"


def test_missing_package():
    with pytest.raises(NodeError, match="no package `no_such_package_of_nodes`"):
        Registry().load_package("no_such_package_of_nodes")


def test_folder_loads_each_file_on_its_own(tmp_path, registry):
    (tmp_path / "my nodes.py").write_text(GOOD.format(name="Mine"))
    (tmp_path / "broken.py").write_text("import no_such_module_anywhere")
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)")
    (tmp_path / "syntax.py").write_text("def")
    (tmp_path / "empty.py").write_text("x = 1")
    (tmp_path / "taken.py").write_text(GOOD.format(name="Score"))
    (tmp_path / "notes.txt").write_text("no")
    (tmp_path / "_draft.py").write_text("raise RuntimeError")
    (tmp_path / "folder").mkdir()
    pack = tmp_path / "pack"
    pack.mkdir()
    (pack / "helper.py").write_text("NAME = 'Packed'\n")
    (pack / "__init__.py").write_text(
        "from jagg_ext.pack.helper import NAME\n" + GOOD.format(name="Packed")
    )
    before = list(sys.path)
    registry.load_folder(tmp_path)
    assert sys.path == before
    assert registry.get("Mine").module == "jagg_ext.my_nodes"
    assert registry.get("Packed").module == "jagg_ext.pack"
    assert sorted(registry.failures) == [
        "broken.py",
        "empty.py",
        "leaves.py",
        "syntax.py",
        "taken.py",
    ]
    assert registry.failures["broken.py"].startswith("broken.py: ModuleNotFoundError: ")
    assert registry.failures["leaves.py"] == "leaves.py: SystemExit: 3"
    assert "defined twice" in registry.failures["taken.py"]
    assert "jagg_ext.broken" not in sys.modules
    (tmp_path / "my nodes.py").write_text(
        "raise ValueError"
    )  # a reload that fails keeps what was there
    Registry().load_folder(tmp_path)
    assert hasattr(sys.modules["jagg_ext.my_nodes"], "Mine")


def test_no_folder_is_no_failure(tmp_path, package):
    registry = load_registry(tmp_path / "none", package=package)
    assert not registry.failures
