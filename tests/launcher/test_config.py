"""Config files: positions, includes, mistakes, and files that write and read back the same."""

import contextlib
import os
import string
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpicomp_launch import config, config_writer, toml_positions
from mpicomp_launch.errors import LaunchError
from mpicomp_launch.kinds import HostSection
from mpicomp_launch.options import FIELDS, Options
from mpicomp_launch.resolve import Resolved, resolve

SUFFIXES = (".toml", ".yaml")
TEXTS = {
    "x.toml": """# a comment
np = 4
compression = "powersgd:rank=4"
fusion-mb = 12.5
stats = true
mpi_args = "--mca 'a b' c"
env = {A = "1 = 2", "B" = 3, C = true}

[host."node[1-2]"]
slots = 2
max-slots = 3
env = ["D=4", "HOME"]
""",
    "x.yaml": """# a comment
np: 4
compression: powersgd:rank=4
fusion-mb: 12.5
stats: true
mpi_args: --mca 'a b' c
env: {A: 1 = 2, B: 3, C: true}

host:
  node[1-2]:
    slots: 2
    max-slots: 3
    env: [D=4, HOME]
""",
}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a file into the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return name

    return write


@pytest.mark.parametrize("name", TEXTS)
def test_values_and_where_they_stand(write, name):
    found = config.read(write(name, TEXTS[name]))
    assert {key: value.value for key, value in found.items()} == {
        "np": 4,
        "compression": "powersgd:rank=4",
        "fusion_mb": 12.5,
        "stats": True,
        "mpi_args": ("--mca", "a b", "c"),
        "env": (("A", "1 = 2"), ("B", "3"), ("C", "1")),
        "host": (HostSection("node[1-2]", 2, 3, (("D", "4"), ("HOME", None))),),
    }
    assert found["np"].origin == f"{name}:2:1"
    assert found["env"].origin == f"{name}:7:1"


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("a.toml", "np = 2\n\ncompresion = 'x'\n", "a.toml:3:1: compresion is not an option; did "),
        ("a.yaml", "np: 2\n\ncompresion: x\n", "a.yaml:3:1: .* did you mean compression"),
        ("a.toml", "np = 'x'", "a.toml:1:1: np must be a whole number, 1 or more, got 'x'"),
        ("a.yaml", "np: true", "a.yaml:1:1: np must be a whole number"),
        ("a.toml", "np = 2\n[host.a]\nslot = 3\n", "a.toml:3:1: slot is .* did you mean slots"),
        ("a.yaml", "host:\n  a: {slot: 3}\n", r"a.yaml:2:7: slot is .* did you mean slots"),
        ("a.toml", "host = {a = {slot = 3}}", r"a.toml:1:14: slot is"),
        ("a.toml", "np = ", r"a.toml: Invalid value"),
        ("a.yaml", "np: [", r"a.yaml:1:6"),
        ("a.yaml", "np: 2\nnp: 3", r"a.yaml:2:1: np must be given once"),
        ("a.toml", "fusion-mb = 2\nfusion_mb = 3", "a.toml:2:1: fusion_mb must be given once"),
        ("a.yaml", "- np", "must be a table of options"),
        ("a.yaml", "tag: !!python/object/apply:os.system [ls]", "a.yaml:1:6: could not determine"),
        ("a.ini", "", r"must be .toml, .yaml or .yml, got 'a.ini'"),
        ("a.toml", "include = 3", "a file must be given by its name|not iterable"),
        ("a.toml", "include = 'none.toml'", "must be a readable text, got none.toml"),
        ("a.toml", "include = 'a.toml'", "must not include itself, got a.toml -> a.toml"),
        ("a.toml", "tag = 'all'", "tag must be rank, host:rank or none, got 'all'"),
        ("a.toml", "env = {'a b' = '1'}", "env must be NAME or NAME=VALUE"),
    ],
)
def test_mistakes(write, name, text, error):
    with pytest.raises(LaunchError, match=error):
        config.read(write(name, text))


def test_include_is_weaker_and_relative(write):
    write("base/b.yaml", "np: 2\ntag: none\nhostfile: h.txt\ninclude: c.toml\n")
    write("base/c.toml", "np = 9\nstats = true\n")
    found = config.read(write("a.toml", "np = 4\ninclude = ['base/b.yaml']\n"))
    values = {key: value.value for key, value in found.items()}
    assert values == {"np": 4, "tag": "none", "stats": True, "hostfile": "base/h.txt"}
    assert found["tag"].origin == "base/b.yaml:2:1"


