"""Networks: what collectives take on two levels, fits, profiles and what is no profile."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpicomp.errors import MpicompError
from mpicomp.predict.collectives import ALGORITHMS, fastest
from mpicomp.predict.network import MEASURED, Link, Network, Profile, Sample, fit, load

FAST, SLOW = Link(1e-6, 1e-10), Link(1e-4, 1e-8)
WITHIN, ACROSS = dict.fromkeys(MEASURED, FAST), dict.fromkeys(MEASURED, SLOW)


def cluster(hosts, ranks_per_host):
    return Network(hosts, ranks_per_host, WITHIN, ACROSS)


def test_one_rank_waits_for_nobody():
    assert cluster(1, 1).seconds("all-reduce", 1e9) == 0


def test_two_hosts_by_hand():
    """One message each way of all bytes, alpha + B beta."""
    assert cluster(2, 1).seconds("all-reduce", 1e6) == pytest.approx(1e-4 + 1e-2)


def test_all_reduce_has_two_levels():
    both = cluster(4, 8).seconds("all-reduce", 1e6)
    within, across = cluster(1, 8), cluster(4, 1)
    expected = within.seconds("all-reduce", 1e6) + across.seconds("all-reduce", 1e6)
    assert both == pytest.approx(expected)


def test_a_gather_takes_in_what_all_other_ranks_have():
    """The host's link carries 31 shares, whoever of the host they are for first."""
    work = fastest("all-gather", 32, 1e6, SLOW.alpha, SLOW.beta)
    assert work.num_bytes == 31e6
    assert cluster(4, 8).seconds("all-gather", 1e6) == work.seconds(SLOW.alpha, SLOW.beta)


@pytest.mark.parametrize(
    ("ranks", "hosts", "local"), [(1, 1, 1), (2, 1, 2), (4, 1, 4), (8, 2, 4), (4096, 1024, 4)]
)
def test_hosts_fill_up_before_others_are_added(ranks, hosts, local):
    scaled = cluster(2, 4).with_ranks(ranks)
    assert (scaled.hosts, scaled.ranks_per_host) == (hosts, local)


def test_ranks_that_fill_no_host():
    with pytest.raises(ValueError, match="must be a multiple of the 4 ranks of a host, got 6"):
        cluster(2, 4).with_ranks(6)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        cluster(2, 4).with_ranks(0)


def test_hosts_that_were_not_measured():
    with pytest.raises(ValueError, match="8 ranks need more than the one host"):
        Network(1, 4, WITHIN, {}).with_ranks(8)


def test_another_bandwidth():
    other = cluster(2, 1).with_link(gigabits=8)
    assert other.across["all-reduce"].beta == pytest.approx(1e-9)
    assert other.across["all-reduce"].alpha == SLOW.alpha
    assert other.across["all-reduce"].gigabits == pytest.approx(8)


@given(
    collective=st.sampled_from(sorted(ALGORITHMS)),
    ranks=st.integers(2, 64),
    alpha=st.floats(1e-7, 1e-3),
    beta=st.floats(1e-11, 1e-7),
)
def test_a_fit_finds_what_the_samples_were_made_from(collective, ranks, alpha, beta):
    samples = [
        Sample(
            collective,
            ranks,
            size,
            fastest(collective, ranks, size, alpha, beta).seconds(alpha, beta),
        )
        for size in (1 << 6, 1 << 12, 1 << 18, 1 << 24, 1 << 28)
    ]
    link = fit(samples)
    for sample in samples:
        work = fastest(collective, ranks, sample.num_bytes, link.alpha, link.beta)
        assert work.seconds(link.alpha, link.beta) == pytest.approx(sample.seconds, rel=0.05)


def test_a_fit_is_never_negative():
    """Times that fall with size, as a burst of a shaped link makes them."""
    falling = [Sample("all-reduce", 2, size, 1 / size) for size in (10, 1000, 100_000)]
    link = fit(falling)
    assert link.alpha >= 0
    assert link.beta >= 0
    flat = [Sample("all-reduce", 2, size, 1e-3) for size in (10, 20)]
    assert min(fit(flat).alpha, fit(flat).beta) >= 0


# Profiles.


@pytest.fixture
def profile():
    samples = {"across": (Sample("all-reduce", 2, 1024, 1e-3),), "within": ()}
    return Profile(cluster(2, 4), {"processor": "Z80", "cores": "1"}, samples)


def test_a_profile_is_read_as_it_was_written(profile, tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile.as_json()))
    assert load(path) == profile


def test_a_profile_from_another_machine(profile):
    profile.check_machine({"processor": "Z80", "cores": "1"})
    with pytest.raises(MpicompError, match=r"whose cores is '1', not '64'.*--foreign-network"):
        profile.check_machine({"processor": "Z80", "cores": "64"})


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "{}", '{"network": 3}', '{"network": {"hosts": 1, "ranks_per_host": 1}}'],
)
def test_what_is_no_profile(text, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(MpicompError, match="must be a profile that"):
        load(path)


def test_no_file(tmp_path):
    with pytest.raises(MpicompError, match="cannot be read: No such file"):
        load(tmp_path / "none.json")


@pytest.mark.parametrize("change", [{"hosts": 0}, {"within": {}}, {"across": {}}])
def test_a_profile_that_lacks_something(profile, tmp_path, change):
    record = json.loads(json.dumps(profile.as_json()))
    record["network"] |= change
    (tmp_path / "profile.json").write_text(json.dumps(record))
    with pytest.raises(MpicompError, match="must be a profile that"):
        load(tmp_path / "profile.json")


@pytest.mark.parametrize("alpha", [float("nan"), -1.0])
def test_links_are_numbers(alpha):
    with pytest.raises(ValueError, match="alpha and beta must be finite"):
        Link(alpha, 1e-9)


def test_all_to_all_sends_to_each_rank_of_other_hosts():
    """24 messages for ranks elsewhere, and 8 ranks that share the host's link."""
    seconds = cluster(4, 8).seconds("all-to-all", 32e6)
    assert seconds == pytest.approx(24 * SLOW.alpha + 24e6 * 8 * SLOW.beta)
