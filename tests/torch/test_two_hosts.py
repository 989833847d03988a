"""DDP between two hosts, with and without the token that keeps the secret out of torch's store."""

from contextlib import ExitStack

import pytest

from nexar.testing.network_namespaces import NetworkNamespaces
from tests.architecture.sources import ROOT
from tests.processes.nexar_command import Python

DDP = ROOT / "examples" / "torch_ddp.py"
pytestmark = [pytest.mark.netns, pytest.mark.timeout(150)]


@pytest.mark.parametrize("secret", ["ticket", "token"])
def test_ddp_trains_one_model_on_two_hosts(tmp_path, secret):
    settings = {"NEXAR_CLUSTER_TOKEN": "0123456789abcdef" * 4} if secret == "token" else {}
    with NetworkNamespaces() as network, ExitStack() as stack:
        first = network.places[0].host
        ranks = [
            stack.enter_context(
                Python(
                    DDP, cwd=tmp_path, prefix=place.prefix, RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0",
                    LOCAL_WORLD_SIZE="1", MASTER_ADDR=first, MASTER_PORT="29400", **settings,
                )
            )
            for rank, place in enumerate(network.places)
        ]  # fmt: skip
        ended = [each.end(100.0) for each in ranks]
    assert ended == [0, 0], "".join(each.stderr for each in ranks)
    assert "step 60: 2 ranks" in ranks[0].stdout
    assert "the same model on all ranks: True" in ranks[0].stdout
