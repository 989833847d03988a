"""Members of a new generation agree on the last call that all completed."""

import itertools
from random import Random

import pytest

from nexar.cluster.decisions.completion import (
    NEW_MEMBER,
    NONE_COMPLETED,
    UNCONSTRAINED,
    CompletedCalls,
    CompletionExchange,
    CompletionNews,
    SendNews,
    completed_by_all,
)


def agree(said: list[CompletedCalls], *, chance: int = 0, copies: int = 1) -> list[int | None]:
    """Messages arrive in random order, each `copies` times."""
    random = Random(chance)
    ranks = [CompletionExchange(rank, len(said), mine) for rank, mine in enumerate(said)]
    flying = [sent for rank in ranks for sent in rank.start()] * copies
    while flying:
        sent = flying.pop(random.randrange(len(flying)))
        flying += ranks[sent.rank].received(sent.step, sent.news) * copies
    return [rank.result for rank in ranks]


@pytest.mark.parametrize("size", [*range(1, 10), 16, 33])
def test_every_rank_has_the_minimum_whoever_has_it(size: int) -> None:
    for lowest in range(size):
        said = [CompletedCalls(1, 3 if rank == lowest else 10 + rank) for rank in range(size)]
        assert agree(said, chance=lowest, copies=2) == [3] * size


@pytest.mark.parametrize(
    ("said", "result"),
    [
        ([NEW_MEMBER, CompletedCalls(1, 7), NEW_MEMBER], 7),
        ([NEW_MEMBER, CompletedCalls(1, NONE_COMPLETED), NEW_MEMBER], NONE_COMPLETED),
        ([NEW_MEMBER] * 3, UNCONSTRAINED),
        ([CompletedCalls(4, 7), CompletedCalls(4, 9), NEW_MEMBER], 7),
        ([CompletedCalls(3, 57), CompletedCalls(4, 0), CompletedCalls(3, 57)], NONE_COMPLETED),
        ([CompletedCalls(2, 5)], 5),
    ],
)
def test_new_members_do_not_count_and_calls_of_different_generations_are_not_compared(
    said: list[CompletedCalls], result: int
) -> None:
    for order in itertools.permutations(said):
        assert agree(list(order)) == [result] * len(said)


def test_no_rank_has_a_result_before_all_took_part() -> None:
    size, late = 7, 4
    ranks = [CompletionExchange(rank, size, CompletedCalls(1, rank)) for rank in range(size)]
    flying = [sent for number, rank in enumerate(ranks) if number != late for sent in rank.start()]
    held = []
    while flying:
        sent = flying.pop()
        if sent.rank == late:
            held.append(sent)
        else:
            flying += ranks[sent.rank].received(sent.step, sent.news)
    assert {rank.result for rank in ranks} == {None}
    flying = [*held, *ranks[late].start()]
    while flying:
        sent = flying.pop()
        flying += ranks[sent.rank].received(sent.step, sent.news)
    assert {rank.result for rank in ranks} == {0}


def test_each_step_names_the_peers_of_both_directions() -> None:
    rank = CompletionExchange(0, 3, CompletedCalls(1, 5))
    mine = CompletionNews(5, 1, 1)
    assert rank.start() == [SendNews(1, 2, 0, mine)]
    assert rank.received(0, CompletionNews(4, 1, 1)) == [SendNews(2, 1, 1, CompletionNews(4, 1, 1))]
    assert rank.result is None
    assert rank.received(1, CompletionNews(6, 1, 1)) == []
    assert rank.result == 4


def test_news_of_a_later_step_wait_and_repeated_or_invalid_ones_are_ignored() -> None:
    rank = CompletionExchange(0, 3, CompletedCalls(1, 5))
    rank.start()
    assert rank.received(1, CompletionNews(4, 1, 1)) == []
    assert rank.received(7, CompletionNews(0, 1, 1)) == []
    assert rank.received(0, CompletionNews(6, 1, 1)) == [SendNews(2, 1, 1, CompletionNews(5, 1, 1))]
    assert rank.result == 4
    assert rank.received(0, CompletionNews(0, 1, 1)) == []
    assert rank.result == 4


@pytest.mark.parametrize(("result", "reported"), [(0, 0), (9, 9), (NONE_COMPLETED, None), (UNCONSTRAINED, None)])
def test_only_a_call_number_is_reported(result: int, reported: int | None) -> None:
    assert completed_by_all(result) == reported
