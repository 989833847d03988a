"""The seed of a simulated cluster: its vote outlives it with its disk, and only then."""

import pytest

from tests.unit.testing.simulator.scene import a_cluster, passes


@pytest.mark.parametrize("with_state", [True, False])
def test_one_of_two_goes_on_only_if_the_seed_has_kept_its_state(with_state: bool) -> None:
    cluster = a_cluster(2)
    assert cluster.seed is not None
    cluster.seed.die("killed")
    cluster.seed.restart(with_state=with_state)
    cluster.crash(1)
    passes(cluster, 60.0)
    assert cluster.last.epoch == (2 if with_state else 1)
    assert cluster.members[2].is_stalled == (not with_state)


def test_without_the_seed_one_of_two_stalls_until_it_is_back() -> None:
    cluster = a_cluster(2)
    assert cluster.seed is not None
    cluster.seed.die("killed")
    cluster.crash(1)
    passes(cluster, 60.0)
    assert cluster.members[2].is_stalled
    cluster.seed.restart(with_state=True)
    passes(cluster, 30.0)
    assert cluster.last.epoch == 2
