from typing import Any

import pytest

from nexar.observe.trace_export import events
from tests.unit.observe.parts import call, part

US = 1e-6


def of_phase(found: list[dict[str, Any]], phase: str) -> list[dict[str, Any]]:
    return [each for each in found if each["ph"] == phase]


def late() -> list[dict[str, Any]]:
    """Rank 1 comes 2 ms after rank 0."""
    return list(events([part(0, [call(7, 10.0, 10.003)]), part(1, [call(7, 10.002, 10.003)])]))


def test_each_call_is_a_slice_with_the_arrival_of_every_rank() -> None:
    one, other = (each for each in of_phase(late(), "X") if each["cat"] == "collective")
    assert (one["name"], one["pid"], one["tid"]) == ("all_reduce", 0, 0)
    assert (one["ts"], one["dur"]) == (0.0, pytest.approx(3000, abs=0.1))
    assert other["ts"] == pytest.approx(2000, abs=0.1)
    assert one["args"]["arrivals_us"] == {"rank 0": 0.0, "rank 1": pytest.approx(2000, abs=0.1)}
    assert (one["args"]["last"], one["args"]["sequence"], one["args"]["bytes"]) == (1, 7, 64)


def test_who_waited_shows_for_whom_and_an_arrow_leads_there() -> None:
    found = late()
    (wait,) = (each for each in found if each.get("cat") == "wait")
    assert (wait["name"], wait["pid"], wait["ts"]) == ("waiting for rank 1", 0, 0.0)
    assert wait["dur"] == pytest.approx(2000, abs=0.1)
    (begins,), (ends,) = of_phase(found, "s"), of_phase(found, "f")
    assert begins["id"] == ends["id"]
    assert (begins["pid"], ends["pid"], ends["bp"]) == (1, 0, "e")
    assert begins["ts"] == pytest.approx(ends["ts"], abs=0.1)


def test_ranks_that_come_together_need_no_arrow() -> None:
    found = list(events([part(rank, [call(1, 1.0 + rank * 10 * US, 1.001)]) for rank in range(3)]))
    assert {each["ph"] for each in found} == {"M", "X"}
    assert len(of_phase(found, "X")) == 3


def test_a_node_whose_rank_changed_is_one_process_of_the_trace() -> None:
    found = list(
        events(
            [
                part(2, [call(1, 1.0, 1.1)], node=9),
                part(1, [call(0, 2.0, 2.1)], node=9, generation=2),
                part(0, [call(0, 2.0, 2.1)], node=9, generation=2, communicator=0xAB),
            ]
        )
    )
    assert {each["pid"] for each in found} == {0}
    names = {each["args"]["name"] for each in of_phase(found, "M") if "name" in each["args"]}
    assert names == {"rank 2, then 1", "world", "communicator 171"}


def test_ranks_of_another_communicator_are_called_as_their_processes_are() -> None:
    """Nodes 3 and 4 are ranks 2 and 3 of the world, and 0 and 1 of the other, to which the last one comes late."""
    world = [part(rank, [call(0, 0.0, 0.001)]) for rank in range(4)]
    half = [
        part(0, [call(0, 1.0, 2.0)], node=3, communicator=9),
        part(1, [call(0, 1.9, 2.0)], node=4, communicator=9),
    ]
    found = list(events([*half, *world]))
    names = {each["pid"]: each["args"]["name"] for each in found if each["name"] == "process_name"}
    (wait,) = (each for each in found if each.get("cat") == "wait")
    assert (names[wait["pid"]], wait["name"]) == ("rank 2", "waiting for rank 3")
    calls = [each["args"] for each in found if each.get("cat") == "collective" and each["tid"] == 1]
    assert [each["last"] for each in calls] == [3, 3]
    assert set(calls[0]["arrivals_us"]) == {"rank 2", "rank 3"}


def test_a_rank_whose_place_in_the_world_is_not_known_is_named_with_its_communicator() -> None:
    found = list(events([part(1, [call(0, 1.0, 2.0)], communicator=9)]))
    assert found[0]["args"]["name"] == "rank 1 of communicator 9"


def test_hosts_with_different_clocks_are_on_one() -> None:
    found = list(events([part(0, [call(1, 1.0, 1.002)]), part(1, [call(1, 1.0, 1.002)], host="b", ahead=12345.0)]))
    starts = [each["ts"] for each in of_phase(found, "X") if each["cat"] == "collective"]
    assert starts == pytest.approx([0.0, 0.0], abs=1.0)


def test_a_call_that_failed_says_so_and_nothing_makes_an_empty_trace() -> None:
    (failed,) = of_phase(list(events([part(0, [call(1, 1.0, 2.0, outcome="PeerLost")])])), "X")
    assert failed["args"]["error"] == "PeerLost"
    assert list(events([])) == []
