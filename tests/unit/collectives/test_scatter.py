import numpy as np
import pytest

from nexar.collectives.scatter import SMALL_WORLD, _header, _read
from nexar.communicator.communicator import Communicator
from nexar.communicator.local import local_communicators
from nexar.config import Config
from nexar.errors import PeerMisbehaved, UsageError
from tests.ranks import on_every


@pytest.mark.parametrize("algorithm", [None, "flat", "tree"])
@pytest.mark.parametrize("size", [1, 3, SMALL_WORLD + 1])
def test_rank_i_gets_block_i_whatever_the_way(size: int, algorithm: str | None) -> None:
    table = np.arange(size * 6, dtype=np.float32).reshape(size * 2, 3)
    rows = np.arange(size * 4).reshape(size, 4)

    def run(comm: Communicator) -> None:
        for root in {0, size - 1}:
            here = comm.rank == root
            block = comm.scatter(table if here else None, root, algorithm=algorithm)
            assert block.tobytes() == table[2 * comm.rank : 2 * comm.rank + 2].tobytes()
            assert block.shape == (2, 3)
            assert comm.scatter(rows if here else None, root, algorithm=algorithm).tolist() == rows[comm.rank].tolist()
            assert comm.scatter(table[:0] if here else None, root, algorithm=algorithm).shape == (0, 3)

    with local_communicators(size, Config()) as world:
        on_every(world, run)


def test_an_algorithm_that_there_is_not_is_refused_before_the_call_counts() -> None:
    with local_communicators(1, Config()) as (comm,):
        with pytest.raises(UsageError, match="flat, tree"):
            comm.scatter(np.ones(3), algorithm="ring")
        assert comm.stats()["calls"] == 0


def test_sizes_that_cannot_be_are_the_roots_fault() -> None:
    assert _read(_header(np.ones((2, 5), np.int16)), 0) == (np.dtype(np.int16), (2, 5))
    for bad in ([99, 1, 3], [11, 99, 3], [11, 1, -3]):
        header = _header(None)
        header[:3] = bad
        with pytest.raises(PeerMisbehaved, match="it scatters blocks"):
            _read(header, 3)
