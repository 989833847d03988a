"""What compressing is for: a network that gets as good with a hundredth of the traffic, and how little travels."""

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nexar import FP8, Int8, NoCompression, RandomK, TopK
from nexar.arrays.compression.base import Compressor
from nexar.communicator.communicator import Communicator
from tests.architecture.sources import ROOT
from tests.conformance.worlds import ranks_over
from tests.ranks import EVENT_TIMEOUT, on_every

EXAMPLE = ROOT / "examples" / "compressed_gradients.py"


def train() -> Callable[[Communicator, Compressor], float]:
    """As the example does it."""
    spec = importlib.util.spec_from_file_location("compressed_gradients", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[[Communicator, Compressor], float] = module.train
    return found


@pytest.mark.full
def test_a_network_gets_as_good_with_one_per_cent_of_its_gradients() -> None:
    with ranks_over("memory", 4, collective_timeout=EVENT_TIMEOUT) as world:
        losses = {
            compressor.name: on_every(world, lambda comm, compressor=compressor: train()(comm, compressor))  # type: ignore[misc]
            for compressor in (NoCompression(), TopK(0.01))
        }
    assert all(len(set(each)) == 1 for each in losses.values()), "ranks learnt different things"
    dense, sparse = (each[0] for each in losses.values())
    assert dense < 0.2, "so little that there is something to lose"
    assert abs(sparse / dense - 1) < 0.02


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    ("compressor", "bytes_sent"),
    [
        (TopK(0.01), lambda n: (n - 1) * 1000 * 8),
        (RandomK(0.1), lambda n: 2 * (n - 1) / n * 10_000 * 4),
        (NoCompression(), lambda n: 2 * (n - 1) / n * 100_000 * 4),
        (Int8(), lambda n: (n - 1) * (100_000 + 391 * 4)),
        (FP8(), lambda n: (n - 1) * (100_000 + 391 * 4)),
    ],
)
def test_a_rank_sends_what_the_documents_say(size: int, compressor: Compressor, bytes_sent: Any) -> None:
    def task(comm: Communicator) -> float:
        x = np.random.default_rng(comm.rank).normal(size=100_000).astype(np.float32)
        comm.all_reduce_compressed(x, compressor)
        return float(sum(link["bytes_sent"] for link in comm.stats()["links"].values()))

    with ranks_over("memory", size, collective_timeout=EVENT_TIMEOUT) as world:
        assert on_every(world, task) == pytest.approx([bytes_sent(size)] * size, rel=0.01)
