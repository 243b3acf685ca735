"""Who wins among sources, and how what several of them say is joined."""

import pytest

from mpicomp_launch import resolve
from mpicomp_launch.environment import INTERNAL, as_text, without_own
from mpicomp_launch.errors import LaunchError
from mpicomp_launch.kinds import HostSection
from mpicomp_launch.options import FIELDS, Options, variable_of
from mpicomp_launch.resolve import Value


def test_strongest_source_wins():
    options = resolve.resolve(
        {"np": Value(1, "command line")},
        {"np": Value(2, "X"), "tag": Value("none", "MPICOMP_LAUNCH_TAG")},
        {"np": Value(3, "f"), "tag": Value("rank", "f"), "timeout": Value(5.0, "f:1:1")},
    )
    assert (options.options.np, options.options.tag, options.options.timeout) == (1, "none", 5.0)
    assert options.origins == {
        "np": "command line",
        "tag": "MPICOMP_LAUNCH_TAG",
        "timeout": "f:1:1",
    }
    assert options.options.start_timeout == Options().start_timeout


def test_what_repeats_is_joined_with_the_strongest_last():
    found = resolve.resolve(
        {"env": Value((("A", "strong"),), "command line")},
        {"env": Value((("A", "weak"), ("B", "1")), "f")},
    )
    assert dict(found.options.env) == {"A": "strong", "B": "1"}


def test_environment():
    environ = {
        "MPICOMP_LAUNCH_NP": "4",
        "MPICOMP_STATS": "off",
        "MPICOMP_LAUNCH_HOSTS": "",
        "MPICOMP_EXPECT_SIZE": "9",
        "OTHER": "x",
    }
    found = resolve.from_environment(environ, INTERNAL)
    assert found == {"np": Value(4, "MPICOMP_LAUNCH_NP"), "stats": Value(False, "MPICOMP_STATS")}
    assert without_own(environ) == {"MPICOMP_STATS": "off", "OTHER": "x"}
    with pytest.raises(LaunchError, match="MPICOMP_LAUNCH_NPP is not a setting; did you mean"):
        resolve.from_environment({"MPICOMP_LAUNCH_NPP": "4"}, INTERNAL)
    with pytest.raises(LaunchError, match="MPICOMP_STATS: stats must be true or false, got 'x'"):
        resolve.from_environment({"MPICOMP_STATS": "x"}, INTERNAL)


def test_library_and_launcher_know_the_same_variables():
    settings = pytest.importorskip("mpicomp.settings")
    library = {f"MPICOMP_{name.upper()}" for name in settings.Settings.__dataclass_fields__}
    ours = {f.metadata["variable"] for f in FIELDS.values() if f.metadata["variable"]}
    assert library - ours <= set(INTERNAL)
    assert ours <= library


def test_sections():
    assert resolve.convert("host", {"a": {"slots": 2}, "b": None}, "f").value == (
        HostSection("a", 2),
        HostSection("b"),
    )
    for wrong in ({"a": {"slots": 0}}, {"a": 3}, ["a"], {"a": {"env": {"A B": "1"}}}):
        with pytest.raises(LaunchError, match="f: host must be a table of hosts"):
            resolve.convert("host", wrong, "f")


def test_every_option_has_a_variable():
    assert len({variable_of(name) for name in FIELDS}) == len(FIELDS)


def test_sections_of_one_host_are_joined():
    found = resolve.resolve(
        {"host": Value((HostSection("a", 3, None, (("A", "strong"),)),), "f")},
        {
            "host": Value(
                (HostSection("b", 1), HostSection("a", 2, 4, (("A", "weak"), ("B", "1")))), "g"
            )
        },
    )
    env = (("A", "weak"), ("B", "1"), ("A", "strong"))
    assert found.options.host == (HostSection("b", 1), HostSection("a", 3, 4, env))
    assert found.origins == {"host": "g, f"}


@pytest.mark.parametrize("name", ["np", "hosts", "cwd", "env", "mpi_args", "tag", "timeout"])
@pytest.mark.parametrize(
    "value",
    [16**9000, [[["x"] * 9] * 9] * 9, "a\0", "\ud800", {"a": {}}, object(), b"x"],
    ids=["long", "wide", "NUL", "half", "table", "object", "bytes"],
)
def test_what_will_not_do_is_refused_in_one_line(name, value):
    with pytest.raises(LaunchError) as caught:
        resolve.convert(name, value, "f:1:1")
    assert str(caught.value).startswith(f"f:1:1: {name} must be ")
    assert len(str(caught.value)) < 1000


def test_bytes_that_are_no_text_pass():
    assert resolve.convert("cwd", "/tmp/\udcff", "f").value == "/tmp/\udcff"


@pytest.mark.parametrize(
    ("value", "text"), [(12.3456789, "12.3456789"), (25.0, "25"), (1e22, "1e+22")]
)
def test_numbers_keep_their_digits(value, text):
    assert as_text(value) == text
    assert float(text) == value
