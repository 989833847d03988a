import pytest

from nexar.cli.bench.protocol import MEASURES, BenchReply, RankHello, parse_hello, parse_order, parse_reply, window
from tests.unit.cli.bench.orders import ORDER

SPREAD = ["all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"]


@pytest.mark.parametrize(
    ("name", "factor"),
    [("all_reduce", 1.5), *((name, 0.75) for name in SPREAD), ("broadcast", 1.0), ("reduce", 1.0)],
)
def test_bus_bandwidth_is_counted_as_nccl_tests_do(name, factor):
    assert MEASURES[name].busbw_factor(4) == factor


@pytest.mark.parametrize("name", SPREAD)
def test_a_size_that_is_spread_over_the_ranks_gives_each_its_share(name):
    measure = MEASURES[name]
    assert measure.count(1024, 4, 4) == 64
    assert measure.size_bytes(64, 4, 4) == 1024


def test_a_size_that_is_not_spread_is_the_same_on_every_rank():
    assert MEASURES["all_reduce"].count(1024, 4, 4) == 256
    assert MEASURES["all_reduce"].size_bytes(256, 4, 4) == 1024


@pytest.mark.parametrize("measure", MEASURES.values(), ids=lambda measure: measure.name)
def test_a_size_too_small_for_all_ranks_still_has_an_element_for_each(measure):
    assert measure.count(8, 8, 4) == (1 if measure.sized else 0)


@pytest.mark.parametrize("measure", MEASURES.values(), ids=lambda measure: measure.name)
def test_the_size_is_the_larger_side(measure):
    count = measure.count(1 << 20, 4, 4)
    assert max(measure.counts(count, 4)) * 4 == measure.size_bytes(count, 4, 4)


def test_a_round_trip_is_two_messages_and_a_window_as_many_as_it_holds():
    assert MEASURES["p2p-latency"].messages(2, 4) == 2
    assert MEASURES["p2p-bandwidth"].messages(2, 4) == 64
    assert MEASURES["all_reduce"].messages(2, 4) == 1


def test_a_window_is_bounded_in_messages_and_in_bytes():
    assert [window(size) for size in (0, 8, 1 << 20, 4 << 20, 1 << 30)] == [64, 64, 64, 16, 1]


def test_an_order_arrives_as_it_was_given():
    assert parse_order(ORDER.line()) == ORDER


def test_a_reply_arrives_as_it_was_given():
    reply = BenchReply(nanoseconds=(5, 7), wrong=1, problem="none")
    assert parse_reply(reply.line()) == reply


def test_a_hello_arrives_as_it_was_said():
    hello = RankHello(rank=3, version="x 1.0")
    assert parse_hello(hello.line()) == hello


def test_each_of_them_is_one_line():
    for line in (ORDER.line(), BenchReply(problem="two\nlines").line(), RankHello(rank=0, version="").line()):
        assert line.count(b"\n") == 1
        assert line.endswith(b"\n")
