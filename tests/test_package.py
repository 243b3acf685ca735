"""The wheel, as a user installs it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    for name in files:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "."],
        cwd=source,
        check=True,
    )
    return next(source.glob("mpicomp-*.whl"))


def test_every_module_is_in_the_wheel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in [*ROOT.glob("mpicomp/**/*.py"), *ROOT.glob("launch/mpicomp_launch/**/*.py")]:
        assert path.relative_to(ROOT).as_posix().removeprefix("launch/") in names
    assert {"mpicomp/py.typed", "mpicomp/__init__.pyi", "mpicomp_launch/py.typed"} <= names
    assert "mpicomp/compress/select/above.cu" in names
    assert not any(name.startswith(("tests/", "examples/", "launch/")) for name in names)


def test_the_wheel_runs_without_the_source(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r}); import mpicomp, mpicomp_launch; "
        "from mpicomp.compress import available; print(mpicomp.__file__, *available())"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    path, *names = run.stdout.split()
    assert Path(path).is_relative_to(site)
    assert {"none", "fp16", "bf16", "topk", "powersgd"} <= set(names)
    entries = (next(site.glob("*.dist-info")) / "entry_points.txt").read_text()
    assert "mpicomp-launch = mpicomp_launch.cli:main" in entries
