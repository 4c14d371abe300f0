"""The order of packages and of the rooms in each: a room imports only what is below it, and nothing goes round in circles."""

import ast
import pathlib
import re

import pytest

from warmup import fingerprint

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = ("server", "warmup", "engine", "protos")  # from the roof down; engine knows neither warmup nor server
ROOMS = {  # of each package, from the roof down
    "server": (
        "__main__", "commands", "start", "proxy", "grpc", "client", "orchestrator", "config", "api", "text", "telemetry", "errors",
    ),
    "warmup": (
        "target", "prepare", "aot", "manual", "weights", "cache", "compiling", "plan", "report", "store", "xla_cache", "folder",
        "guard", "collectives", "errors", "fingerprint", "trust",
    ),
    "engine": (
        "loader", "fills", "agreement", "peft", "families", "checkpoints", "mock", "mock_rules",  # on the host
        "jax_engine", "table", "kinds", "functions", "segments", "model", "moe", "state", "weights", "adapters", "kernels", "layers",
        "native", "sampling", "attention", "sharding", "rope", "api", "programs", "quantization", "discovery", "config",
    ),
    "protos": ("conventions", "orchestrator_pb2_grpc", "preheat_pb2_grpc", "orchestrator_pb2", "preheat_pb2"),
}  # fmt: skip
TRACED = ROOMS["engine"][ROOMS["engine"].index("jax_engine") :]


def imported(source: str) -> set[str]:
    """The modules of this project that a source names in imports, wherever they stand."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "relative imports hide where they go"
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] in PACKAGES}


def modules() -> dict[str, str]:
    """Module name -> source, of all packages but what protoc made."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")) if "_pb2" not in path.name]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path.read_text() for path in paths}


def wrong_way(name: str, source: str) -> list[str]:
    """The imports of a module that go up, or across from one package's room to a higher one."""
    package, _, rest = name.partition(".")
    wrong = []
    for other in sorted(imported(source)):
        other_package, _, other_rest = other.partition(".")
        if PACKAGES.index(other_package) < PACKAGES.index(package):
            wrong.append(other)
        elif other_package == package and rest and other_rest:
            order, room, other_room = ROOMS[package], rest.split(".")[0], other_rest.split(".")[0]
            if other_room in order and order.index(other_room) < order.index(room):
                wrong.append(other)
    return wrong


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_go_down(name):
    assert wrong_way(name, modules()[name]) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_room_is_in_the_order(package):
    paths = [path for path in (ROOT / package).iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    assert {path.stem for path in paths} - {"__init__"} == set(ROOMS[package])


def test_an_import_turned_round_is_noticed():
    assert wrong_way("server.api.fields", "from server.grpc import server") == ["server.grpc", "server.grpc.server"]
    assert wrong_way("engine.api", "def late():\n    import warmup.aot") == ["warmup.aot"]
    assert wrong_way("engine.functions", "from engine.families import get_family") == ["engine.families", "engine.families.get_family"]
    assert wrong_way("warmup.store", "if True:\n    from warmup import aot") == ["warmup.aot"]
    assert wrong_way("server.grpc.server", "from server.api import fields\nimport grpc") == []


def test_every_import_turned_round_is_noticed():
    """Each import from one room to another that there is, the other way: none would pass."""
    sources, crossing = modules(), set()
    for name, source in sources.items():
        crossing |= {(name, other) for other in imported(source) & sources.keys() if other.split(".")[:2] != name.split(".")[:2]}
    assert len({name.split(".")[0] for name, _ in crossing}) == 3 and len(crossing) > 300
    rooms = [(name, other) for name, other in crossing if "." in name and "." in other]
    assert [(name, other) for name, other in rooms if not wrong_way(other, f"import {name}")] == []


def test_what_is_traced_imports_nothing_that_fingerprints_leave_out():
    """Digests of the sources name what a compiled program depends on: host-only parts are not among them (`warmup.fingerprint`)."""
    for room in ROOMS["engine"]:
        path = f"engine/{room}/" if (ROOT / "engine" / room).is_dir() else f"engine/{room}.py"
        assert path.startswith(fingerprint._HOST_ONLY) == (room not in TRACED), path


def test_no_circles():
    """Depth-first over the modules: an import of a module that is still open closes a circle."""
    sources = modules()
    edges = {}
    for name, source in sources.items():
        names = imported(source) & sources.keys() - {name}
        # ``from package import module`` asks for the module.
        edges[name] = {other for other in names if not any(more.startswith(f"{other}.") for more in names)}
    state: dict[str, int] = {}
    circles = []

    def visit(name: str, way: tuple[str, ...]) -> None:
        state[name] = 1
        for other in sorted(edges[name]):
            if state.get(other) == 1:
                circles.append((*way[way.index(other) :], other))
            elif other not in state:
                visit(other, (*way, other))
        state[name] = 2

    for name in sources:
        if name not in state:
            visit(name, (name,))
    assert circles == []


def test_files_that_pages_name_are_there():
    """`docs/models.md` also names the file that its example is to be saved as."""
    path = re.compile(rf"`((?:{'|'.join(PACKAGES)}|docs|tests)/[\w./-]*\w)`")
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    named = {(page.name, found) for page in pages for found in path.findall(page.read_text())}
    assert len(named) > 100
    missing = {(page, found) for page, found in named if not ((ROOT / found).exists() or (ROOT / f"{found}.py").exists())}
    assert missing == {("models.md", "engine/families/seed_oss.py")}


def test_links_of_pages_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for path in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / path).exists(), f"{page.name}: {path}"
