import pytest

from nexar.cluster.decisions.admission_events import Watched
from nexar.cluster.decisions.authenticating import MAX_ONLOOKERS, WRONG_SECRET, Onlookers, authenticate
from nexar.cluster.decisions.guest import Guest
from nexar.cluster.decisions.refusals import Refusal
from nexar.wire.handshake import Hello


def guest(role: str = "onlooker") -> Guest:
    return Guest(1, "10.0.0.1:1", Hello(7, role))  # type: ignore[arg-type]


def test_an_onlooker_proves_itself_once_and_needs_no_key() -> None:
    somebody = guest()
    assert authenticate(somebody, "onlooker", Watched(1, proof_ok=True)).node == 7
    assert somebody.watches
    assert not somebody.fingerprint
    with pytest.raises(Refusal, match="twice"):
        authenticate(somebody, "onlooker", Watched(1, proof_ok=True))


def test_who_does_not_know_the_secret_sees_nothing() -> None:
    somebody = guest()
    with pytest.raises(Refusal, match=WRONG_SECRET):
        authenticate(somebody, "onlooker", Watched(1, proof_ok=False))
    assert not somebody.watches


def test_nobody_watches_before_its_hello_or_in_another_role() -> None:
    with pytest.raises(Refusal, match="before it said hello"):
        authenticate(Guest(1, "here"), "onlooker", Watched(1, proof_ok=True))
    with pytest.raises(Refusal, match="says candidate, and it asked for what is for another role: onlooker"):
        authenticate(guest("candidate"), "onlooker", Watched(1, proof_ok=True))


def test_there_are_only_so_many_onlookers() -> None:
    onlookers = Onlookers()
    for connection in range(MAX_ONLOOKERS):
        onlookers.enter(Guest(connection, "here"))
    with pytest.raises(Refusal, match="others watch already"):
        onlookers.enter(Guest(1000, "here"))
    onlookers.leave(Guest(3, "here"))
    onlookers.enter(Guest(1000, "here"))
