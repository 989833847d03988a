import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from nexar import Config
from nexar.cli.doctor.command import _OwnSeed
from nexar.cli.doctor.observations import DoctorFinding
from nexar.cli.doctor.probe_session import ProbeConnection, ProbeSession, session_timeout
from nexar.cluster.handshake import send_control
from nexar.cluster.membership import Member, Membership
from nexar.cluster.node import Node
from nexar.security.invitation import FINGERPRINT_BYTES
from nexar.transport.base import CarrierLost, Expected
from nexar.transport.memory import MemoryNetwork
from nexar.wire.control import Introduce
from tests.unit.cli.doctor.seen import report

SOON = 10.0


class Practice:
    """Two doctors on memory, ranks 0 and 1."""

    def __init__(self, stack):
        network = MemoryNetwork()
        self.nodes = [stack.enter_context(Node(Config(), network)) for _ in range(2)]
        members = [Member(node.id, node.host, bytes(FINGERPRINT_BYTES), node.addresses()) for node in self.nodes]
        self.membership = Membership("doctors", 1, tuple(members))
        self.doctors = [ProbeSession(node) for node in self.nodes]
        for node, doctor in zip(self.nodes, self.doctors, strict=True):
            node.listen(doctor)
            stack.callback(doctor.close)

    def adopt(self):
        return [doctor.adopt(self.membership) for doctor in self.doctors]

    def dial(self):
        """From rank 0 to rank 1."""
        near, far = self.nodes
        return near.dialer.dial(far.addresses(), Expected(far.id), time.monotonic() + SOON)

    def connect(self):
        return self.doctors[0]._begin(self.dial(), 1)


@pytest.fixture
def practice():
    with ExitStack() as stack:
        yield Practice(stack)


def test_the_time_of_a_trip_and_the_other_clock_are_found(practice):
    assert practice.adopt() == [0, 1]
    found = practice.connect().measure(time.monotonic() + SOON)
    assert 0 < found.round_trip < 1
    assert abs(found.skew) < 1


def test_a_doctor_that_comes_early_waits_for_the_membership(practice):
    practice.doctors[0].adopt(practice.membership)
    conversation = practice.connect()
    practice.doctors[1].adopt(practice.membership)
    assert conversation.measure(time.monotonic() + SOON).round_trip > 0


def test_rank_0_receives_all_reports_and_everybody_its_conclusion(practice):
    practice.adopt()
    practice.connect()
    reported = []
    other = threading.Thread(target=lambda: reported.append(practice.doctors[1].submit(report(1, "b"), SOON)))
    other.start()
    reports = practice.doctors[0].collect(report(0, "a"), SOON)
    assert sorted(reports) == [0, 1]
    practice.doctors[0].conclude((DoctorFinding("open port 4000"),))
    other.join()
    assert reported == [(DoctorFinding("open port 4000"),)]


def test_a_doctor_without_a_way_to_rank_0_keeps_its_report(practice):
    practice.adopt()
    assert practice.doctors[1].submit(report(1, "b"), 0.05) is None


def test_rank_0_goes_on_without_a_report_that_does_not_come(practice):
    practice.adopt()
    assert sorted(practice.doctors[0].collect(report(0, "a"), 0.05)) == [0]


def test_a_transport_that_nobody_offers_is_not_dialed(practice):
    practice.adopt()
    assert {reach.offered for reach in practice.doctors[0].dial_all(0)} == {False}


def test_a_doctor_hangs_up_on_who_is_none(practice):
    practice.adopt()
    carrier, ended = practice.dial(), threading.Event()

    class Link:
        def carrier_lost(self, carrier, error):
            self.error = error
            ended.set()

    link = Link()
    carrier.attach(link)
    send_control(carrier, Introduce(rank=0, epoch=1))
    assert ended.wait(SOON)
    assert isinstance(link.error, CarrierLost)
    assert "accepts doctors only" in str(link.error)


def test_a_question_to_who_has_left_is_not_waited_for(practice):
    practice.adopt()
    conversation = practice.connect()
    conversation.measure(time.monotonic() + SOON)
    practice.doctors[1].close()
    with pytest.raises(CarrierLost):
        conversation.measure(time.monotonic() + SOON)


def test_the_timeout_grows_with_the_number_of_doctors():
    assert session_timeout(2) < session_timeout(64) < 600


@pytest.mark.parametrize(("address", "mtu"), [("10.0.0.2:4000", 1500), ("[fd00::2]:4000", 1520)])
def test_the_mtu_of_a_path_counts_the_headers(address, mtu):
    peer = SimpleNamespace(address=address)
    carrier = SimpleNamespace(attach=lambda _: None, stats=lambda: {"mtu": 1472.0}, peer=peer)
    assert ProbeConnection(carrier, lambda *_: None).mtu_bytes() == mtu


def test_a_doctor_that_writes_the_ticket_to_a_file_says_to_copy_it(capsys, tmp_path):
    _OwnSeed(3, None, tmp_path / "ticket")._invite("a secret")
    said = capsys.readouterr().err
    assert f"copy {tmp_path / 'ticket'} to the other hosts" in said.replace("\n", " ")
    assert "a secret" not in said
