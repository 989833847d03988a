"""DDP between two hosts: what it learns, and that no secret goes through torch's store without permission."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from nexar_tools.network_namespaces import NetworkNamespaces
from tests.architecture.sources import ROOT
from tests.processes.nexar_command import Python, introductions
from tests.processes.scale import FULL

DDP = ROOT / "examples" / "torch_ddp.py"
INTERFACE = "wire"
TOKEN = "0123456789abcdef" * 4
pytestmark = pytest.mark.netns


@contextmanager
def ranks(folder: Path, size: int, words: Sequence[object], **settings: str) -> Iterator[list[Python]]:
    """Half of them on each host."""
    half = size // 2
    with NetworkNamespaces() as network, ExitStack() as stack:
        first = network.places[0].host
        yield [
            stack.enter_context(
                Python(
                    *words, cwd=folder, prefix=network.places[rank // half].prefix,
                    RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank % half), LOCAL_WORLD_SIZE=str(half),
                    MASTER_ADDR=first, MASTER_PORT="29400", GLOO_SOCKET_IFNAME=INTERFACE, **settings,
                )
            )
            for rank in range(size)
        ]  # fmt: skip


def test_ddp_trains_one_model_on_two_hosts_that_know_a_token(tmp_path):
    with ranks(tmp_path, 2, [DDP], NEXAR_CLUSTER_TOKEN=TOKEN) as started:
        ended = [each.end(100.0) for each in started]
    assert ended == [0, 0], "".join(each.stderr for each in started)
    assert "step 60: 2 ranks" in started[0].stdout
    assert "the same model on all ranks: True" in started[0].stdout


def test_two_hosts_without_a_token_publish_no_ticket_and_say_what_to_set(tmp_path):
    with ranks(tmp_path, 2, [DDP]) as started:
        ended = [each.end(100.0) for each in started]
    assert 0 not in ended
    for each in started:
        assert "ConfigError: NEXAR_CLUSTER_TOKEN" in each.stderr
        assert "rank 0 and rank 1 do not share one host" in each.stderr
        assert "NEXAR_TICKET_IN_STORE=1" in each.stderr


def test_two_hosts_without_a_token_meet_where_the_user_allows_a_ticket_in_the_store(tmp_path):
    with ranks(tmp_path, 2, [DDP], NEXAR_TICKET_IN_STORE="1") as started:
        ended = [each.end(100.0) for each in started]
    assert ended == [0, 0], "".join(each.stderr for each in started)


@pytest.mark.parametrize(
    "size", [pytest.param(2, marks=pytest.mark.skipif(not FULL, reason="NEXAR_FULL=1 runs it")), 4]
)
def test_a_transformer_learns_what_it_learns_with_gloo_and_alike_on_all_ranks(tmp_path, size):
    with ranks(tmp_path, size, ["-m", "tests.torch.curve"], PYTHONPATH=str(ROOT), NEXAR_CLUSTER_TOKEN=TOKEN) as started:
        found = introductions(*started, patience=100.0)
    assert len({facts["nexar"][1] for facts in found.values()}) == 1, "not the same weights, bit for bit"
    for facts in found.values():
        assert facts["nexar"][0] == pytest.approx(facts["gloo"][0], rel=1e-4)
