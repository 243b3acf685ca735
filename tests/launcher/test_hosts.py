"""Host lists and host files: the forms people have, mistakes with their column, and placement."""

import re
import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpicomp_launch import hosts
from mpicomp_launch.errors import LaunchError
from mpicomp_launch.hosts import Host, Placement, expand, parse_hosts, place, read_hostfile


@pytest.fixture
def hostfile(tmp_path, monkeypatch):
    """Writes `hosts.txt` into the working directory, byte for byte, and returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(text):
        data = text if isinstance(text, bytes) else text.encode()
        (tmp_path / "hosts.txt").write_bytes(data)
        return "hosts.txt"

    return write


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", [("a", 1)]),
        ("a:4,b", [("a", 4), ("b", 1)]),
        (" a:4 ,\tb \n", [("a", 4), ("b", 1)]),
        ("a:2,b,a", [("a", 3), ("b", 1)]),
        ("n[8-10]:2", [("n8", 2), ("n9", 2), ("n10", 2)]),
        ("n[08-10]", [("n08", 1), ("n09", 1), ("n10", 1)]),
        ("n[1,3-4].x.org", [("n1.x.org", 1), ("n3.x.org", 1), ("n4.x.org", 1)]),
        ("r[1-2]n[3-4]", [("r1n3", 1), ("r1n4", 1), ("r2n3", 1), ("r2n4", 1)]),
        ("[1-2]a,b", [("1a", 1), ("2a", 1), ("b", 1)]),
        ("10.0.0.7:2", [("10.0.0.7", 2)]),
        ("fe80::1,::1", [("fe80::1", 1), ("::1", 1)]),
        ("[::1]:2,[fe80::1%eth0]", [("::1", 2), ("fe80::1%eth0", 1)]),
        ("fe80::1:4", [("fe80::1:4", 1)]),
        ("a:007", [("a", 7)]),
    ],
)
def test_lists(text, expected):
    assert parse_hosts(text) == tuple(Host(name, slots) for name, slots in expected)


@pytest.mark.parametrize(
    ("text", "column", "part"),
    [
        ("", 1, "a host must have a name"),
        ("a,", 3, "a host must have a name"),
        ("a,,b", 3, "a host must have a name"),
        ("a, :4", 4, "a host must have a name"),
        ("a:x", 3, "slots must be a whole number, 1 or more, got 'x'; as in a:4"),
        ("bb,a:0", 6, "got '0'"),
        ("a:-1", 3, "got '-1'"),
        ("a:9999999", 3, "got '9999999'"),
        ("a:", 3, "got ''"),
        ("a:٤", 3, "got '٤'"),
        ("[::1]:x", 7, "got 'x'"),
        ("a,2", 3, "a host must be a name or an address, got '2'"),
        ("a:4,b:4:2", 5, "got 'b:4:2'"),
        ("::1::", 1, "got '::1::'"),
        ("[a:b]", 2, "got 'a:b'"),
        ("fe80::1%e th", 1, "got 'fe80::1%e th'"),
        ("a,-oProxyCommand=x", 3, "got '-oProxyCommand=x'"),
        ("n[1-2]/x", 1, "got 'n1/x'"),
        ("a;rm", 1, "got 'a;rm'"),
        ("a b", 1, "got 'a b'"),
        ("$(x)", 1, "got '$(x)'"),
        ("a\nb", 1, r"got 'a\nb'"),
        ("münster", 1, "got 'münster'"),
        ("x" * 254, 1, "a host must be a name"),
        ("b,me@a:2", 3, 'for the user write a and --ssh-args "-l me"'),
        ("n[1-", 1, "a range must be as in node[01-16,20], got 'n[1-'"),
        ("n]", 1, "a range must be"),
        ("n[1][2", 5, "a range must be"),
        ("n[]", 3, "a range must be as in node[01-16,20], got ''"),
        ("n[1,,2]", 5, "got ''"),
        ("n[3-1]", 3, "got '3-1'"),
        ("n[a-c]", 3, "got 'a-c'"),
        ("n[1-2:2]", 1, "a range must be"),
        ("n[0-100000]", 3, "a range must have at most 100000 names"),
        ("n[0-60000,0-60000]", 11, "at most 100000 names"),
        ("n[1-400][1-400]", 1, "at most 100000 names"),
        ("n" + "[1-9]" * 3000, 1, "at most 100000 names"),
    ],
)
def test_mistakes_in_lists(text, column, part):
    with pytest.raises(LaunchError) as error:
        parse_hosts(text)
    assert f"column {column}: " in str(error.value)
    assert part in str(error.value)


def test_what_names_the_list_in_errors():
    with pytest.raises(LaunchError, match=r"^SLURM_JOB_NODELIST 'a\[', column 1: "):
        parse_hosts("a[", "SLURM_JOB_NODELIST")


def test_many_brackets():
    assert expand("n" + "[1]" * 70) == ["n" + "1" * 70]


def test_expand():
    assert expand("node[01-03,7]") == ["node01", "node02", "node03", "node7"]
    assert expand("fe80::1") == ["fe80::1"]
    with pytest.raises(LaunchError, match=r"host 'a\[x\]', column 3"):
        expand("a[x]")


FORMS = "\ufeff# the cluster\r\n\r\na\r\n\tb:4 # big\r\nc 4\r\nd slots=4 max-slots=8\r\n" + (
    "e slots = 2 max_slots= 3\r\nf max-slots =5\r\n[::1]:2\r\nfe80::1 slots=3\r\n"
    "n[01-02] slots=2\r\na:2\r\nb slots-max=6#x\r\ng cpu=2 count_max=3"
)


def test_forms_in_files(hostfile):
    assert read_hostfile(hostfile(FORMS)) == (
        Host("a", 3),
        Host("b", 5, 10),
        Host("c", 4),
        Host("d", 4, 8),
        Host("e", 2, 3),
        Host("f", 1, 5),
        Host("::1", 2),
        Host("fe80::1", 3),
        Host("n01", 2),
        Host("n02", 2),
        Host("g", 2, 3),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\nb\nc slots=x", "hosts.txt:3:9: slots must be a whole number, 1 or more, got 'x'; as"),
        ("a slots  =  0", "hosts.txt:1:13: slots must be"),
        ("a slots=", "hosts.txt:1:9: slots must be"),
        ("a max_slots=1.5", "hosts.txt:1:13: max_slots must be"),
        ("a four", "hosts.txt:1:3: slots must be a whole number"),
        ("a ranks=4", "hosts.txt:1:3: a word must be slots=N or max-slots=N, got 'ranks=4'"),
        ("a slots=4=5", "hosts.txt:1:10: a word must be slots=N or max-slots=N, got '=5'"),
        ("a = 4", "hosts.txt:1:1: a host must come first, got 'a = 4'"),
        ("= 4", "hosts.txt:1:1: a host must come first"),
        ("a:2 slots=4", "hosts.txt:1:5: slots must be given once, got 'slots=4' too"),
        ("a:1 1", "hosts.txt:1:5: slots must be given once"),
        ("a slots=4 max-slots=2", "hosts.txt:1:1: max-slots must be 4 or more, got 2"),
        ("a\n\n  me@b slots=2", "hosts.txt:3:3: a host must be a name alone, got 'me@b'"),
        ("a, b", "hosts.txt:1:1: a host must be a name or an address, got 'a,'"),
        ("// a", "hosts.txt:1:1: a host must be a name or an address, got '//'"),
        (b"a\n\xff", r"hosts.txt:2:1: a host must be a name or an address, got '\udcff'"),
        ("a\x0b\x0cb", "hosts.txt:1:4: slots must be"),
        ("a\rb\x00", "hosts.txt:2:1: a host must be"),
        ("\n # a\n", "the host file must name a host, got none in 'hosts.txt'"),
        ("", "the host file must name a host, got none"),
    ],
)
def test_mistakes_in_files(hostfile, text, message):
    with pytest.raises(LaunchError) as error:
        read_hostfile(hostfile(text))
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("path", ["none.txt", ".", "a\0b"])
def test_files_that_are_none(hostfile, path):
    with pytest.raises(LaunchError, match="the host file must be a readable file, got "):
        read_hostfile(path)


def test_place_by_slots():
    named = parse_hosts("a:4,b:2,c")
    assert place(named, None) == (Placement("a", 4), Placement("b", 2), Placement("c", 1))
    assert place(named, 5) == (Placement("a", 4), Placement("b", 1))
    with pytest.raises(LaunchError, match=r"at most 7, the slots of all hosts, got 9; .* a:6"):
        place(named, 9)


def test_place_above_slots():
    named = (Host("a", 2, 3), Host("b", 1, 9), Host("c", 1))
    assert place(named, 6) == (Placement("a", 3), Placement("b", 2), Placement("c", 1))
    assert place(named, 13) == (Placement("a", 3), Placement("b", 9), Placement("c", 1))
    with pytest.raises(LaunchError, match=r"at most 13, .* got 14; .* a:3$"):
        place(named, 14)


NAMES = st.one_of(
    st.from_regex(hosts.NAME, fullmatch=True).filter(lambda n: len(n) < 60 and not n.isdigit()),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
)
HOSTS = st.builds(
    lambda name, slots, more: Host(name, slots, None if more is None else slots + more),
    NAMES,
    st.integers(1, 999_000),
    st.none() | st.integers(0, 99),
)
TRICKY = st.text(
    st.sampled_from(list("ab01,,::[[]]--=# \t\r\n.%@/'\"$;\\\0\ufeff\x85é٣")), max_size=30
)


def outcome(read, argument):
    """Hosts, all of them harmless, or the text of the error."""
    try:
        found = read(argument)
    except LaunchError as error:
        return (), str(error)
    for host in found:
        assert re.fullmatch(r"(?!-)[A-Za-z0-9_.:%-]+", host.name)
        assert 1 <= host.slots <= host.limit
    return found, ""


@given(st.one_of(st.text(), TRICKY, st.text(string.printable)))
@settings(max_examples=600, deadline=None)
def test_any_list(text):
    found, error = outcome(parse_hosts, text)
    assert found or re.search(r"column \d+: ", error)


@given(st.one_of(st.binary(), TRICKY.map(str.encode), st.text().map(str.encode)))
@settings(
    max_examples=600, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_file(hostfile, data):
    found, error = outcome(read_hostfile, hostfile(data))
    assert found or re.match(r"hosts\.txt:\d+:\d+: |the host file must name a host", error)


@given(st.lists(HOSTS, min_size=1, max_size=5, unique_by=lambda host: host.name), st.data())
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_round_trip(hostfile, named, data):
    bracketed = [f"[{host.name}]" if ":" in host.name else host.name for host in named]
    text = ",".join(f"{b}:{h.slots}" for b, h in zip(bracketed, named, strict=True))
    assert parse_hosts(text) == tuple(Host(h.name, h.slots) for h in named)
    lines = []
    for name, host in zip(bracketed, named, strict=True):
        forms = [f"{name}:{host.slots}", f"{name} {host.slots}", f"{host.name}\tslots={host.slots}"]
        most = "" if host.max_slots is None else f" max-slots = {host.max_slots}"
        lines.append(data.draw(st.sampled_from(forms)) + most)
    assert read_hostfile(hostfile(data.draw(st.sampled_from(["\n", "\r\n"])).join(lines))) == (
        *named,
    )


@given(st.lists(HOSTS, min_size=1, max_size=5, unique_by=lambda h: h.name), st.integers(1, 400))
def test_place_any(named, np):
    named = tuple(Host(h.name, h.slots % 50 + 1, h.max_slots and h.slots % 50 + 5) for h in named)
    most = sum(host.limit for host in named)
    if np > most:
        with pytest.raises(LaunchError, match=f"at most {most}, "):
            place(named, np)
        return
    placed = {each.host: each.ranks for each in place(named, np)}
    assert sum(placed.values()) == np
    assert min(placed.values()) >= 1
    assert all(placed.get(host.name, 0) <= host.limit for host in named)
    if np >= sum(host.slots for host in named):
        assert all(placed[host.name] >= host.slots for host in named)
