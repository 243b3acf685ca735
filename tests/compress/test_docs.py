"""docs/compressors.md names every method and option, with the defaults and bytes that hold."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import pytest
import torch

from mpicomp.compress import Simulation, available, parse
from mpicomp.compress.registry import METHODS
from mpicomp.compress.specs import WRAPPERS

TEXT = (Path(__file__).parents[2] / "docs" / "compressors.md").read_text()
QUOTED = re.compile(r"`([^`]+)`")


def table_rows(header: str) -> list[list[str]]:
    """The cells of all rows below ``header``, in whichever tables have it."""
    rows: list[list[str]] = []
    inside = False
    for line in TEXT.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith(header):
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside and set(line) != set("|-"):
            rows.append(cells)
    return rows


METHOD_ROWS = [
    (name, row)
    for row in table_rows("| name | options and defaults |")
    for name in QUOTED.findall(row[0])
]
ROWS = dict(METHOD_ROWS)


def options_of(name: str) -> dict[str, str]:
    cell = ROWS[name][1]
    if cell.startswith("as "):
        return options_of(QUOTED.findall(cell)[0])
    return dict(item.split("=") for item in QUOTED.findall(cell))


def section_of(name: str) -> str:
    """What stands below the heading that names a method."""
    for part in re.split(r"^#{2,3} ", TEXT, flags=re.MULTILINE):
        heading, _, body = part.partition("\n")
        if name in heading.split(", "):
            return body
    raise AssertionError(f"no section is called {name}")


def test_every_method_has_one_row() -> None:
    assert sorted(name for name, _ in METHOD_ROWS) == available()


@pytest.mark.parametrize("name", available())
def test_options_and_defaults(name: str) -> None:
    options = options_of(name)
    assert list(options) == [field.name for field in dataclasses.fields(METHODS[name])]  # type: ignore[arg-type]
    for option, default in options.items():
        assert parse(f"{name}:{option}={default}") == parse(name), option


@pytest.mark.parametrize("name", available())
def test_every_option_is_explained(name: str) -> None:
    section = section_of(name)
    if other := re.search(r"ptions are those of `(\w+)`", section):
        section += section_of(other[1])
    heads = re.findall(r"^- (`\w+`(?:, `\w+`)*)", section, flags=re.MULTILINE)
    bullets = {option for head in heads for option in QUOTED.findall(head)}
    assert options_of(name).keys() <= bullets
    wrapped = {option for wrapper in WRAPPERS for option in wrapper.spec_options.values()}
    assert bullets <= options_of(name).keys() | wrapped


def test_options_of_wrappers() -> None:
    found: dict[str, str] = {}
    for option, default, _, _ in table_rows("| option | default |"):
        found |= dict.fromkeys(QUOTED.findall(option), default.strip("`"))
    expected = {
        wrapper.spec_options[field.name]: field.default
        for wrapper in WRAPPERS
        for field in dataclasses.fields(wrapper)  # type: ignore[arg-type]
        if field.name in wrapper.spec_options
    }
    assert found.keys() == expected.keys()
    for option, default in expected.items():
        if default is dataclasses.MISSING:
            assert found[option] in ("none", "as they are")
        else:
            assert type(default)(found[option]) == default


def test_the_methods_whose_values_can_be_narrowed() -> None:
    rows = {QUOTED.findall(row[0])[0]: row for row in table_rows("| option | default |")}
    named = set(QUOTED.findall(rows["values"][3]))
    assert named == {n for n in available() if METHODS[n]().capabilities.gathers_values}


# ---------------------------------------------------------------------------------------- bytes


def test_the_example_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    code = section_of("Trying settings without MPI").split("```python")[1].split("```")[0]
    exec(code, {})
    (said,) = re.findall(r"print\(.*\)  # (\d+),", code)
    assert capsys.readouterr().out.strip() == said


# What the docs say, and the same for matrices of 64 x 96 and 32 x 32: d elements, n ranks.
SHAPES = {"a": (64, 96), "b": (32, 32)}
D = sum(math.prod(shape) for shape in SHAPES.values())
SIDES = sum(sum(shape) for shape in SHAPES.values())
ROWS_OF_ALL = sum(shape[0] for shape in SHAPES.values())


def both(n: int) -> float:
    return 1 + 1 / n if n > 2 else 1.0


BYTES = {
    "none": ("d b", lambda n: 4 * D),
    "fp16": ("2 d", lambda n: 2 * D),
    "bf16": ("2 d", lambda n: 2 * D),
    "powersgd": (
        "4 r (n + m) for each matrix and iteration, r = min(n, m, rank)",
        lambda n: 4 * 2 * SIDES,
    ),
    "acpsgd": (
        "4 r n in even steps, 4 r m in odd ones, for each matrix",
        lambda n: 4 * 4 * (96 + 32),
    ),
    "int8": (
        "s d + 4 s d / block, s = 1 + 1/n",
        lambda n: both(n) * (D + 4 * D / 256),
    ),
    "int4": ("s d / 2 + 4 s d / block", lambda n: both(n) * (D / 2 + 4 * D / 256)),
    "signsgd": (
        "s d / 8 for n < 3, else d / 8 + d / (4 n), and 4 s for each parameter or row",
        lambda n: D / 8 + (D / 4 / n if n > 2 else 0) + both(n) * 4 * 2,
    ),
    "efsign": (
        "s d / 8, and 4 s for each parameter or row",
        lambda n: both(n) * (D / 8 + 4 * 2),
    ),
    "onebit": (
        "s d / 8, and 8 s for each row or parameter",
        lambda n: both(n) * (D / 8 + 8 * ROWS_OF_ALL),
    ),
    "natural": ("9/8 d", lambda n: 9 / 8 * D if n < 8 else 4 * D),
    "qsgd": (
        "d bits / 8 + 4 d / block",
        lambda n: D * 4 / 8 + 4 * D / 512 if n < 16 else 4 * D,
    ),
    "terngrad": (
        "d / 4 for n < 8, d for 8 <= n <= 127, else 2 d; and 4 for each parameter",
        lambda n: (D / 4 if n < 8 else D if n <= 127 else 2 * D) + 4 * 2,
    ),
    "thc": (
        "d while n (2^(bits-1) - 1) <= 127, else 2 d; and 4 d / block",
        lambda n: D * (1 if n * 7 <= 127 else 2) + 4 * D / 1024,
    ),
}


CASES = [(name, n) for name in BYTES for n in (1, 2, 3, 8)] + [("terngrad", 130), ("thc", 130)]


@pytest.mark.parametrize(("name", "n"), CASES)
def test_bytes_sent(name: str, n: int) -> None:
    words, formula = BYTES[name]
    if not ROWS[name][2].startswith(words):
        raise AssertionError(f"the formula of {name} is not that of the docs any more")
    params = {key: torch.empty(shape) for key, shape in SHAPES.items()}
    simulation = Simulation(name, params, size=n)
    grads = [{key: torch.ones(shape) for key, shape in SHAPES.items()}] * n
    for _ in range(2):  # the first step may agree on a seed besides
        sent = simulation.step(grads).bytes_sent
    # chunks are cut at whole blocks and parts of rows have scales of their own: the mean is near
    few = 4 * (len(SHAPES) + n) * 2 if both(n) > 1 else 0
    assert sum(sent) / n == pytest.approx(formula(n), abs=few)
