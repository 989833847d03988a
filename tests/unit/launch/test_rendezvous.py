import pytest

from nexar.config import Config
from nexar.errors import ConfigError, UsageError
from nexar.launch.rendezvous import _said, understood
from nexar.security.invitation import Invitation, invitation_from_token
from nexar.security.join_ticket import format_ticket

TOKEN = "0123456789abcdef" * 4
INVITATION = Invitation(("127.0.0.1:4000",), bytes(32), bytes(range(32)))
TICKET = format_ticket(INVITATION)
SIZE = 4


def test_a_ticket_says_all_there_is_to_know() -> None:
    said = _said(INVITATION, Config(), TICKET, SIZE)
    assert understood(said, Config(), SIZE) == INVITATION


def test_where_all_know_the_token_no_secret_is_posted() -> None:
    config = Config(cluster_token=TOKEN)
    given = invitation_from_token(TOKEN, ["10.0.0.1:4000", "10.0.0.2:4000"])
    said = _said(given, config, TICKET, SIZE)
    assert TICKET not in said
    assert TOKEN not in said
    assert understood(said, config, SIZE) == given


def test_a_rank_that_does_not_know_the_token_is_told_what_to_set() -> None:
    said = _said(INVITATION, Config(cluster_token=TOKEN), TICKET, SIZE)
    with pytest.raises(ConfigError, match="NEXAR_CLUSTER_TOKEN"):
        understood(said, Config(), SIZE)


def test_what_rank_0_could_not_do_is_raised_by_the_others_too() -> None:
    with pytest.raises(UsageError, match="rank 0 could not open the cluster: no port is free"):
        understood("failed no port is free", Config(), SIZE)


def test_who_was_told_another_number_of_ranks_says_both() -> None:
    said = _said(INVITATION, Config(), TICKET, SIZE)
    with pytest.raises(UsageError, match="for 4 ranks, and this process was told that they are 3"):
        understood(said, Config(), SIZE - 1)


@pytest.mark.parametrize("text", ["something else", "", "ticket", f"ticket {TICKET}", "addresses 10.0.0.1:4000"])
def test_a_post_of_another_version_is_refused(text) -> None:
    with pytest.raises(UsageError, match="use one everywhere"):
        understood(text, Config(), SIZE)
