"""The ranks but the first one, and rank 0 until it opens the cluster, on a board that is a dictionary."""

from collections.abc import Callable

import pytest

from nexar.config import Config
from nexar.errors import ConfigError, FormationTimeout, OperationTimeout, UsageError
from nexar.launch.rendezvous import (
    RendezvousAnswer,
    RendezvousHello,
    RendezvousRound,
    _answer_key,
    _await_answer,
    _follow,
    _hello_key,
    _hellos,
    _open_cluster,
    accepted_way,
    chosen_way,
    decoded,
    encoded,
    separation,
    token_needed,
)
from nexar.security.invitation import Invitation, format_ticket, invitation_from_token

TOKEN = "0123456789abcdef" * 4
TICKET = format_ticket(Invitation(("127.0.0.1:4000",), bytes(32), bytes(range(32))))
HELLO = RendezvousHello("mine", 2, "one", "8.1")
LONG, SHORT = 60.0, 0.001


class Board:
    """Calls `react` after each text that is written: what another process would do then."""

    def __init__(self, texts: dict[str, str] | None = None, react: Callable[[str, str], None] | None = None) -> None:
        self.texts = texts or {}
        self._react = react

    def put(self, key: str, text: str) -> None:
        self.texts[key] = text
        if self._react is not None:
            self._react(key, text)

    def find(self, key: str) -> str | None:
        return self.texts.get(key)


def of_an_earlier_attempt() -> dict[str, str]:
    """A rendezvous that ended well."""
    return {
        "nexar/round": encoded(RendezvousRound("old", 2)),
        _hello_key("old", 1): encoded(RendezvousHello("earlier", 2, "one", "8.1")),
        _answer_key("old"): encoded(RendezvousAnswer(["earlier"], "addresses", "10.0.0.1:4000")),
    }


def test_the_answer_of_an_earlier_attempt_is_not_followed() -> None:
    def rank_0(key: str, text: str) -> None:
        if key == _hello_key("old", 1):  # the next attempt begins only now
            board.texts["nexar/round"] = encoded(RendezvousRound("new", 2))
        if key == _hello_key("new", 1):
            received = [decoded(text, RendezvousHello).number]
            board.texts[_answer_key("new")] = encoded(RendezvousAnswer(received, "addresses", "10.0.0.2:4000"))

    board = Board(of_an_earlier_attempt(), rank_0)
    assert _await_answer(board, 1, HELLO, LONG) == RendezvousAnswer(["mine"], "addresses", "10.0.0.2:4000")


def test_a_rank_0_that_does_not_come_again_is_waited_for_until_the_deadline() -> None:
    with pytest.raises(OperationTimeout, match="waiting for the process of rank 0"):
        _await_answer(Board(of_an_earlier_attempt()), 1, HELLO, SHORT)


def test_a_rank_is_not_notified_that_rank_0_is_missing_where_others_are() -> None:
    board = Board({"nexar/round": encoded(RendezvousRound("new", 2))})
    with pytest.raises(OperationTimeout, match="rank 0, which waits until all 2 ranks have come"):
        _await_answer(board, 1, HELLO, SHORT, SHORT)


def test_a_rank_beyond_the_size_of_the_world_learns_both_sizes() -> None:
    board = Board({"nexar/round": encoded(RendezvousRound("new", 2))})
    with pytest.raises(UsageError, match="rank 0 expects 2 ranks, but rank 5 expects 6"):
        _await_answer(board, 5, RendezvousHello("mine", 6, "one", "8.1"), SHORT, SHORT)


def test_rank_0_counts_those_who_came_to_the_board() -> None:
    board = Board({_hello_key("new", 2): encoded(RendezvousHello("theirs", 3, "one", "8.1"))})
    with pytest.raises(FormationTimeout, match=r"2 of 3 nodes joined .*\njoined: rank 0, rank 2"):
        list(_hellos(board, "new", 3, SHORT))


@pytest.mark.parametrize(("rank", "timeout"), [(1, LONG), (2, SHORT)], ids=["at once", "behind a rank that is missing"])
def test_rank_0_names_a_rank_with_another_world_size_although_others_are_missing(rank: int, timeout: float) -> None:
    """A rank with a smaller world size waits for nobody else: rank 0 alone knows of the others."""
    board = saying({rank: encoded(RendezvousHello("theirs", 3, "one", "8.1"))})
    answer = failed_answer(board, 4, timeout)
    assert answer.heard == ["theirs"]
    assert answer.content.startswith(f"rank 0 expects 4 ranks, but rank {rank} expects 3")


