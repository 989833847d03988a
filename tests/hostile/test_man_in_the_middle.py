"""Somebody who ends the encryption between worker and seed: the worker goes no further, and nothing that passed lets
anybody in.
"""

import base64
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from nexar.cluster.seed import SeedService
from nexar.communicator.bootstrap import bootstrap
from nexar.config import Config
from nexar.errors import SeedUnreachable
from nexar.security.invitation import Invitation, format_ticket, invitation_from_token, parse_ticket
from nexar.wire.hello import decode_hello
from nexar.wire.join import MAX_JOIN_BYTES, Challenge, JoinRefusedMessage, decode_join
from tests.cluster.joiners import EVENT_TIMEOUT, join_dialer, wait_for_event
from tests.hostile.man_in_the_middle import Middle, between
from tests.hostile.unauthenticated_peers import connect_tls
from tests.processes.scale import measured, schemes

TOKEN = "a-token-that-nobody-else-could-guess-4711"
AT_ONCE = 5.0
"""Seconds. The worker has a minute; it must not need it to see that something is wrong."""


@pytest.fixture
def seed() -> Iterator[SeedService]:
    with SeedService("127.0.0.1:0", 1, cluster_token=TOKEN) as made:
        yield made


def dial(invitation: Invitation, scheme: str) -> tuple[SeedUnreachable, float]:
    """What a worker with this invitation raises, and after how many seconds."""
    begin = time.monotonic()
    with pytest.raises(SeedUnreachable) as raised:
        bootstrap(Config(transports=(scheme,)), invitation)
    return raised.value, time.monotonic() - begin


def by_token(middle: Middle) -> Invitation:
    return invitation_from_token(TOKEN, [middle.address])


def by_ticket(seed: SeedService, middle: Middle) -> Invitation:
    known = parse_ticket(seed.ticket)
    return parse_ticket(format_ticket(Invitation((middle.address,), known.secret, known.fingerprint)))


def forms_of(secret: bytes) -> list[bytes]:
    """The secret as it might show."""
    return [secret, secret.hex().encode(), base64.b64encode(secret)[:-2], base64.b32encode(secret)[:-4], TOKEN.encode()]


def the_honest_one_gets_in(seed: SeedService, scheme: str) -> None:
    with bootstrap(Config(transports=(scheme,)), parse_ticket(seed.ticket)) as comm:
        assert comm.size == 1


@schemes("quic", "tls")
def test_a_worker_with_a_token_sees_that_who_answers_cannot_prove_itself(
    seed: SeedService, scheme: str, record_property: object
) -> None:
    with between(scheme, seed.address) as middle:
        error, seconds = dial(by_token(middle), scheme)
    assert "cannot prove that it knows the secret" in error.cause
    assert "the connection is intercepted" in error.cause
    assert seconds < AT_ONCE
    measured(record_property, refused_after_s=round(seconds, 2))  # type: ignore[arg-type]
    said = middle.control_bodies("worker")
    assert len(said) == 1  # a hello, and nothing that depends on the secret
    assert decode_hello(said[0]).role == "candidate"
    for seen in middle.saw.values():
        assert not any(form in seen for form in forms_of(by_token(middle).secret))
    the_honest_one_gets_in(seed, scheme)


@schemes("quic", "tls")
def test_a_worker_with_a_ticket_sees_another_key(seed: SeedService, scheme: str, record_property: object) -> None:
    with between(scheme, seed.address) as middle:
        error, seconds = dial(by_ticket(seed, middle), scheme)
    assert "key" in error.cause
    assert "the seed with the key in the ticket" in error.cause
    assert seconds < AT_ONCE
    measured(record_property, refused_after_s=round(seconds, 2))  # type: ignore[arg-type]
    assert not middle.control_bodies("worker")  # not even a hello
    the_honest_one_gets_in(seed, scheme)


@schemes("quic", "tls")
def test_nothing_that_passed_lets_anybody_in(seed: SeedService, scheme: str) -> None:
    with between(scheme, seed.address) as middle, join_dialer(scheme) as dialer:
        dial(by_token(middle), scheme)
        hello = decode_hello(middle.control_bodies("worker")[0])
        (passed,) = [decode_join(body, MAX_JOIN_BYTES) for body in middle.control_bodies("seed")]
        assert isinstance(passed, Challenge)
        for proof in (passed.proof, passed.proof[::-1], passed.nonce):  # the only things that were ever made of it
            line = dialer.dial(seed, hello.node)
            line.nonce = hello.nonce
            line.hello()
            line.receive(Challenge)
            line.send(line.application(proof))
            assert "does not match" in line.receive(JoinRefusedMessage).reason
        wait_for_event(seed, "refused", "does not match", 3)
    assert seed.membership is None
    the_honest_one_gets_in(seed, scheme)


def test_the_recorded_bytes_said_again_lead_to_another_challenge_and_no_further(seed: SeedService) -> None:
    """As they were, on connections like those they were said on."""
    with between("tls", seed.address) as middle:
        dial(by_token(middle), "tls")
    (old,) = [decode_join(body, MAX_JOIN_BYTES) for body in middle.control_bodies("seed")]
    received = bytearray()
    with ExitStack() as stack:
        lines = [stack.enter_context(connect_tls(place(seed))) for _ in middle.said_by("worker")]
        for line, said in zip(lines, middle.said_by("worker"), strict=True):
            line.sendall(said)
        deadline = time.monotonic() + EVENT_TIMEOUT
        while b"challenge" not in received:
            assert time.monotonic() < deadline
            for line in lines:
                line.settimeout(0.05)
                try:
                    received += line.recv(1 << 12)
                except TimeoutError:
                    continue
    assert isinstance(old, Challenge)
    assert old.nonce not in received
    assert old.proof not in received
    assert seed.membership is None
    the_honest_one_gets_in(seed, "tls")


def place(seed: SeedService) -> tuple[str, int]:
    host, _, port = seed.address.rpartition(":")
    return host, int(port)
