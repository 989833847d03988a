from dataclasses import replace

import pytest

from nexar.cli.bench.protocol import MEASURES, BenchReply
from nexar.cli.bench.report import MeasureOptions, figure, iterations_for, quantile, row, rows

WISHES = MeasureOptions(
    dtype="float32",
    itemsize=4,
    op="sum",
    root=0,
    algorithm="ring",
    warmups=5,
    least_calls=20,
    exactly=False,
    rounds=4,
    seconds=0.3,
    reply_timeout=1.0,
)


class Answering:
    """Two ranks that take as long as they are asked to."""

    def __init__(self, name, log, nanoseconds=1_000_000, reply=None):
        self.name, self.log, self.nanoseconds, self.reply = name, log, nanoseconds, reply

    def ask(self, order, patience):
        self.log.append((self.name, order))
        times = (self.nanoseconds,) * order.iterations
        return [self.reply or BenchReply(nanoseconds=times, wrong=int(order.check))] * 2


def two(**second):
    log = []
    return log, {"nexar": Answering("nexar", log), "gloo": Answering("gloo", log, **second)}


def test_systems_take_turns_and_each_begins_as_often():
    log, systems = two()
    row(systems, MEASURES["all_reduce"], 10, WISHES, 2)
    assert [name for name, _ in log] == ["nexar", "gloo"] + ["nexar", "gloo", "gloo", "nexar"] * 2


def test_the_time_that_a_first_call_takes_decides_how_many_there_are():
    log, systems = two(nanoseconds=100_000_000)
    row(systems, MEASURES["all_reduce"], 10, WISHES, 2)
    assert {order.iterations for name, order in log[2:] if name == "nexar"} == {75}
    assert {order.iterations for name, order in log[2:] if name == "gloo"} == {5}


def test_a_number_of_calls_that_was_given_is_kept():
    log, systems = two()
    row(systems, MEASURES["all_reduce"], 10, replace(WISHES, exactly=True, least_calls=8), 2)
    assert {(order.iterations, order.warmups) for _, order in log[2:]} == {(2, 5)}


def test_ranks_may_settle_before_every_block():
    log, systems = two(nanoseconds=100_000_000)
    row(systems, MEASURES["all_reduce"], 10, WISHES, 2)
    assert {order.warmups for name, order in log[2:] if name == "nexar"} == {50}
    assert {order.warmups for name, order in log[2:] if name == "gloo"} == {5}


def test_results_are_checked_at_the_beginning_and_at_the_end():
    log, systems = two()
    found = row(systems, MEASURES["all_reduce"], 10, WISHES, 2)
    assert [order.check for name, order in log if name == "gloo"] == [True, False, False, False, True]
    assert found.figures["gloo"].wrong == 4


def test_only_ours_gets_the_algorithm_to_use():
    log, systems = two()
    row(systems, MEASURES["all_reduce"], 10, WISHES, 2)
    assert {(name, order.algorithm) for name, order in log} == {("nexar", "ring"), ("gloo", None)}


def test_a_system_that_does_not_have_it_is_left_out_with_the_reason():
    log, systems = two(reply=BenchReply(problem="no such thing"))
    found = row(systems, MEASURES["all_reduce"], 10, WISHES, 2)
    assert found.problems == {"gloo": "no such thing"}
    assert list(found.figures) == ["nexar"]
    assert [name for name, _ in log].count("gloo") == 1


def test_a_row_says_what_was_measured():
    _, systems = two()
    found = row(systems, MEASURES["reduce"], 10, WISHES, 2)
    assert (found.size_bytes, found.count, found.dtype, found.op, found.root) == (40, 10, "float32", "sum", 0)
    found = row(systems, MEASURES["barrier"], 0, WISHES, 2)
    assert (found.size_bytes, found.count, found.dtype, found.op, found.root) == (0, 0, "", "", -1)


def test_sizes_that_come_to_the_same_count_are_measured_once():
    _, systems = two()
    found = list(rows(systems, MEASURES["all_gather"], [1, 2, 4, 8, 16], WISHES, 2))
    assert [each.size_bytes for each in found] == [8, 16]
    assert len(list(rows(systems, MEASURES["barrier"], [1, 2, 4], WISHES, 2))) == 1


def block(*times_of_ranks, wrong=0):
    return [BenchReply(nanoseconds=tuple(times), wrong=wrong) for times in times_of_ranks]


def test_a_figure_is_the_median_over_blocks_of_the_slowest_rank_s_median():
    blocks = [block([1000, 1000], [2000, 2200]), block([9000, 9000], [9000, 9000]), block([2000, 2000], [1000, 1000])]
    assert figure("x", MEASURES["all_reduce"], 2, 4, blocks).time_us == pytest.approx(2.1)


def test_bandwidths_follow_from_the_time():
    found = figure("x", MEASURES["all_reduce"], 1000, 4, [block(*[[4000]] * 4)])
    assert (found.algbw, found.busbw) == (pytest.approx(1.0), pytest.approx(1.5))


def test_one_message_of_a_round_trip_takes_half_the_time():
    assert figure("x", MEASURES["p2p-latency"], 2, 4, [block([4000], [])]).time_us == 2.0


def test_wrong_elements_of_all_ranks_add_up():
    assert figure("x", MEASURES["all_reduce"], 2, 4, [block([1], [1], wrong=3), block([1], [1])]).wrong == 6


def test_the_distribution_is_of_all_calls():
    found = figure("x", MEASURES["all_reduce"], 2, 4, [block(range(1000, 101_000, 1000))])
    assert (found.p10_us, found.p99_us, found.mean_us, found.calls) == (10, 99, 50.5, 100)


def test_quantiles_of_few_values_are_values():
    assert [quantile([5.0], share) for share in (0.0, 0.1, 0.99, 1.0)] == [5.0] * 4
    assert quantile([1.0, 2.0, 3.0], 0.5) == 2.0


def test_calls_fill_the_time_within_bounds():
    assert iterations_for(0.001, 0.3, 20) == 300
    assert iterations_for(1.0, 0.3, 20) == 20
    assert iterations_for(0.0, 0.3, 20) == 20_000
