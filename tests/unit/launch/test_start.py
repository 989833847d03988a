import pytest

from nexar import ConfigError
from nexar.launch.start import Start


def test_a_rank_outside_the_world_cannot_start():
    with pytest.raises(ConfigError, match="0 to 3"):
        Start(kind="torch", rank=4, size=4)


def test_an_empty_world_cannot_start():
    with pytest.raises(ConfigError, match="1 or more"):
        Start(kind="torch", rank=0, size=0)


def test_a_host_cannot_have_more_ranks_than_the_world():
    with pytest.raises(ConfigError, match="at most the size of the world"):
        Start(kind="torch", rank=0, size=2, local_rank=0, local_size=3)


@pytest.mark.parametrize(
    ("size", "local_size", "one"), [(4, 4, True), (4, 2, False), (4, None, False), (1, None, True)]
)
def test_all_ranks_share_a_host_only_if_that_is_known(size, local_size, one):
    assert Start(kind="pmi", rank=0, size=size, local_rank=0, local_size=local_size).on_one_host is one
