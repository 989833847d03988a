from itertools import permutations

import pytest

from nexar.links.carrier_selection import (
    BULK_BYTES,
    PREFERENCE,
    bulk_channel_scheme,
    choose,
    closes_on_death,
    is_relayed,
    number_of,
    shares_memory,
    shows_life,
    takes_bulk_channel,
    wins_simultaneous_dial,
)
from nexar.links.flow_control import BUDGET_BYTES, admits
from nexar.wire.frame import Lane


def test_shared_memory_is_preferred_then_quic_then_tls() -> None:
    assert choose(8, {"tls", "quic", "shm"}) == "shm"
    assert choose(8, {"tls", "quic"}) == "quic"
    assert choose(8, {"tls"}) == "tls"


def test_nothing_connected_is_nothing_chosen() -> None:
    assert choose(8, ()) is None


def test_every_scheme_has_a_number_of_its_own() -> None:
    assert {scheme: number_of(scheme) for scheme in PREFERENCE} == {
        "memory": 0,
        "shm": 1,
        "quic": 2,
        "tls": 3,
        "tcp": 4,
        "relay": 5,
    }  # the wire format
    assert len({number_of(scheme) for scheme in PREFERENCE}) == len(PREFERENCE)
    assert number_of("rdma") == number_of("rdma") >= 16


def test_a_scheme_of_others_is_used_when_there_is_none_of_ours() -> None:
    assert choose(8, {"rdma"}) == "rdma"
    assert choose(8, {"rdma", "tls"}) == "tls"


def test_a_lane_admits_within_its_budget_and_always_one_frame() -> None:
    budget = BUDGET_BYTES[Lane.CONTROL]
    assert admits(Lane.CONTROL, 0, budget + 1)
    assert admits(Lane.CONTROL, budget - 10, 10)
    assert not admits(Lane.CONTROL, budget - 10, 11)
    assert admits(Lane.DATA, 1 << 40, 1)


@pytest.mark.parametrize(("mine", "yours"), list(permutations((1, 2, 9), 2)))
def test_of_two_simultaneous_dials_exactly_the_lower_nodes_stays_seen_from_both_ends(mine: int, yours: int) -> None:
    assert wins_simultaneous_dial(mine, yours) is (mine < yours)
    assert wins_simultaneous_dial(mine, yours) is not wins_simultaneous_dial(yours, mine)


def test_a_dial_of_the_same_node_does_not_stay_beside_its_first_one() -> None:
    assert not wins_simultaneous_dial(4, 4)


@pytest.mark.parametrize(
    ("size", "sidecar", "chosen"),
    [(BULK_BYTES, "tcp", "tcp"), (BULK_BYTES - 1, "tcp", "quic"), (1 << 40, None, "quic"), (1 << 40, "tls", "tls")],
)
def test_large_payloads_take_the_sidecar_where_there_is_one(size: int, sidecar: str | None, chosen: str) -> None:
    assert choose(size, ["quic"], sidecar) == chosen


@pytest.mark.parametrize(
    ("enabled", "encrypted", "scheme"),
    [
        ("auto", True, None),
        ("auto", False, "tcp"),
        (True, True, "tls"),
        (True, False, "tcp"),
        (False, True, None),
        (False, False, None),
    ],
)
def test_a_sidecar_is_asked_for_where_it_wins_or_always_or_never(
    enabled: bool | str, encrypted: bool, scheme: str | None
) -> None:
    assert bulk_channel_scheme(enabled, encrypted=encrypted) == scheme


@pytest.mark.parametrize(
    ("scheme", "connected", "useful"),
    [
        ("tcp", ["quic"], True),
        ("tcp", ["tls"], True),
        ("tls", ["quic"], True),
        ("tls", ["tls"], False),
        ("tcp", ["quic", "shm"], False),
        ("tcp", ["memory"], False),
        ("tcp", [], False),
        (None, ["quic"], False),
    ],
)
def test_a_sidecar_has_no_place_beside_shared_memory_or_its_own_kind(
    scheme: str | None, connected: list[str], useful: bool
) -> None:
    assert takes_bulk_channel(scheme, connected) == useful


def test_what_goes_over_other_nodes_is_the_last_choice() -> None:
    assert choose(8, {"relay", "tls"}) == "tls"
    assert choose(8, {"relay"}) == "relay"
    assert is_relayed(("relay",))
    assert not is_relayed(("relay", "tls"))
    assert not is_relayed(())


def test_one_carrier_with_the_capability_is_enough() -> None:
    assert shares_memory(("quic", "shm"))
    assert not shares_memory(("quic", "memory", "relay"))
    assert closes_on_death(("quic", "tls"))
    assert not closes_on_death(("quic", "relay", "paper"))
    assert shows_life(("shm", "quic"))
    assert not shows_life(("shm", "tls", "relay"))