def failed_answer(board: Board, size: int, timeout: float) -> RendezvousAnswer:
    """What rank 0 leaves on the board when it cannot open the cluster."""
    hello = RendezvousHello("mine", size, "one", "8.1")
    with pytest.raises((FormationTimeout, UsageError)) as caught, _open_cluster(board, hello, Config(), None, timeout):
        pytest.fail("nothing was opened")
    answer = decoded(
        board.texts[_answer_key(decoded(board.texts["nexar/round"], RendezvousRound).number)], RendezvousAnswer
    )
    assert (answer.way, answer.content) == ("failed", str(caught.value))
    return answer


def saying(texts: dict[int, str]) -> Board:
    """These ranks say this as soon as rank 0 begins."""

    def react(key: str, text: str) -> None:
        if key == "nexar/round":
            number = decoded(text, RendezvousRound).number
            board.texts.update({_hello_key(number, rank): said for rank, said in texts.items()})

    board = Board(react=react)
    return board


def test_the_ranks_that_came_are_notified_which_rank_did_not() -> None:
    board = saying({2: encoded(RendezvousHello("theirs", 4, "one", "8.1"))})
    answer = failed_answer(board, 4, SHORT)
    assert answer.heard == ["theirs"]
    assert answer.content.startswith("the cluster did not form: ranks 1, 3 did not come to torch's store within 1 ms\n")
    with pytest.raises(UsageError, match=r"rank 0 could not open the cluster: .*ranks 1, 3 did not come"):
        accepted_way(answer, Config())


def test_the_other_ranks_are_notified_at_once_of_a_hello_that_cannot_be_read() -> None:
    board = saying({1: "{}", 2: encoded(RendezvousHello("theirs", 3, "one", "8.1"))})
    answer = failed_answer(board, 3, LONG)
    assert answer.heard == ["theirs"]
    assert "rank 1" in answer.content.splitlines()[0]


def test_a_rank_waits_a_moment_longer_than_rank_0_for_its_answer() -> None:
    """Rank 0 may have begun later, and its answer names who is missing."""
    answer = RendezvousAnswer(["mine"], "failed", "rank 2 did not come")
    finds = iter([None] * 3)

    class Late(Board):
        def find(self, key: str) -> str | None:
            return next(finds, encoded(answer)) if key == _answer_key("new") else super().find(key)

    assert _await_answer(Late({"nexar/round": encoded(RendezvousRound("new", 2))}), 1, HELLO, 0.0, LONG) == answer


def test_rank_0_informs_the_others_that_a_token_is_needed_and_publishes_no_ticket() -> None:
    def rank_1(key: str, text: str) -> None:
        if key == "nexar/round":
            number = decoded(text, RendezvousRound).number
            board.texts[_hello_key(number, 1)] = encoded(RendezvousHello("theirs", 2, "another", "8.1"))

    board = Board(react=rank_1)
    with pytest.raises(ConfigError, match="NEXAR_CLUSTER_TOKEN"), _open_cluster(board, HELLO, Config(), None, LONG):
        pytest.fail("nothing was opened")
    answer = decoded(
        board.texts[_answer_key(decoded(board.texts["nexar/round"], RendezvousRound).number)], RendezvousAnswer
    )
    assert (answer.heard, answer.way) == (["theirs"], "token_needed")


def test_with_a_token_only_addresses_are_followed() -> None:
    config = Config(cluster_token=TOKEN)
    followed = _follow(RendezvousAnswer([], "addresses", "10.0.0.1:4000,10.0.0.2:4000"), config, SHORT)
    assert followed == invitation_from_token(TOKEN, ["10.0.0.1:4000", "10.0.0.2:4000"])
    with pytest.raises(ConfigError, match="NEXAR_CLUSTER_TOKEN"):
        _follow(RendezvousAnswer([], "ticket", TICKET), config, SHORT)


def test_a_rank_that_does_not_know_the_token_is_notified_what_to_set() -> None:
    with pytest.raises(ConfigError, match="NEXAR_CLUSTER_TOKEN"):
        _follow(RendezvousAnswer([], "addresses", "10.0.0.1:4000"), Config(), SHORT)


def test_where_rank_0_has_a_ticket_each_rank_follows_its_own() -> None:
    answer = RendezvousAnswer([], "environment", "10.6.6.6:4000")
    assert _follow(answer, Config(ticket=TICKET), SHORT).addresses == ("127.0.0.1:4000",)
    with pytest.raises(ConfigError, match="NEXAR_TICKET"):
        _follow(answer, Config(), SHORT)


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "0" * 31, "0" * 32 + "/x", "G" * 32])
def test_the_store_cannot_lead_out_of_the_private_folder(name) -> None:
    with pytest.raises(UsageError, match="another program has written there"):
        _follow(RendezvousAnswer([], "file", name), Config(), SHORT)


PLAIN, WITH_TOKEN, PERMITTED = Config(), Config(cluster_token=TOKEN), Config(ticket_in_store=True)


