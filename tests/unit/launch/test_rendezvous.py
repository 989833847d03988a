"""The ranks but the first one, and rank 0 until it opens the cluster, on a board that is a dictionary."""

from collections.abc import Callable

import pytest

from nexar.config import Config
from nexar.errors import ConfigError, FormationTimeout, OperationTimeout, UsageError
from nexar.launch.rendezvous import _answer_key, _answered, _follow, _hello_key, _hellos, _opened
from nexar.launch.rendezvous_messages import Answer, Hello, Round, accepted_way, decoded, encoded
from nexar.security.invitation import Invitation, invitation_from_token
from nexar.security.join_ticket import format_ticket

TOKEN = "0123456789abcdef" * 4
TICKET = format_ticket(Invitation(("127.0.0.1:4000",), bytes(32), bytes(range(32))))
HELLO = Hello("mine", 2, "one", "8.1")
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
        "nexar/round": encoded(Round("old", 2)),
        _hello_key("old", 1): encoded(Hello("earlier", 2, "one", "8.1")),
        _answer_key("old"): encoded(Answer(["earlier"], "addresses", "10.0.0.1:4000")),
    }


def test_the_answer_of_an_earlier_attempt_is_not_followed() -> None:
    def rank_0(key: str, text: str) -> None:
        if key == _hello_key("old", 1):  # the next attempt begins only now
            board.texts["nexar/round"] = encoded(Round("new", 2))
        if key == _hello_key("new", 1):
            heard = [decoded(text, Hello).number]
            board.texts[_answer_key("new")] = encoded(Answer(heard, "addresses", "10.0.0.2:4000"))

    board = Board(of_an_earlier_attempt(), rank_0)
    assert _answered(board, 1, HELLO, LONG) == Answer(["mine"], "addresses", "10.0.0.2:4000")


def test_a_rank_0_that_does_not_come_again_is_waited_for_until_the_deadline() -> None:
    with pytest.raises(OperationTimeout, match="waiting for the process of rank 0"):
        _answered(Board(of_an_earlier_attempt()), 1, HELLO, SHORT)


def test_a_rank_is_not_told_that_rank_0_is_missing_where_others_are() -> None:
    board = Board({"nexar/round": encoded(Round("new", 2))})
    with pytest.raises(OperationTimeout, match="rank 0, which waits until all 2 ranks have come"):
        _answered(board, 1, HELLO, SHORT, SHORT)


def test_a_rank_beyond_the_size_of_the_world_is_told_both_sizes() -> None:
    board = Board({"nexar/round": encoded(Round("new", 2))})
    with pytest.raises(UsageError, match="rank 0 expects 2 ranks, and rank 5 was told that they are 6"):
        _answered(board, 5, Hello("mine", 6, "one", "8.1"), SHORT, SHORT)


def test_rank_0_counts_those_who_came_to_the_board() -> None:
    board = Board({_hello_key("new", 2): encoded(Hello("theirs", 3, "one", "8.1"))})
    with pytest.raises(FormationTimeout, match=r"2 of 3 nodes joined .*\njoined: rank 0, rank 2"):
        list(_hellos(board, "new", 3, SHORT))


@pytest.mark.parametrize(("rank", "timeout"), [(1, LONG), (2, SHORT)], ids=["at once", "behind a rank that is missing"])
def test_rank_0_names_a_rank_with_another_world_size_although_others_are_missing(rank: int, timeout: float) -> None:
    """A rank that was told of fewer ranks waits for nobody else: rank 0 alone knows of the others."""
    board = saying({rank: encoded(Hello("theirs", 3, "one", "8.1"))})
    answer = failed_answer(board, 4, timeout)
    assert answer.heard == ["theirs"]
    assert answer.content.startswith(f"rank 0 expects 4 ranks, and rank {rank} was told that they are 3")


def failed_answer(board: Board, size: int, timeout: float) -> Answer:
    """What rank 0 leaves on the board when it cannot open the cluster."""
    hello = Hello("mine", size, "one", "8.1")
    with pytest.raises((FormationTimeout, UsageError)) as caught, _opened(board, hello, Config(), None, timeout):
        pytest.fail("nothing was opened")
    answer = decoded(board.texts[_answer_key(decoded(board.texts["nexar/round"], Round).number)], Answer)
    assert (answer.way, answer.content) == ("failed", str(caught.value))
    return answer


