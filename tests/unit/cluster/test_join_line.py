import os
import signal
import threading
import time

import pytest

from nexar.cluster.join_line import Impostor, JoinLine, LineLost, RefusedBySeed
from nexar.errors import VersionMismatch
from nexar.security.proof import Role, prove
from nexar.wire.frame import Kind
from nexar.wire.handshake import PROTOCOL_VERSION
from nexar.wire.joining import Challenge, ChildDied, Leave, Refused, Renewed, encode_join
from tests.ranks import PATIENCE
from tests.unit.cluster.fake_carrier import as_carrier
from tests.unit.cluster.seed_side import CERTIFICATE, INVITATION, SECRET, SeedSide

NODE = 77
RENEWED = Renewed(b"certificate")


def soon() -> float:
    return time.monotonic() + PATIENCE


def over() -> float:
    return time.monotonic() - 1


def open_line(seed: SeedSide) -> JoinLine:
    return JoinLine(as_carrier(seed))


def greet(line: JoinLine, role: Role = "candidate") -> bytes:
    return line.prove_each_other(INVITATION, NODE, role, frozenset({"tls"}), soon())


class Honest(SeedSide):
    def greeted(self) -> None:
        self.challenge()


# ---------------------------------------------------------------- proving


@pytest.mark.parametrize("role", ["candidate", "launcher"])
def test_who_proves_itself_is_answered_with_our_proof(role: Role) -> None:
    seed = Honest()
    proof = greet(open_line(seed), role)
    assert seed.hello is not None
    assert (seed.hello.node, seed.hello.role, seed.hello.capabilities) == (NODE, role, frozenset({"tls"}))
    assert proof == prove(SECRET, role, seed.hello.nonce, seed.nonce, CERTIFICATE)
    assert seed.admitted


@pytest.mark.parametrize(
    "seed",
    [Honest(secret=bytes(32)), Honest(certificate=b"a certificate of somebody in between"), Honest(certificate=None)],
    ids=["another secret", "another certificate", "no certificate"],
)
def test_an_impostor_hears_nothing_that_depends_on_the_secret(seed: Honest) -> None:
    with pytest.raises(Impostor, match="seed:1 cannot prove") as raised:
        greet(open_line(seed))
    assert seed.sent == []
    assert seed.aborted is not None
    assert not seed.admitted
    assert SECRET.hex() not in str(raised.value)


def test_two_hellos_never_have_the_same_nonce() -> None:
    seeds = [Honest(), Honest()]
    for seed in seeds:
        greet(open_line(seed))
    assert seeds[0].hello is not None
    assert seeds[1].hello is not None
    assert seeds[0].hello.nonce != seeds[1].hello.nonce


def test_a_seed_that_answers_a_hello_with_something_else_is_not_understood() -> None:
    seed = SeedSide()
    seed.greeted = lambda: seed.say_message(RENEWED)  # type: ignore[method-assign]
    with pytest.raises(LineLost, match="Renewed where Challenge was due"):
        greet(open_line(seed))


# ---------------------------------------------------------------- receiving


def test_messages_wait_until_they_are_taken_in_their_order() -> None:
    seed = SeedSide()
    line = open_line(seed)
    seed.say_message(RENEWED)
    seed.say_message(Leave("so long"))
    assert line.receive(soon()) == RENEWED
    assert line.expect(Leave, soon()) == Leave("so long")


def test_a_refusal_is_raised_with_the_seeds_reason() -> None:
    seed = SeedSide()
    line = open_line(seed)
    seed.say_message(Refused("this cluster is full"))
    with pytest.raises(RefusedBySeed) as raised:
        line.receive(soon())
    assert (raised.value.reason, raised.value.expelled) == ("this cluster is full", 0)


def test_a_seed_that_says_nothing_is_waited_for_until_the_deadline() -> None:
    with pytest.raises(TimeoutError, match="seed:1"):
        open_line(SeedSide()).receive(over())


def test_a_seed_of_another_version_is_named_with_both() -> None:
    seed = SeedSide()
    line = open_line(seed)
    seed.say(encode_join(RENEWED, PROTOCOL_VERSION + 1))
    with pytest.raises(VersionMismatch) as raised:
        line.receive(soon())
    assert (raised.value.ours, raised.value.theirs) == (PROTOCOL_VERSION, PROTOCOL_VERSION + 1)
    assert "seed:1" in str(raised.value)
    assert seed.aborted is not None


def test_nonsense_ends_the_line_and_stays_its_last_word() -> None:
    seed = SeedSide()
    line = open_line(seed)
    seed.say(b"\x00nonsense")
    for _ in range(2):
        with pytest.raises(LineLost, match="not understood"):
            line.receive(soon())
    assert seed.aborted is not None


def test_nothing_but_control_frames_may_come_here() -> None:
    seed = SeedSide()
    line = open_line(seed)
    seed.say(b"data", Kind.EAGER)
    with pytest.raises(LineLost, match="kind"):
        line.receive(soon())
    assert seed.aborted is not None


def test_a_seed_that_talks_without_end_is_cut_off() -> None:
    seed = SeedSide()
    line = open_line(seed)
    said = 0
    while seed.aborted is None:
        seed.say_message(RENEWED)
        said += 1
        assert said < 1000
    assert [line.receive(soon()) for _ in range(said - 1)] == [RENEWED] * (said - 1)
    with pytest.raises(LineLost, match="more than anybody asked for"):
        line.receive(soon())


@pytest.mark.parametrize("how", ["lose", "half_close"])
def test_what_was_said_before_the_end_is_heard_before_it(how: str) -> None:
    seed = SeedSide()
    line = open_line(seed)
    seed.say_message(RENEWED)
    getattr(seed, how)()
    assert line.receive(soon()) == RENEWED
    with pytest.raises(LineLost):
        line.receive(soon())


# ---------------------------------------------------------------- sending, and the end


def test_what_cannot_be_sent_any_more_is_a_lost_line() -> None:
    seed = Honest()
    line = open_line(seed)
    greet(line)
    seed.lost = True
    with pytest.raises(LineLost, match="it is gone"):
        line.send(ChildDied(1, "killed"))


def test_leaving_is_told_and_polite() -> None:
    seed = Honest()
    line = open_line(seed)
    greet(line)
    line.leave("done")
    assert seed.sent == [Leave("done")]
    assert seed.finished
    assert seed.aborted is None


def test_leaving_a_seed_that_is_gone_troubles_nobody() -> None:
    seed = SeedSide()
    line = open_line(seed)
    seed.lost = True
    line.leave()


def test_an_interrupt_ends_a_receive_in_another_thread() -> None:
    line = open_line(SeedSide())
    threading.Timer(0.02, line.interrupt).start()
    with pytest.raises(LineLost, match="stopped listening"):
        line.receive(soon())


def test_ctrl_c_ends_a_receive() -> None:
    line = open_line(SeedSide())
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        line.receive(soon())


def test_a_challenge_is_only_what_a_seed_says() -> None:
    seed = SeedSide()
    line = open_line(seed)
    seed.say_message(Challenge(bytes(32), bytes(32)))
    with pytest.raises(LineLost, match="Challenge where Renewed was due"):
        line.expect(Renewed, soon())
