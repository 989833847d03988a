import pytest

from nexar.cli.doctor.advice import machine_findings
from nexar.cli.doctor.observations import Attachment, Door, Limits, Trip, Version
from tests.unit.cli.doctor.seen import machine

SMALL = Limits(open_files=20_000, receive_buffer_bytes=212_992, send_buffer_bytes=4 << 20)
LO = Attachment("lo", ("127.0.0.1/8",), 65536, up=True, loopback=True)


def test_a_healthy_machine_has_nothing_to_change():
    assert machine_findings(machine()) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"door": Door(problem="NEXAR_PORT = 80 is refused")}, "cannot listen: NEXAR_PORT = 80"),
        ({"trips": (Trip("tls", problem="refused"),)}, "cannot talk to itself over tls: refused"),
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
        ({"trips": (Trip("shm", problem="no room"),)}, "no shared memory for its ranks: no room"),
        ({"interfaces": (LO,)}, "no network but loopback"),
        ({"versions": (Version("nexar", "0.1.0"), Version("nexar-quic", None))}, "`make setup` builds it"),
        (
            {"versions": (Version("nexar", "0.2.0"), Version("nexar-quic", "0.1.0"))},
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


def test_who_does_not_want_quic_hears_nothing_of_it():
    without = (Version("nexar", "0.1.0"), Version("nexar-quic", None))
    assert machine_findings(machine(wanted=("shm", "tls"), versions=without, limits=SMALL)) == []


def test_what_must_be_changed_comes_first():
    found = machine_findings(machine(load=9.0, limits=Limits(open_files=256)))
    assert [finding.needed for finding in found] == [True, False]
