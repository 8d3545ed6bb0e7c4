"""Who imports whom: server → engine → native, all → config, and nothing points back."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAY_IMPORT: dict[str, set[str]] = {
    "config": set(),
    "native": set(),
    "engine": {"config", "native"},
    "server": {"config", "engine"},
}
NEAR_SIDE = {
    "buffers", "cache_files", "chat", "client", "context_plan", "corrections", "disk", "errors",
    "forecast", "gguf", "gguf_source", "hardware", "library", "memory", "messages", "openmp",
    "pass_time", "placement", "plan", "profile", "profile_cache", "profiling", "questions",
    "remedies", "routing", "template", "tensors", "tiers",
}  # fmt: skip
# Commands that are a process of their own; cli.py imports them when they are asked for.
IN_PROCESS = {ROOT / "server" / "checksum.py", *(ROOT / "server" / "commands").glob("*.py")}
NEVER_IN_SERVER = (
    "llama_cpp", "headrace.native", "headrace.engine.compute_speed", "headrace.engine.context_cost",
    "headrace.engine.disk_speed", "headrace.engine.engine", "headrace.engine.ggml",
    "headrace.engine.kv_cache", "headrace.engine.llama", "headrace.engine.loading",
    "headrace.engine.measure", "headrace.engine.sequence", "headrace.engine.streaming",
    "headrace.engine.weights", "headrace.engine.worker",
)  # fmt: skip
ALONE_IMPORTS = {"llama_cpp": "llama.py", "headrace.native": "weights.py"}


def files(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found
    return found


def imports(path: Path, *, at_runtime: bool = False) -> set[str]:
    """Return the full names of the modules that the one at path imports.

    With at_runtime, those that only type checkers see are left out.
    """
    return set(_imports(ast.parse(path.read_text()), at_runtime))


def _imports(node: ast.AST, at_runtime: bool) -> Iterator[str]:
    if at_runtime and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
        # `from headrace.engine import llama` imports a module too.
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, at_runtime)


def ours(path: Path) -> set[tuple[str, str]]:
    """Return package and module (or name) of what the module at path imports from us."""
    names = [name.split(".") for name in imports(path) if name.startswith("headrace.")]
    return {(name[1], name[2]) for name in names if len(name) > 2}


def test_imports_are_found_where_they_hide(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(
        "from headrace.engine import llama\n"
        "if TYPE_CHECKING:\n    from headrace.config import Settings\n"
        "def f():\n    import headrace.native\n"
    )
    found = {"headrace.engine", "headrace.engine.llama", "headrace.native"}
    assert imports(path, at_runtime=True) == found
    assert imports(path) == found | {"headrace.config", "headrace.config.Settings"}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_what_it_may(package: str) -> None:
    for path in files(package):
        assert {name for name, _ in ours(path)} <= MAY_IMPORT[package] | {package}, path


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_name_their_package_in_full(package: str) -> None:
    for path in files(package):
        assert not {name.split(".")[0] for name in imports(path)} & set(MAY_IMPORT), path
        tree = ast.parse(path.read_text())
        assert not [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level], path


def test_server_sees_only_the_near_side_of_engine() -> None:
    modules = {path.stem for path in files("engine")}
    for path in files("server"):
        seen = {name for package, name in ours(path) if package == "engine"} & modules
        assert seen <= NEAR_SIDE or path in IN_PROCESS, path


@pytest.mark.parametrize("foreign", ALONE_IMPORTS)
def test_one_file_alone_knows_a_foreign_thing(foreign: str) -> None:
    importers = {
        path.name
        for package in MAY_IMPORT
        for path in files(package)
        if any(f"{name}.".startswith(f"{foreign}.") for name in imports(path))
        and path.parent.name != foreign.removeprefix("headrace.")
    }
    assert importers == {ALONE_IMPORTS[foreign]}


def test_engine_takes_values_not_settings() -> None:
    for path in files("engine"):
        at_runtime = imports(path, at_runtime=True)
        assert not [name for name in at_runtime if name.startswith("headrace.config")], path


def test_engine_init_brings_nothing_along() -> None:
    assert not imports(ROOT / "engine" / "__init__.py")


def test_the_server_process_loads_no_far_side() -> None:
    code = (
        "import sys, headrace.server.cli, headrace.server.app, headrace.engine.profiling,"
        " headrace.server.commands.profile; print(*sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = run.stdout.split()
    assert "headrace.engine.client" in loaded
    assert not [name for name in loaded if name.startswith(NEVER_IN_SERVER)]