def hello(number: str = "1", size: int = 2, host: str = "one", folder: str = "8.1") -> RendezvousHello:
    return RendezvousHello(number, size, host, folder)


ON_ONE_HOST = [hello("a"), hello("b")]
ON_TWO_HOSTS = [hello("a"), hello("b", host="two")]
IN_TWO_FOLDERS = [hello("a"), hello("b", folder="8.2")]


@pytest.mark.parametrize(
    ("config", "hellos", "way"),
    [
        (PLAIN, ON_ONE_HOST, "file"),
        (PERMITTED, ON_ONE_HOST, "file"),
        (PLAIN, ON_TWO_HOSTS, "token_needed"),
        (PLAIN, IN_TWO_FOLDERS, "token_needed"),
        (PERMITTED, ON_TWO_HOSTS, "ticket"),
        (PERMITTED, IN_TWO_FOLDERS, "ticket"),
        (WITH_TOKEN, ON_ONE_HOST, "addresses"),
        (WITH_TOKEN, ON_TWO_HOSTS, "addresses"),
    ],
)
def test_a_ticket_is_published_only_with_permission_and_never_beside_a_token(config, hellos, way) -> None:
    assert chosen_way(config, hellos, has_invitation=False) == way


@pytest.mark.parametrize("config", [PLAIN, WITH_TOKEN, PERMITTED])
def test_ranks_that_were_given_an_invitation_publish_none(config) -> None:
    assert chosen_way(config, ON_TWO_HOSTS, has_invitation=True) == "environment"


def test_ranks_of_which_one_has_no_private_folder_share_none() -> None:
    assert chosen_way(PLAIN, [hello(folder=""), hello(folder="")], has_invitation=False) == "token_needed"


@pytest.mark.parametrize("way", ["file", "ticket"])
def test_a_rank_with_a_token_accepts_no_ticket_from_the_store(way) -> None:
    config = Config(cluster_token=TOKEN, ticket_in_store=True)
    with pytest.raises(ConfigError, match=r"NEXAR_CLUSTER_TOKEN.*the same on all ranks, and rank 0 has none") as caught:
        accepted_way(RendezvousAnswer([], way, "what somebody wrote there"), config)
    assert TOKEN not in str(caught.value)


def test_a_rank_without_permission_accepts_no_ticket_from_the_store() -> None:
    answer = RendezvousAnswer([], "ticket", "what somebody wrote there")
    with pytest.raises(ConfigError, match="NEXAR_TICKET_IN_STORE"):
        accepted_way(answer, PLAIN)
    assert accepted_way(answer, PERMITTED) == "ticket"


def test_every_rank_is_notified_who_is_apart_and_what_to_set() -> None:
    reason = separation([*ON_TWO_HOSTS, hello("c")])
    assert reason == "rank 0 and rank 1 do not share one host"
    assert separation(IN_TWO_FOLDERS) == "rank 0 and rank 1 do not share one user and one temporary directory"
    with pytest.raises(ConfigError) as caught:
        accepted_way(RendezvousAnswer([], "token_needed", reason), PLAIN)
    assert str(caught.value) == str(token_needed(reason))
    first = str(caught.value).splitlines()[0]
    assert first == f"NEXAR_CLUSTER_TOKEN is not set; {reason}"
    assert all(
        word in str(caught.value) for word in ("NEXAR_CLUSTER_TOKEN", "token_hex(32)", "NEXAR_TICKET_IN_STORE=1")
    )


def test_many_ranks_that_are_apart_are_not_all_named() -> None:
    hellos = [hello("a"), *(hello("b", host="two") for _ in range(9))]
    assert separation(hellos) == "rank 0 and rank 1, 2, 3, 4 … do not share one host"


def test_a_rank_with_another_world_size_is_named() -> None:
    with pytest.raises(UsageError, match="rank 0 expects 2 ranks, but rank 1 expects 3"):
        chosen_way(PLAIN, [hello(), hello(size=3)], has_invitation=False)


def test_what_rank_0_could_not_do_is_raised_by_the_others_too() -> None:
    with pytest.raises(UsageError, match="rank 0 could not open the cluster: no port is free"):
        accepted_way(RendezvousAnswer([], "failed", "no port is free"), PLAIN)


@pytest.mark.parametrize(
    "message", [RendezvousRound("1f", 4), hello(), RendezvousAnswer(["1"], "addresses", "10.0.0.1:4000")]
)
def test_messages_come_back_as_they_were(message) -> None:
    assert decoded(encoded(message), type(message)) == message


@pytest.mark.parametrize("text", ["", "something else", "{}", '{"heard": [], "way": "elsewhere"}', "[1]"])
def test_a_text_of_another_version_is_refused(text) -> None:
    with pytest.raises(UsageError, match="use one version of nexar on all ranks"):
        decoded(text, RendezvousAnswer)
