"""What goes wrong for users of such systems, in real processes: the right answer, or an error that names who."""

import json
from typing import Any

import pytest

from nexar_tools.transports import why_unavailable
from tests.processes.launcher import Launch
from tests.processes.nexar_command import Nexar

MISTAKE = __file__.replace("test_mistakes.py", "mistake.py")
WAYS = [
    pytest.param("shm,tls", id="memory"),
    pytest.param("tls", id="tls"),
    pytest.param(
        "quic", id="quic", marks=pytest.mark.skipif(bool(why_unavailable("quic")), reason=str(why_unavailable("quic")))
    ),
]
"""Through the memory that ranks share, and through links."""
SOON = 1.0
CALLS = {
    "lengths": ("float32[4]", "float32[8]"),
    "large_lengths": ("float32[4]", "float32[1000000]"),
    "dtypes": ("float32[4]", "int32[4]"),
    "verbs": ("all_reduce of float64[4]", "broadcast of float64[4]"),
    "other_way": ("all_reduce of float64[4]", "all_to_all of float64[4]"),
    "roots": ("root 1", "root 0"),
    "algorithms": ("all_reduce of float64[4], sum, by ", "all_reduce of float64[4], sum, by ring"),
    "order": ("sum, by ring", "sum, by direct"),
}


Messages = dict[str, list[dict[str, Any]]]


def make(ways: str, tmp_path: Any, *mistakes: str, **variables: str) -> Messages:
    """What each rank said to each mistake."""
    with Nexar(
        "run", "-n", 2, "--on-failure", "continue", MISTAKE, *mistakes, cwd=tmp_path, NEXAR_TRANSPORTS=ways, **variables
    ) as ran:
        code = ran.end()
        assert code == 0, ran.stderr
        return _by_mistake(ran)


def _by_mistake(ran: Launch) -> Messages:
    facts = [json.loads(line[line.index("{") :]) for line in ran.stdout.splitlines() if "{" in line]
    found: Messages = {}
    for each in sorted(facts, key=lambda each: each["rank"]):
        found.setdefault(each["mistake"], []).append(each)
    return found


@pytest.fixture(scope="module", params=WAYS)
def messages(request: Any, tmp_path_factory: Any) -> Messages:
    """The messages of one launch, each mistake on a communicator of its own."""
    return make(request.param, tmp_path_factory.mktemp("mistakes"), "late", *CALLS, "strided", "odd_dtypes")


def test_who_comes_too_late_is_named_and_the_next_call_works(messages: Messages) -> None:
    waited, late = messages["late"]
    for each in (waited, late):
        assert each["error"] == "CollectiveTimeout", each
        assert each["ranks"] == [1], each
        assert "all_reduce #1" in each["text"]
        assert "last finished barrier #0" in each["text"]
        assert each["after"] == 2, each
    assert 0.5 <= waited["seconds"] < 0.5 + SOON
    assert late["seconds"] < 1.5 + SOON


@pytest.mark.parametrize("ways", ["shm,tls", "tls"])
def test_who_is_killed_is_named_at_once_and_the_other_goes_on(ways: str, tmp_path: Any) -> None:
    (survivor,) = make(ways, tmp_path, "killed")["killed"]
    assert survivor["error"] == "MembershipChanged", survivor
    assert survivor["ranks"] == [1]
    assert survivor["seconds"] < SOON
    assert survivor["after"] == "MembershipChanged"
    assert survivor["next"] == 1  # the sum of those who are left


@pytest.mark.parametrize("ways", ["shm,tls", "tls"])
def test_who_is_killed_is_named_at_once_under_the_manual_policy(ways: str, tmp_path: Any) -> None:
    (survivor,) = make(ways, tmp_path, "killed", NEXAR_RECOVERY_POLICY="manual")["killed"]
    assert survivor["error"] == "PeerLost", survivor
    assert survivor["ranks"] == [1]
    assert survivor["seconds"] < SOON
    assert survivor["after"] == "PeerLost"


@pytest.mark.parametrize("mistake", CALLS)
def test_ranks_that_call_different_things_are_all_notified_what_the_other_called(
    mistake: str, messages: Messages
) -> None:
    for rank, each in enumerate(messages[mistake]):
        assert each["after"] == "CollectiveMismatch", "the communicator is of no use any more"
        if "error" not in each:
            assert (mistake, rank) == ("verbs", 1), "only a root that sends and waits for nobody may be done before"
            continue
        assert each["error"] == "CollectiveMismatch", each
        assert each["ranks"] == [1 - rank], each
        mine, theirs = CALLS[mistake][rank], CALLS[mistake][1 - rank]
        here, there = each["text"].split(" here, ")
        assert mine in here, each
        assert theirs in there, each
        assert each["seconds"] < SOON


def test_a_column_is_broadcast_as_a_column(messages: Messages) -> None:
    first, second = messages["strided"]
    assert first["result"] == [[0, 1, 0]] * 5
    assert second["result"] == [[1, 1, 1]] * 5


def test_the_dtypes_that_others_refuse_are_reduced(messages: Messages) -> None:
    for each in messages["odd_dtypes"]:
        assert each["result"] == [[3.0] * 3] * 6
