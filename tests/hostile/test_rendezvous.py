"""Somebody who can write to the board on which ranks meet (torch's store) and poses as rank 0."""

import pytest

import nexar
from nexar.launch.rendezvous import (
    RendezvousAnswer,
    RendezvousHello,
    RendezvousRound,
    _answer_key,
    _hello_key,
    accepted_way,
    decoded,
    encoded,
    join_through_store,
)

TOKEN = "0123456789abcdef" * 4
EVENT_TIMEOUT = 30.0


class HostileBoard:
    """Answers a hello with a ticket of a cluster of its own."""

    def __init__(self, ticket: str) -> None:
        self._texts = {"nexar/round": encoded(RendezvousRound("1f", 2))}
        self._ticket = ticket

    def put(self, key: str, text: str) -> None:
        assert key == _hello_key("1f", 1)
        received = [decoded(text, RendezvousHello).number]
        self._texts[_answer_key("1f")] = encoded(RendezvousAnswer(received, "ticket", self._ticket))

    def find(self, key: str) -> str | None:
        return self._texts.get(key)


@pytest.mark.parametrize(
    ("settings", "variable"),
    [
        ({"cluster_token": TOKEN}, "NEXAR_CLUSTER_TOKEN"),
        ({"cluster_token": TOKEN, "ticket_in_store": True}, "NEXAR_CLUSTER_TOKEN"),
        ({}, "NEXAR_TICKET_IN_STORE"),
    ],
    ids=["with a token", "with a token and the permission", "without a token"],
)
def test_a_writer_of_the_board_cannot_steer_a_rank_into_its_own_cluster(settings, variable):
    with nexar.Seed(listen="127.0.0.1:0", size=1) as hostile:
        with pytest.raises(nexar.ConfigError) as caught:
            join_through_store(HostileBoard(hostile.ticket), 1, 2, EVENT_TIMEOUT, **settings)
        assert not hostile.membership
    assert caught.value.variable == variable


@pytest.mark.parametrize("way", ["failed", "token_needed"])
def test_a_writer_of_the_board_cannot_write_to_the_terminal_of_a_rank(way):
    with pytest.raises((nexar.UsageError, nexar.ConfigError)) as caught:
        accepted_way(RendezvousAnswer([], way, "\x1b]0;title\x07\x1b[2Jred\nand more"), nexar.Config())
    assert all(line.isprintable() for line in str(caught.value).split("\n"))
    assert "and more" in str(caught.value)
