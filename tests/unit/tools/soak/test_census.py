from typing import Any

from nexar_tools.soak.census import Census


def report(what: str, at: float, epoch: int, nodes: list[int], **facts: Any) -> dict[str, Any]:
    return {"what": what, "at": at, "epoch": epoch, "nodes": nodes, "step": 0, "rounds": 0, **facts}


def census(*nodes: int, epoch: int = 1) -> Census:
    """Members called by their nodes, who have all said who they are."""
    found = Census()
    for node in nodes:
        found.started(str(node), 0.0)
        found.heard(str(node), report("here", 1.0, epoch, list(nodes), node=node, joined=epoch > 1))
    return found


def test_members_are_those_alive_in_the_newest_membership() -> None:
    found = census(1, 2, 3)
    found.started("new", 2.0)
    found.killed("2", 3.0)
    assert found.alive == ["1", "3", "new"]
    assert found.members == ["1", "3"]
    found.heard("1", report("changed", 4.0, 2, [1, 3], lost=[2]))
    found.heard("3", report("round", 4.0, 1, [1, 2, 3], rounds=1, recovered_from=[]))  # it is behind
    assert (found.epoch, found.nodes) == (2, {1, 3})


def test_one_of_two_may_die_because_the_seed_votes() -> None:
    found = census(1, 2)
    assert found.killable(10.0) == ["1", "2"]
    found.killed("1", 10.0)
    assert found.killable(10.0) == []
    found.heard("2", report("changed", 11.0, 2, [2], lost=[1]))
    assert found.killable(11.0) == []  # nobody would be left


def test_of_five_two_may_be_dead_at_a_time() -> None:
    found = census(1, 2, 3, 4, 5)
    found.killed("1", 10.0)
    assert found.killable(10.0) == ["2", "3", "4", "5"]
    found.killed("2", 10.0)
    assert found.killable(10.0) == []
    found.heard("3", report("changed", 11.0, 2, [2, 3, 4, 5], lost=[1]))
    assert found.killable(11.0) == ["3", "4", "5"]


def test_who_died_while_it_waited_may_still_be_voted_in_for_a_while() -> None:
    found = census(1, 2)
    found.started("new", 2.0)
    found.killed("new", 10.0)
    assert found.killable(11.0) == []
    assert found.killable(100.0) == ["1", "2"]
    found.heard("1", report("changed", 101.0, 2, [1, 2, 77], lost=[]))  # it was
    assert found.killable(101.0) == []


def test_who_waits_may_be_killed_and_who_is_protected_may_not() -> None:
    found = census(1, 2, 3)
    found.started("new", 2.0)
    assert found.killable(10.0) == ["new", "1", "2", "3"]
    assert found.killable(10.0, protected="2") == ["new", "1", "3"]


def test_who_is_isolated_counts_as_dead_until_it_is_back_or_has_ended() -> None:
    found = census(1, 2, 3, 4, 5)
    assert found.may_isolate(10.0, ["4", "5"])
    assert not found.may_isolate(10.0, ["3", "4", "5"])
    found.isolated = {"4", "5"}
    assert found.members == ["1", "2", "3"]
    assert found.killable(10.0) == []
    found.heard("4", report("expelled", 12.0, 1, [1, 2, 3, 4, 5]))
    found.ended("4")
    found.heard("1", report("changed", 12.0, 2, [1, 2, 3, 5], lost=[4]))
    found.isolated.discard("5")
    assert found.members == ["1", "2", "3", "5"]
    assert found.alive == ["1", "2", "3", "5"]


def test_isolated_processes_count_as_members_until_the_others_have_removed_them() -> None:
    found = census(1, 2, 3, 4, 5)
    found.started("new", 10.0)
    assert not found.has_isolated_members
    found.isolated = {"4", "5", "new"}
    found.heard("1", report("changed", 12.0, 2, [1, 2, 3, 5], lost=[4]))
    assert found.has_isolated_members
    found.heard("1", report("changed", 13.0, 3, [1, 2, 3], lost=[5]))
    assert not found.has_isolated_members


def test_the_longest_time_without_a_round_is_known() -> None:
    found = census(1, 2)
    for rounds, (name, at) in enumerate((("1", 10.0), ("2", 10.5), ("1", 14.0), ("2", 14.25)), 1):
        found.heard(name, report("round", at, 1, [1, 2], rounds=rounds, recovered_from=[]))
    assert found.longest_stall == 3.5


def test_a_recovery_lasts_from_the_death_to_the_next_right_sum() -> None:
    found = census(1, 2, 3)
    found.killed("3", 10.0)
    for name, at in (("1", 10.25), ("2", 10.75)):
        found.heard(name, report("round", at, 2, [1, 2], rounds=5, recovered_from=[3]))
    assert found.median_recovery == 0.5
    assert found.moved_at == 10.75
    assert found.rounds == 10


def test_all_are_in_when_the_membership_is_of_those_that_live() -> None:
    found = census(1, 2)
    assert found.all_are_in()
    found.started("new", 2.0)
    assert not found.all_are_in()
    found.heard("new", report("here", 3.0, 2, [1, 2, 9], node=9, joined=True))
    assert found.all_are_in()
    assert found.joined == 1
    found.killed("1", 4.0)
    assert not found.all_are_in()