def test_repeated_aliases_stay_small(write):
    lines = ["a0: &a0 [x, x]"] + [
        f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}, *a{i - 1}, *a{i - 1}]" for i in range(1, 30)
    ]
    with pytest.raises(LaunchError, match="a0 is not an option"):
        config.read(write("a.yaml", "\n".join(lines)))
    text = "\n".join(line.replace("a0:", "hosts:") for line in lines[:1])
    with pytest.raises(LaunchError):
        config.read(write("b.yaml", f"x: &b [{text}]"))


def test_positions_in_toml_that_looks_otherwise():
    text = '''a = """
b = 1
""" # c = 2
'd e' = [1, # ]
  {f = 2, "g" = [3]}]
[h.i]
j.k = "[l]"
'''
    positions = toml_positions.locate(text)
    assert positions[("a",)] == (1, 1)
    assert positions[("d e",)] == (4, 1)
    assert positions[("d e", "f")] == (5, 4)
    assert positions[("d e", "g")] == (5, 11)
    assert positions[("h", "i", "j", "k")] == (7, 3)
    assert ("b",) not in positions
    assert ("l",) not in positions


@given(st.text(), st.sampled_from(SUFFIXES))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
def test_any_text_is_read_or_refused(tmp_path, text, suffix):
    path = tmp_path / f"a{suffix}"
    path.write_text(text, errors="replace")
    with contextlib.suppress(LaunchError):
        config.read(str(path))


@given(
    st.lists(
        st.sampled_from(
            ["np", "host", "env", "include", "=", ":", " ", "\n", "[", "]", "{", "}", "- ", "a",
             "1", '"', "'", ",", ".", "&x ", "*x", "true", "null", "!!map ", "? "]
        )
    ).map("".join),
    st.sampled_from(SUFFIXES),
)  # fmt: skip
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=500)
def test_near_misses_are_read_or_refused(tmp_path, text, suffix):
    test_any_text_is_read_or_refused.hypothesis.inner_test(tmp_path, text, suffix)


TEXT = st.text(min_size=1).filter(lambda t: ("\0" not in t and t.isprintable()) or t == "\n\u2028é")
VALID = {
    "np": st.integers(1, 999999),
    "hosts": TEXT,
    "cwd": TEXT,
    "compression": TEXT,
    "fusion_mb": st.floats(0.001, 1e6),
    "stats": st.booleans(),
    "tag": st.sampled_from(["rank", "host:rank", "none"]),
    "mpi_args": st.lists(TEXT, min_size=1).map(tuple),
    "env": st.lists(
        st.tuples(
            st.text(string.ascii_letters, min_size=1),
            st.none() | st.text().filter(lambda t: "\0" not in t),
        ),
        min_size=1,
    ).map(tuple),
    "host": st.dictionaries(
        TEXT,
        st.builds(HostSection, st.just(""), st.none() | st.integers(1, 99), st.just(None)),
        min_size=1,
    ).map(lambda d: tuple(HostSection(k, v.slots, v.max_slots, v.env) for k, v in d.items())),
}


@given(st.fixed_dictionaries({}, optional=VALID), st.sampled_from(SUFFIXES))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
def test_what_is_written_reads_back_the_same(tmp_path, values, suffix):
    path = tmp_path / f"a{suffix}"
    options = Options(**values)
    resolved = Resolved(options, dict.fromkeys(values, "somewhere"))
    try:
        text = config_writer.render(resolved, suffix)
    except LaunchError:  # half a character
        return
    path.write_text(text)
    assert resolve(config.read(str(path))).options == options


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_written_file_is_private_and_new(write, suffix):
    name = f"new{suffix}"
    config_writer.write(name, Resolved(Options(np=3), {"np": "command line"}))
    assert os.stat(name).st_mode & 0o777 == 0o600
    text = Path(name).read_text()
    assert "(from command line)" in text
    for option in FIELDS:
        assert option in text or option == "host"
    with pytest.raises(LaunchError, match="File exists"):
        config_writer.write(name, Resolved(Options(), {}))
    with pytest.raises(LaunchError, match=r"must name a \.toml"):
        config_writer.write("x.json", Resolved(Options(), {}))


def test_files_are_named_as_seen_from_the_new_file(write):
    write("hosts.txt", "a:2\n")
    write("sub/other.txt", "")
    config_writer.write("sub/x.toml", Resolved(Options(hostfile="hosts.txt"), {"hostfile": "here"}))
    assert os.path.samefile(config.read("sub/x.toml")["hostfile"].value, "hosts.txt")
