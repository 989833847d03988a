"""Which way a collective takes, and that a name can force it."""

import dataclasses
from itertools import product

import pytest

from nexar.collectives.operations import OperationCode as Op
from nexar.collectives.operations import SelectionFacts, algorithms_of
from nexar.collectives.selection import allowed_algorithms, choose_algorithm
from nexar.errors import UsageError

KB, MB = 1024, 1024 * 1024


def facts(operation=Op.ALL_REDUCE, size_bytes=8, size=8, hosts=None, **more):
    hosts = hosts or (1,) * size
    return SelectionFacts(operation, size_bytes, size_bytes // 4, size, hosts, **{"shared_memory": False, **more})


@pytest.mark.parametrize(
    ("operation", "size_bytes", "size", "name"),
    [
        (Op.ALL_REDUCE, 8, 8, "recursive_doubling"),
        (Op.ALL_REDUCE, 16 * MB, 2, "recursive_doubling"),
        (Op.ALL_REDUCE, 64 * MB, 2, "pipelined_ring"),
        (Op.ALL_REDUCE, 32 * KB, 8, "ring"),
        (Op.ALL_REDUCE, 32 * KB, 9, "halving_doubling"),
        (Op.ALL_REDUCE, 8 * MB, 9, "pipelined_ring"),
        (Op.BROADCAST, 8, 3, "flat"),
        (Op.BROADCAST, 64 * MB, 2, "chain"),
        (Op.BROADCAST, 8, 4, "tree"),
        (Op.BROADCAST, 1 * MB, 4, "scatter_all_gather"),
        (Op.BROADCAST, 8 * MB, 3, "chain"),
        (Op.REDUCE, 8, 3, "flat"),
        (Op.REDUCE, 8, 4, "tree"),
        (Op.REDUCE, 1 * MB, 4, "reduce_scatter_gather"),
        (Op.ALL_GATHER, 64 * MB, 3, "direct"),
        (Op.ALL_GATHER, 8, 8, "bruck"),
        (Op.ALL_GATHER, 4 * KB, 8, "ring"),
        (Op.ALL_GATHER, 64 * KB, 9, "bruck"),
        (Op.ALL_GATHER, 1 * MB, 8, "pipelined_ring"),
        (Op.REDUCE_SCATTER, 8, 8, "halving"),
        (Op.REDUCE_SCATTER, 1 * MB, 8, "ring"),
        (Op.REDUCE_SCATTER, 1 * MB, 9, "halving"),
        (Op.REDUCE_SCATTER, 8 * MB, 8, "pipelined_ring"),
        (Op.ALL_TO_ALL, 8, 8, "direct"),
        (Op.ALL_TO_ALL, 1 * MB, 8, "pairwise"),
        (Op.GATHER, 8, 8, "tree"),
        (Op.GATHER, 8 * KB, 8, "flat"),
        (Op.GATHER_V, 8, 8, "flat"),
        (Op.SCATTER, 8, 7, "flat"),
        (Op.SCATTER_OBJECT, 8, 8, "flat"),
        (Op.SCAN, 8, 8, "recursive_doubling"),
        (Op.EXCLUSIVE_SCAN, 8 * MB, 8, "chain"),
        (Op.BARRIER, 0, 4, "two_phase"),
        (Op.BARRIER, 0, 5, "dissemination"),
        (Op.SPLIT, 16, 5, "bruck"),
    ],
)
def test_the_table_chooses_by_bytes_and_world(operation, size_bytes, size, name):
    assert choose_algorithm(facts(operation, size_bytes, size), None) == name


@pytest.mark.parametrize(
    ("operation", "size_bytes", "size", "name"),
    [
        (Op.ALL_REDUCE, 8, 2, "recursive_doubling"),
        (Op.ALL_REDUCE, 64 * MB, 2, "pipelined_ring"),
        (Op.ALL_REDUCE, 8, 8, "recursive_doubling"),
        (Op.ALL_REDUCE, 32 * KB, 8, "direct"),
        (Op.ALL_REDUCE, 32 * KB, 9, "halving_doubling"),
        (Op.ALL_REDUCE, 9 * 32 * KB, 9, "direct"),
        (Op.ALL_REDUCE, 8 * MB, 1000, "direct"),
        (Op.REDUCE, 8, 3, "gather_fold"),
        (Op.REDUCE, 8, 4, "tree"),
        (Op.REDUCE, 32 * KB, 9, "direct"),
        (Op.REDUCE_SCATTER, 8, 8, "halving"),
        (Op.REDUCE_SCATTER, 8 * MB, 8, "direct"),
        (Op.REDUCE_SCATTER_V, 32 * KB, 9, "halving"),
        (Op.SCAN, 8 * MB, 8, "chain"),
    ],
)
def test_narrow_floats_take_ways_that_round_once(operation, size_bytes, size, name):
    assert choose_algorithm(facts(operation, size_bytes, size, rounds=True), None) == name


def test_narrow_floats_go_along_the_neighbours_of_a_sparse_topology():
    assert choose_algorithm(facts(size_bytes=1 * MB, rounds=True, topology="k_regular:2"), None) == "ring"
    assert choose_algorithm(facts(size_bytes=16 * MB, rounds=True, topology="k_regular:2"), None) == "pipelined_ring"
    assert choose_algorithm(facts(size_bytes=1 * MB, rounds=True, topology="hypercube"), None) == "halving_doubling"


@pytest.mark.parametrize("order", [{}, {"deterministic": True}, {"commutative": False}], ids=str)
@pytest.mark.parametrize("operation", Op)
def test_whatever_the_table_chooses_could_have_been_asked_for(operation, order):
    layouts = [(lambda n: (n,), True), (lambda n: (n,), False), (lambda n: (1, n - 1), True)]
    for size, size_bytes, (hosts, shared) in product([1, 2, 3, 8, 9], [0, 64 * KB, 8 * MB], layouts):
        call = facts(operation, size_bytes, size, hosts(size), shared_memory=shared, **order)
        name = choose_algorithm(call, None)
        assert name in allowed_algorithms(call)
        assert choose_algorithm(call, name) == name


@pytest.mark.parametrize("operation", [Op.BARRIER, Op.ALL_REDUCE, Op.BROADCAST, Op.REDUCE, Op.ALL_GATHER_V])
def test_ranks_of_one_host_use_the_memory_they_share(operation):
    call = facts(operation, size=4, hosts=(4,), shared_memory=True)
    assert choose_algorithm(call, None) == "shared_memory"
    assert choose_algorithm(dataclasses.replace(call, deterministic=True), None) == "shared_memory"
    assert choose_algorithm(dataclasses.replace(call, shared_memory=False), None) != "shared_memory"


def test_one_rank_alone_needs_no_shared_memory():
    assert choose_algorithm(facts(size=1, hosts=(1,), shared_memory=True), None) in algorithms_of(Op.ALL_REDUCE)


def test_several_hosts_work_on_two_levels_where_that_saves_traffic():
    call = facts(size_bytes=64 * KB, size=4, hosts=(2, 2), shared_memory=True)
    assert choose_algorithm(call, None) == "two_level"
    assert choose_algorithm(dataclasses.replace(call, hosts=(1, 1, 1, 1)), None) == "ring"
    assert choose_algorithm(dataclasses.replace(call, size_bytes=63 * KB), None) == "ring"
    assert choose_algorithm(dataclasses.replace(call, deterministic=True), None) == "direct"
    assert choose_algorithm(dataclasses.replace(call, commutative=False), None) == "direct"


def test_a_deterministic_reduction_folds_in_rank_order_everywhere():
    assert choose_algorithm(facts(deterministic=True), None) == "gather_fold"
    assert choose_algorithm(facts(size_bytes=4 * KB, deterministic=True), None) == "direct"
    assert choose_algorithm(facts(Op.REDUCE_SCATTER, deterministic=True), None) == "direct"
    assert choose_algorithm(facts(Op.SCAN, deterministic=True), None) == "chain"


def test_a_reduction_that_does_not_commute_keeps_rank_order():
    assert choose_algorithm(facts(commutative=False), None) == "recursive_doubling"
    assert choose_algorithm(facts(Op.REDUCE, commutative=False), None) == "tree"
    assert choose_algorithm(facts(Op.REDUCE, 1 * MB, commutative=False), None) == "direct"
    assert choose_algorithm(facts(Op.SCAN, commutative=False), None) == "recursive_doubling"


@pytest.mark.parametrize(
    ("call", "name", "said"),
    [
        (facts(), "rign", "does not exist for this operation; allowed for this all_reduce: direct, gather_fold, "),
        (facts(Op.SCATTER), "ring", "does not exist for this operation; allowed for this scatter: flat, tree"),
        (facts(commutative=False), "ring", "does not keep rank order"),
        (facts(deterministic=True), "recursive_doubling", "deterministic=True"),
        (facts(hosts=(4, 4), shared_memory=True), "shared_memory", "needs all ranks on one host, and they are on 2"),
        (facts(hosts=(8,)), "shared_memory", "do not share memory"),
        (facts(Op.SCAN, hosts=(8,), shared_memory=True), "shared_memory", "does not exist for this operation"),
        (facts(hosts=(8,), shared_memory=True), "two_level", "needs several hosts"),
        (facts(hosts=(4, 4)), "two_level", "do not share memory"),
        (facts(hosts=(4, 4), shared_memory=True, deterministic=True), "two_level", "host by host"),
        (facts(Op.SCAN, hosts=(4, 4), shared_memory=True), "two_level", "does not exist for this operation"),
    ],
)
def test_a_name_that_cannot_serve_is_refused_with_those_that_can(call, name, said):
    with pytest.raises(UsageError, match="allowed for this ") as refused:
        choose_algorithm(call, name)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("topology", "operation", "size_bytes", "name"),
    [
        ("k_regular:2", Op.ALL_REDUCE, 1 * MB, "ring"),
        ("k_regular:2", Op.ALL_REDUCE, 8 * MB, "pipelined_ring"),
        ("k_regular:2", Op.ALL_REDUCE, 8, "recursive_doubling"),
        ("k_regular:4", Op.ALL_GATHER, 64 * KB, "ring"),
        ("k_regular:4", Op.REDUCE_SCATTER, 1 * MB, "ring"),
        ("hypercube", Op.ALL_REDUCE, 1 * MB, "halving_doubling"),
        ("hypercube", Op.ALL_REDUCE, 64 * MB, "halving_doubling"),
        ("hypercube", Op.REDUCE_SCATTER, 64 * MB, "halving"),
        ("hypercube", Op.ALL_GATHER, 1 * MB, "recursive_doubling"),
        ("hypercube", Op.BROADCAST, 8, "spanning_tree"),
        ("k_regular:2", Op.BROADCAST, 64 * MB, "spanning_tree"),
    ],
)
def test_on_a_sparse_topology_ways_along_neighbours_are_chosen(topology, operation, size_bytes, name):
    assert choose_algorithm(facts(operation, size_bytes, size=16, topology=topology), None) == name
