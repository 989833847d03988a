import pytest

from nexar.config import Config
from nexar.errors import ConfigError, UsageError
from nexar.launch.rendezvous_messages import (
    Answer,
    Hello,
    Round,
    accepted_way,
    chosen_way,
    decoded,
    encoded,
    separation,
    token_needed,
)

TOKEN = "0123456789abcdef" * 4
PLAIN, WITH_TOKEN, PERMITTED = Config(), Config(cluster_token=TOKEN), Config(ticket_in_store=True)


def hello(number: str = "1", size: int = 2, host: str = "one", folder: str = "8.1") -> Hello:
    return Hello(number, size, host, folder)


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
        accepted_way(Answer([], way, "what somebody wrote there"), config)
    assert TOKEN not in str(caught.value)


def test_a_rank_without_permission_accepts_no_ticket_from_the_store() -> None:
    answer = Answer([], "ticket", "what somebody wrote there")
    with pytest.raises(ConfigError, match="NEXAR_TICKET_IN_STORE"):
        accepted_way(answer, PLAIN)
    assert accepted_way(answer, PERMITTED) == "ticket"


def test_every_rank_is_told_who_is_apart_and_what_to_set() -> None:
    reason = separation([*ON_TWO_HOSTS, hello("c")])
    assert reason == "rank 0 and rank 1 do not share one host"
    assert separation(IN_TWO_FOLDERS) == "rank 0 and rank 1 do not share one user and one temporary directory"
    with pytest.raises(ConfigError) as caught:
        accepted_way(Answer([], "token_needed", reason), PLAIN)
    assert str(caught.value) == str(token_needed(reason))
    first = str(caught.value).splitlines()[0]
    assert first == f"NEXAR_CLUSTER_TOKEN is not set; {reason}"
    assert all(
        word in str(caught.value) for word in ("NEXAR_CLUSTER_TOKEN", "token_hex(32)", "NEXAR_TICKET_IN_STORE=1")
    )


def test_many_ranks_that_are_apart_are_not_all_named() -> None:
    hellos = [hello("a"), *(hello("b", host="two") for _ in range(9))]
    assert separation(hellos) == "rank 0 and rank 1, 2, 3, 4 … do not share one host"


def test_a_rank_that_was_told_another_world_size_is_named() -> None:
    with pytest.raises(UsageError, match="rank 0 expects 2 ranks, and rank 1 was told that they are 3"):
        chosen_way(PLAIN, [hello(), hello(size=3)], has_invitation=False)


def test_what_rank_0_could_not_do_is_raised_by_the_others_too() -> None:
    with pytest.raises(UsageError, match="rank 0 could not open the cluster: no port is free"):
        accepted_way(Answer([], "failed", "no port is free"), PLAIN)


@pytest.mark.parametrize("message", [Round("1f", 4), hello(), Answer(["1"], "addresses", "10.0.0.1:4000")])
def test_messages_come_back_as_they_were(message) -> None:
    assert decoded(encoded(message), type(message)) == message


@pytest.mark.parametrize("text", ["", "something else", "{}", '{"heard": [], "way": "elsewhere"}', "[1]"])
def test_a_text_of_another_version_is_refused(text) -> None:
    with pytest.raises(UsageError, match="use one version of nexar on all ranks"):
        decoded(text, Answer)
