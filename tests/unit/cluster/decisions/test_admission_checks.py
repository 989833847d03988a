import pytest

from nexar.cluster.decisions.admission_checks import (
    MAX_OBSERVERS,
    WRONG_SECRET,
    AdmissionLimits,
    JoinConnectionState,
    Observers,
    authenticate,
)
from nexar.cluster.decisions.admission_events import BoardRequested
from nexar.cluster.decisions.refusals import Refusal
from nexar.wire.hello import Hello


def pending(role: str = "onlooker") -> JoinConnectionState:
    return JoinConnectionState(1, "10.0.0.1:1", Hello(7, role))  # type: ignore[arg-type]


def test_an_observer_proves_itself_once_and_needs_no_key() -> None:
    somebody = pending()
    assert authenticate(somebody, "onlooker", BoardRequested(1, proof_ok=True)).node == 7
    assert somebody.watches
    assert not somebody.fingerprint
    with pytest.raises(Refusal, match="twice"):
        authenticate(somebody, "onlooker", BoardRequested(1, proof_ok=True))


def test_who_does_not_know_the_secret_sees_nothing() -> None:
    somebody = pending()
    with pytest.raises(Refusal, match=WRONG_SECRET):
        authenticate(somebody, "onlooker", BoardRequested(1, proof_ok=False))
    assert not somebody.watches


def test_nobody_watches_before_its_hello_or_in_another_role() -> None:
    with pytest.raises(Refusal, match="before it sent its hello"):
        authenticate(JoinConnectionState(1, "here"), "onlooker", BoardRequested(1, proof_ok=True))
    with pytest.raises(Refusal, match="says candidate, but its request is for the role onlooker"):
        authenticate(pending("candidate"), "onlooker", BoardRequested(1, proof_ok=True))


def test_there_are_only_so_many_onlookers() -> None:
    onlookers = Observers()
    for connection in range(MAX_OBSERVERS):
        onlookers.enter(JoinConnectionState(connection, "here"))
    with pytest.raises(Refusal, match="observers are connected already"):
        onlookers.enter(JoinConnectionState(1000, "here"))
    onlookers.leave(JoinConnectionState(3, "here"))
    onlookers.enter(JoinConnectionState(1000, "here"))


def test_by_default_a_cluster_is_not_elastic_and_has_no_limit_of_its_own() -> None:
    assert (AdmissionLimits().elastic, AdmissionLimits().most) == (False, 0)