def saying(texts: dict[int, str]) -> Board:
    """These ranks say this as soon as rank 0 begins."""

    def react(key: str, text: str) -> None:
        if key == "nexar/round":
            number = decoded(text, Round).number
            board.texts.update({_hello_key(number, rank): said for rank, said in texts.items()})

    board = Board(react=react)
    return board


def test_the_ranks_that_came_are_told_which_rank_did_not() -> None:
    board = saying({2: encoded(Hello("theirs", 4, "one", "8.1"))})
    answer = failed_answer(board, 4, SHORT)
    assert answer.heard == ["theirs"]
    assert answer.content.startswith("the cluster did not form: ranks 1, 3 did not come to torch's store within 1 ms\n")
    with pytest.raises(UsageError, match=r"rank 0 could not open the cluster: .*ranks 1, 3 did not come"):
        accepted_way(answer, Config())


def test_the_other_ranks_are_told_at_once_of_a_hello_that_cannot_be_read() -> None:
    board = saying({1: "{}", 2: encoded(Hello("theirs", 3, "one", "8.1"))})
    answer = failed_answer(board, 3, LONG)
    assert answer.heard == ["theirs"]
    assert "rank 1" in answer.content.splitlines()[0]


def test_a_rank_waits_a_moment_longer_than_rank_0_for_its_answer() -> None:
    """Rank 0 may have begun later, and its answer names who is missing."""
    answer = Answer(["mine"], "failed", "rank 2 did not come")
    finds = iter([None] * 3)

    class Late(Board):
        def find(self, key: str) -> str | None:
            return next(finds, encoded(answer)) if key == _answer_key("new") else super().find(key)

    assert _answered(Late({"nexar/round": encoded(Round("new", 2))}), 1, HELLO, 0.0, LONG) == answer


def test_rank_0_tells_the_others_that_a_token_is_needed_and_publishes_no_ticket() -> None:
    def rank_1(key: str, text: str) -> None:
        if key == "nexar/round":
            number = decoded(text, Round).number
            board.texts[_hello_key(number, 1)] = encoded(Hello("theirs", 2, "another", "8.1"))

    board = Board(react=rank_1)
    with pytest.raises(ConfigError, match="NEXAR_CLUSTER_TOKEN"), _opened(board, HELLO, Config(), None, LONG):
        pytest.fail("nothing was opened")
    answer = decoded(board.texts[_answer_key(decoded(board.texts["nexar/round"], Round).number)], Answer)
    assert (answer.heard, answer.way) == (["theirs"], "token_needed")


def test_with_a_token_only_addresses_are_followed() -> None:
    config = Config(cluster_token=TOKEN)
    followed = _follow(Answer([], "addresses", "10.0.0.1:4000,10.0.0.2:4000"), config, SHORT)
    assert followed == invitation_from_token(TOKEN, ["10.0.0.1:4000", "10.0.0.2:4000"])
    with pytest.raises(ConfigError, match="NEXAR_CLUSTER_TOKEN"):
        _follow(Answer([], "ticket", TICKET), config, SHORT)


def test_a_rank_that_does_not_know_the_token_is_told_what_to_set() -> None:
    with pytest.raises(ConfigError, match="NEXAR_CLUSTER_TOKEN"):
        _follow(Answer([], "addresses", "10.0.0.1:4000"), Config(), SHORT)


def test_where_rank_0_has_a_ticket_each_rank_follows_its_own() -> None:
    answer = Answer([], "environment", "10.6.6.6:4000")
    assert _follow(answer, Config(ticket=TICKET), SHORT).addresses == ("127.0.0.1:4000",)
    with pytest.raises(ConfigError, match="NEXAR_TICKET"):
        _follow(answer, Config(), SHORT)


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "0" * 31, "0" * 32 + "/x", "G" * 32])
def test_the_store_cannot_lead_out_of_the_private_folder(name) -> None:
    with pytest.raises(UsageError, match="somebody else has written there"):
        _follow(Answer([], "file", name), Config(), SHORT)
