from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

import nexar
from nexar.torch import creation
from nexar.torch.creation import _Store, create


class Gone:
    """A store whose process has ended, in the words of one of torch's."""

    def check(self, keys: list[str]) -> bool:
        raise dist.DistNetworkError("Connection reset by peer\nException raised from recvBytes at somewhere")

    def set(self, key: str, text: str) -> None:
        self.check([key])


@pytest.mark.parametrize("use", [lambda board: board.find("key"), lambda board: board.put("key", "text")])
def test_a_store_that_has_gone_with_rank_0_sends_the_reader_there(use):
    with pytest.raises(
        nexar.SeedUnreachable, match="is gone: Connection reset by peer\nlook at the output of rank 0"
    ) as caught:
        use(_Store(Gone()))
    assert "Exception raised" not in str(caught.value)


def test_a_store_gives_back_what_was_written_last_and_never_waits(tmp_path):
    for store in (dist.HashStore(), dist.FileStore(str(tmp_path / "store"), 1)):
        board = _Store(dist.PrefixStore("of this group", store))
        assert board.find("key") is None
        board.put("key", "first")
        board.put("key", "second")
        assert board.find("key") == "second"


def test_a_torch_that_is_too_old_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.12.1"))
    with pytest.raises(nexar.UsageError, match=r"needs torch 2\.13 or newer, but this is 2\.12\.1; .*nexar\[torch\]"):
        create(SimpleNamespace(), None)


def test_ranks_that_do_not_come_are_counted_and_the_limit_has_the_name_it_has_in_torch(monkeypatch):
    def alone(board: object, rank: int, size: int, timeout: float, **settings: float) -> None:
        raise nexar.FormationTimeout(
            joined=["rank 0"], expected=size, refused={}, timeout=settings["formation_timeout"]
        )

    monkeypatch.setattr(creation, "join_through_store", alone)
    options = SimpleNamespace(
        timeout=timedelta(seconds=2), global_ranks_in_group=[], store=None, group_rank=0, group_size=3
    )
    with pytest.raises(nexar.FormationTimeout, match="1 of 3 nodes joined in 2 s") as caught:
        create(options, None)
    assert "timeout= of init_process_group" in "".join(caught.value.__notes__)
