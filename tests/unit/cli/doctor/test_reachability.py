import pytest
from msgspec.structs import replace

from nexar.cli.doctor.observations import Attachment, Limits, ListenPort, Reach, RoundTrip, Version
from nexar.cli.doctor.reachability import cluster_findings, machine_findings, skews
from tests.unit.cli.doctor.seen import machine, report, reports

SMALL = Limits(open_files=20_000, receive_buffer_bytes=212_992, send_buffer_bytes=4 << 20)
LO = Attachment("lo", ("127.0.0.1/8",), 65536, up=True, loopback=True)


def test_a_healthy_machine_has_nothing_to_change():
    assert machine_findings(machine()) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"door": ListenPort(problem="NEXAR_PORT = 80 is refused")}, "cannot listen: NEXAR_PORT = 80"),
        ({"trips": (RoundTrip("tls", problem="refused"),)}, "cannot talk to itself over tls: refused"),
        ({"limits": Limits(open_files=256)}, "ulimit -n 4096"),
    ],
)
def test_what_keeps_a_cluster_from_working_has_to_be_changed(changes, words):
    (finding,) = machine_findings(machine(**changes))
    assert words in finding.text
    assert finding.needed


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trips": (RoundTrip("shm", problem="no room"),)}, "no shared memory for its ranks: no room"),
        ({"interfaces": (LO,)}, "no network but loopback"),
        ({"versions": (Version("nexar", "0.1.0"), Version("nexar-native", None))}, "`make setup` builds it"),
        (
            {"versions": (Version("nexar", "0.2.0"), Version("nexar-native", "0.1.0"))},
            "install the wheels of one version",
        ),
        ({"limits": SMALL}, "`sysctl -w net.core.rmem_max=4194304`"),
        ({"load": 9.0}, "9 processes want 2 CPUs"),
    ],
)
def test_what_only_slows_a_cluster_down_would_help(changes, words):
    (finding,) = machine_findings(machine(**changes))
    assert words in finding.text
    assert not finding.needed


def test_who_does_not_want_quic_reads_nothing_about_it():
    without = (Version("nexar", "0.1.0"), Version("nexar-native", None))
    assert machine_findings(machine(wanted=("shm", "tls"), versions=without, limits=SMALL)) == []


def test_what_must_be_changed_comes_first():
    found = machine_findings(machine(load=9.0, limits=Limits(open_files=256)))
    assert [finding.needed for finding in found] == [True, False]


GOOD = 50e-6


def texts(found, *, needed=True):
    return [finding.text for finding in found if finding.needed is needed]


def two(there, back, **changes):
    """Host a with rank 0, host b with rank 1; what each found over (quic, tls)."""
    return reports(
        report(0, "a", (1, "quic", there[0]), (1, "tls", there[1]), **changes),
        report(1, "b", (0, "quic", back[0]), (0, "tls", back[1]), **changes),
    )


def test_where_everybody_reaches_everybody_there_is_nothing_to_change():
    assert cluster_findings(two((GOOD, GOOD), (GOOD, GOOD)), 2) == []


def test_a_host_that_udp_does_not_reach_is_named_with_the_port_and_the_way_out():
    found = cluster_findings(two(("no answer", GOOD), (GOOD, GOOD)), 2)
    assert texts(found) == [
        "b cannot be reached over UDP from a (no answer): open port 4000 for UDP there, or set NEXAR_TRANSPORTS=shm,tls"
    ]


def test_a_port_that_no_firewall_can_know_is_to_be_fixed_first():
    (text,) = texts(cluster_findings(two(("no answer", GOOD), (GOOD, GOOD), fixed_port=False), 2))
    assert "open a port (fix it with NEXAR_PORT or NEXAR_PORT_RANGE) for UDP there" in text


def test_closed_tcp_matters_only_where_udp_is_closed_too():
    found = cluster_findings(two((GOOD, "refused"), (GOOD, GOOD)), 2)
    assert texts(found) == []
    assert texts(found, needed=False) == ["b cannot be reached over TCP from a (refused): open port 4000 for TCP there"]


def test_a_direction_that_is_closed_altogether_has_to_be_opened():
    found = texts(cluster_findings(two(("lost", "lost"), (GOOD, GOOD)), 2))
    assert [text.split(" (")[0] for text in found] == [
        "b cannot be reached over UDP from a",
        "b cannot be reached over TCP from a",
    ]


def test_two_hosts_that_cannot_reach_each_other_are_reported_once():
    (text,) = texts(cluster_findings(two(("lost", "refused"), ("lost", "lost")), 2))
    assert text.startswith("a and b cannot reach each other (UDP: lost; TCP: refused): open port 4000")


def test_a_transport_that_one_side_does_without_is_nobodys_fault():
    assert cluster_findings(two((None, GOOD), (None, GOOD)), 2) == []
    assert cluster_findings(two(("not offered", GOOD), (GOOD, GOOD)), 2), "its words do not make it so"


def test_many_ranks_of_one_host_find_out_one_thing():
    closed = [report(rank, "a", (2, "quic", "lost"), (2, "tls", GOOD)) for rank in (0, 1)]
    other = report(2, "b", (0, "quic", GOOD), (1, "quic", GOOD))
    assert len(cluster_findings(reports(*closed, other), 3)) == 1


def test_a_rank_that_sent_no_report_is_named():
    assert texts(cluster_findings(reports(report(0, "a")), 2)) == [
        "rank 1 sent no report: see what its own doctor printed"
    ]


def test_hosts_of_one_name_are_distinguished_by_their_ids():
    seen = two(("lost", GOOD), (GOOD, GOOD))
    alike = {
        rank: replace(each, machine=replace(each.machine, name="node", host=f"id{rank}")) for rank, each in seen.items()
    }
    (text,) = texts(cluster_findings(alike, 2))
    assert text.startswith("node (id1) cannot be reached over UDP from node (id0)")


def test_what_is_wrong_with_a_machine_is_said_once_for_each_host():
    busy = [report(rank, "a", load=50.0) for rank in (0, 1)]
    assert len(cluster_findings(reports(*busy), 2)) == 1


def with_skew(source, dest, round_trip, skew):
    return Reach(source, dest, "tls", round_trip=round_trip, skew=skew)


def test_a_clock_is_compared_with_that_of_rank_0_by_the_shortest_trip_either_way():
    first = replace(report(0, "a"), reaches=(with_skew(0, 1, 0.9, 5.0), with_skew(0, 2, 0.1, -3.0)))
    second = replace(report(1, "b"), reaches=(with_skew(1, 0, 0.1, -4.0), with_skew(1, 2, 0.1, 99.0)))
    assert skews(reports(first, second)) == {0: 0.0, 1: 4.0, 2: -3.0}


def test_a_clock_that_is_far_off_has_to_be_set():
    first = replace(report(0, "a"), reaches=(with_skew(0, 1, GOOD, -700.0),))
    found = cluster_findings(reports(first, replace(report(1, "b"), reaches=(with_skew(1, 0, GOOD, 700.0),))), 2)
    assert texts(found) == ["the clock of b is 700 s behind that of a: let both keep time by NTP"]
