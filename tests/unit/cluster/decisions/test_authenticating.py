import pytest

from nexar.cluster.decisions.admission_events import Watched
from nexar.cluster.decisions.authenticating import MAX_WATCHERS, WRONG_SECRET, Watchers, authenticate
from nexar.cluster.decisions.guest import Guest
from nexar.cluster.decisions.refusals import Refusal
from nexar.wire.handshake import Hello


def guest(role: str = "watcher") -> Guest:
    return Guest(1, "10.0.0.1:1", Hello(7, role))  # type: ignore[arg-type]


def test_a_watcher_proves_itself_once_and_needs_no_key() -> None:
    somebody = guest()
    assert authenticate(somebody, "watcher", Watched(1, proof_ok=True)).node == 7
    assert somebody.watches
    assert not somebody.fingerprint
    with pytest.raises(Refusal, match="twice"):
        authenticate(somebody, "watcher", Watched(1, proof_ok=True))


def test_who_does_not_know_the_secret_sees_nothing() -> None:
    somebody = guest()
    with pytest.raises(Refusal, match=WRONG_SECRET):
        authenticate(somebody, "watcher", Watched(1, proof_ok=False))
    assert not somebody.watches


def test_nobody_watches_before_its_hello_or_in_another_role() -> None:
    with pytest.raises(Refusal, match="before it said hello"):
        authenticate(Guest(1, "here"), "watcher", Watched(1, proof_ok=True))
    with pytest.raises(Refusal, match="a candidate and asked for what a watcher gets"):
        authenticate(guest("candidate"), "watcher", Watched(1, proof_ok=True))


def test_there_are_only_so_many_watchers() -> None:
    watchers = Watchers()
    for connection in range(MAX_WATCHERS):
        watchers.enter(Guest(connection, "here"))
    with pytest.raises(Refusal, match="others watch already"):
        watchers.enter(Guest(1000, "here"))
    watchers.leave(Guest(3, "here"))
    watchers.enter(Guest(1000, "here"))
