import pytest

from nexar.cli.bench.figures import figure, iterations_for, quantile
from nexar.cli.bench.measures import MEASURES
from nexar.cli.bench.order import Reply


def block(*times_of_ranks, wrong=0):
    return [Reply(nanoseconds=tuple(times), wrong=wrong) for times in times_of_ranks]


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
