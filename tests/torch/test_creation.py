from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

import nexar
from nexar.torch import creation
from nexar.torch.creation import _Store, create


class Silent:
    """A store that has nothing to say, in the words of one of torch's."""

    timeout = timedelta(seconds=3)

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def get(self, key: str) -> bytes:
        raise self._error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Timeout waiting for key: default_pg/0//cpu//nexar after 3000 ms"),
        dist.DistStoreError("wait timeout after 3000ms, keys: /default_pg/0//cpu//nexar"),
    ],
    ids=["of a file", "of TCP"],
)
def test_a_rank_0_that_has_not_come_is_named(error):
    with pytest.raises(nexar.OperationTimeout, match="waiting for the process of rank 0") as caught:
        _Store(Silent(error)).read()
    assert caught.value.timeout == 3.0
    assert caught.value.__cause__ is error


def test_a_store_that_has_gone_with_rank_0_sends_the_reader_there():
    gone = dist.DistNetworkError("Connection reset by peer\nException raised from recvBytes at somewhere")
    with pytest.raises(
        nexar.SeedUnreachable, match="is gone: Connection reset by peer\\); look at what rank 0"
    ) as caught:
        _Store(Silent(gone)).read()
    assert "Exception raised" not in str(caught.value)


def test_a_torch_that_is_too_old_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.12.1"))
    with pytest.raises(
        nexar.UsageError, match=r"needs torch 2\.13 or a newer one, and this is 2\.12\.1; .*nexar\[torch\]"
    ):
        create(SimpleNamespace(), None)


def test_ranks_that_do_not_come_are_counted_and_the_limit_has_the_name_it_has_in_torch(monkeypatch):
    def alone(board: object, rank: int, size: int, **settings: float) -> None:
        raise nexar.FormationTimeout(
            joined=["rank 0"], expected=size, refused={}, timeout=settings["formation_timeout"]
        )

    monkeypatch.setattr(creation, "meet", alone)
    options = SimpleNamespace(
        timeout=timedelta(seconds=2), global_ranks_in_group=[], store=None, group_rank=0, group_size=3
    )
    with pytest.raises(nexar.FormationTimeout, match="1 of 3 nodes joined in 2 s") as caught:
        create(options, None)
    assert "timeout= of init_process_group" in "".join(caught.value.__notes__)
