"""Config files: positions, includes, mistakes, and files that write and read back the same."""

import contextlib
import os
import string
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpicomp_launch import config, config_writer, kinds, toml_positions
from mpicomp_launch.documents import parse_toml
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
        ("a.toml", "np = 2\n[host.a]\nslots = 0\n", "a.toml:3:1: slots must be a whole number"),
        (
            "a.yaml",
            "host:\n  a:\n    env: {A B: 1}\n",
            "a.yaml:3:5: env must be NAME or NAME=VALUE",
        ),
        (
            "a.yaml",
            "host: {a: {max-slots: 2, max_slots: 3}}",
            "a.yaml:1:26: max_slots .* got it twice",
        ),
        ("a.toml", "np = 2\n[[host]]\nslots = 1\n", "a.toml:2:3: host must be a table of hosts"),
        ("a.toml", 'np = 2\n"\\u006epp" = 2\n', "a.toml:2:1: npp is not .* did you mean np"),
        ("a.toml", '"a\\nb" = 2\n', r"a.toml:1:1: 'a\\nb' is not an option"),
        ("a.toml", "np = 2\ntag = \n", r"a.toml:2:7: Invalid value"),
        ("a.toml", "np = 0x" + "f" * 9000, "a.toml:1:1: np must be .* a number that is too long"),
        ("a.toml", "cwd = " + "[" * 9999, "a.toml: .* must not be nested so deeply"),
        ("a.yaml", "cwd: " + "[" * 9999, "a.yaml: .* must not be nested so deeply"),
        ("a.yaml", "stats: !!bool x", "a.yaml: a value must be what its tag says"),
        ("a.yaml", "cwd: !!float ''", "a.yaml: a value must be what its tag says"),
        ("a.yaml", "cwd: !!int x", "a.yaml: a value must be what its tag says"),
        ("a.yaml", 'cwd: "\\ud800"', "a.yaml:1:1: cwd must be a text"),
        ("a.yaml", "np: [", r"a.yaml:1:6"),
        ("a.yaml", "np: 2\nnp: 3", r"a.yaml:2:1: np must be given once"),
        ("a.toml", "fusion-mb = 2\nfusion_mb = 3", "a.toml:2:1: fusion_mb must be given once"),
        ("a.yaml", "- np", "must be a table of options"),
        ("a.yaml", "tag: !!python/object/apply:os.system [ls]", "a.yaml:1:6: could not determine"),
        ("a.ini", "", r"must be .toml, .yaml or .yml, got 'a.ini'"),
        ("a.toml", "include = 3", "a.toml:1:1: a file must be given by its name, got 3"),
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


def test_included_files_are_joined_where_options_repeat(write):
    write("b.toml", "env = ['A=weak', 'B=1']\n[host.a]\nslots = 2\nenv = ['C=1']\n")
    write("c.yaml", "env: [A=middle]\ntag: none\n")
    text = "env = ['A=strong']\ninclude = ['b.toml', 'c.yaml']\n[host.a]\nmax-slots = 3\n"
    found = config.read(write("a.toml", text))
    assert dict(found["env"].value) == {"A": "strong", "B": "1"}
    assert found["env"].origin == "b.toml:1:1, c.yaml:1:1, a.toml:1:1"
    assert found["host"].value == (HostSection("a", 2, 3, (("C", "1"),)),)


def test_cycle_of_includes(write):
    write("b.yaml", "include: ./c.toml")
    write("c.toml", "include = 'a.toml'")
    with pytest.raises(LaunchError, match=r"got a.toml -> b.yaml -> ./c.toml -> ./a.toml"):
        config.read(write("a.toml", "include = ['b.yaml']"))


def test_variables_in_yaml_are_what_was_written(write):
    text = "env: {A: 010, B: 1.10, C: 12:30:00, D: 2024-01-01, E: 1_0, F: .inf, G: true, H: }\n"
    assert config.read(write("a.yaml", text))["env"].value == (
        ("A", "010"),
        ("B", "1.10"),
        ("C", "12:30:00"),
        ("D", "2024-01-01"),
        ("E", "1_0"),
        ("F", ".inf"),
        ("G", "1"),
        ("H", None),
    )


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_byte_order_mark(write, suffix):
    text = f"\ufeffnp{config_writer.ASSIGN[suffix]}3\n"
    assert config.read(write(f"a{suffix}", text))["np"].value == 3


def test_many_lines_take_no_long_time(write):
    lines = [f"h{i} = {{slots = 1}}" for i in range(20_000)]
    found = config.read(write("a.toml", "[host]\n" + "\n".join(lines)))
    assert len(found["host"].value) == 20_000


def test_without_pyyaml(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(LaunchError, match=r"a.yaml: YAML needs PyYAML; run `pip install pyyaml`"):
        config.read(write("a.yaml", "np: 2"))


def test_repeated_aliases_stay_small(write):
    lines = ["a0: &a0 [x, x]"] + [
        f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}, *a{i - 1}, *a{i - 1}]" for i in range(1, 30)
    ]
    with pytest.raises(LaunchError, match="a0 is not an option"):
        config.read(write("a.yaml", "\n".join(lines)))
    anchors = [f"&a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    for key in ("include", *FIELDS):
        with pytest.raises(LaunchError) as caught:
            config.read(write("b.yaml", f"{key}: [[&a0 [x, x], {', '.join(anchors)}]]"))
        assert len(str(caught.value)) < 5000


def test_positions_in_toml_that_looks_otherwise():
    text = '''a = """
b = 1
""" # c = 2
'd e' = [1, # ]
  {f = 2, "g" = [3]}]
[h.i]
j.k = "[l]"
'''
    positions = toml_positions.locate(text, str)
    assert positions[("a",)] == (1, 1)
    assert positions[("d e",)] == (4, 1)
    assert positions[("d e", "f")] == (5, 4)
    assert positions[("d e", "g")] == (5, 11)
    assert positions[("h", "i", "j", "k")] == (7, 3)
    assert ("b",) not in positions
    assert ("l",) not in positions


KEYS = ["a", "b-c", '"d e"', "'f.g'", '"\\u0068"', '"="', "1", "''", '"\\"#"', "'[x]'", "true"]
VALUES = [
    "1",
    '"# x = 1"',
    "'\\'",
    '"""\nx = 1\n[y]\n\\""" z"""""',
    "'''\ny = 2\n'''''",
    "[1, [2, # ]\n 'x'], {z = 1}]",
    "{ a = {'b' = [1]}, c.d = '''}''' }",
    "2024-01-01 00:00:00",
    "-1e+3",
    "{}",
]


def paths(table, above=()):
    for key, value in table.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from paths(value, (*above, key))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", " ", "\t"]),
            st.lists(st.sampled_from(KEYS), min_size=1, max_size=3),
            st.sampled_from([".", " . "]),
            st.none() | st.sampled_from(VALUES),
            st.sampled_from(["", " # x = [", "\n"]),
        ),
        max_size=6,
    ),
    st.sampled_from(["\n", "\r\n"]),
)
@settings(max_examples=500)
def test_every_key_is_where_it_is_said_to_be(lines, newline):
    """Valid TOML only; a line without a value is the head of a table."""
    text = ""
    for indent, keys, dot, value, end in lines:
        key = dot.join(keys)
        line = f"{indent}[{key}]" if value is None else f"{indent}{key} = {value}"
        text += f"{line}{end}\n"
    try:
        document = parse_toml("f", text.replace("\n", newline))
    except LaunchError:
        return
    for path in paths(document.values):
        line, column = document.positions[path]
        rest = text.split("\n")[line - 1][column - 1 :]
        word = next(
            key for key in sorted([*KEYS, "'b'", "c", "d"], key=len)[::-1] if rest.startswith(key)
        )
        assert parse_toml("f", f"{word} = 1").values == {path[-1]: 1}


@given(st.binary(), st.sampled_from(SUFFIXES))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
def test_any_bytes_are_read_or_refused(tmp_path, data, suffix):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(data)
    with contextlib.suppress(LaunchError):
        config.read(str(path))


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


CARRIED = st.text().filter(lambda text: "\0" not in text)
TEXT = CARRIED.filter(bool)
VARIABLES = st.lists(st.tuples(st.text(string.ascii_letters, min_size=1), st.none() | CARRIED)).map(
    tuple
)
COUNTS = st.none() | st.integers(1, 999999)
BY_KIND = {
    kinds.WHOLE: st.integers(1, 999999),
    kinds.NUMBER: st.floats(0, exclude_min=True, allow_infinity=False),
    kinds.TEXT: TEXT,
    kinds.HOSTS: TEXT,
    kinds.FLAG: st.booleans(),
    kinds.WORDS: st.lists(CARRIED).map(tuple),
    kinds.ENV: VARIABLES,
    kinds.SECTIONS: st.dictionaries(
        TEXT, st.builds(HostSection, st.just(""), COUNTS, COUNTS, VARIABLES), min_size=1
    ).map(lambda table: tuple(replace(each, name=name) for name, each in table.items())),
}


def values_of(name):
    kind = FIELDS[name].metadata["kind"]
    return st.sampled_from(kind.names) if kind.names else BY_KIND[kind]


VALID = {name: values_of(name) for name in FIELDS}


@given(st.fixed_dictionaries({}, optional=VALID), st.sampled_from(SUFFIXES), st.text(min_size=1))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
def test_what_is_written_reads_back_the_same(tmp_path, monkeypatch, values, suffix, origin):
    options = Options(**values)
    text = config_writer.render(Resolved(options, dict.fromkeys(values, origin)), suffix)
    monkeypatch.chdir(tmp_path)  # what a relative name of a file is relative to
    Path(f"a{suffix}").write_text(text, encoding="utf-8")
    assert resolve(config.read(f"a{suffix}")).options == options


def test_bytes_that_are_no_text_are_not_written():
    with pytest.raises(LaunchError, match="a config file must hold Unicode texts"):
        config_writer.render(Resolved(Options(cwd="\udcff"), {"cwd": "x"}), ".toml")


def test_present_values_of_variables_are_not_written(launch, tmp_path):
    path = tmp_path / "a.toml"
    words = ["--env", "TOKEN", "--env", "A=1", "--write-config", str(path)]
    done = launch(*words, TOKEN="hush")
    assert done.returncode == 0, done.stderr
    assert 'env = ["TOKEN", "A=1"]' in path.read_text()
    assert "hush" not in path.read_text()


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


@pytest.mark.parametrize("directory", ["sub", "link", "."])
def test_files_are_named_as_seen_from_the_new_file(write, tmp_path, directory):
    write("hosts.txt", "a:2\n")
    write("sub/other.txt", "")
    Path("far/away").mkdir(parents=True)
    Path("link").symlink_to(tmp_path / "far/away")
    given = {"hostfile": "hosts.txt", "ssh_identity": "/k", "output_dir": "out"}
    path = f"{directory}/x.toml"
    config_writer.write(path, Resolved(Options(**given), dict.fromkeys(given, "here")))
    found = {name: each.value for name, each in config.read(path).items()}
    assert os.path.samefile(found.pop("hostfile"), "hosts.txt")
    assert found == {"ssh_identity": "/k", "output_dir": "out"}
