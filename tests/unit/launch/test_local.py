import pytest

from nexar.config import Config
from nexar.errors import ConfigError, UsageError
from nexar.launch.local import local
from nexar.observe import metrics as metrics_module
from tests.unit.launch.test_create import FakeMetrics


def test_a_local_world_takes_the_settings_that_init_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEXAR_BARRIER_TIMEOUT_SECS", "7")
    with local(2, Config(collective_timeout=5), rpc_timeout=3) as world:
        chosen = world[1].config
        assert (chosen.barrier_timeout, chosen.collective_timeout, chosen.rpc_timeout) == (7, 5, 3)


def test_a_setting_that_does_not_exist_is_refused_before_anything_is_opened() -> None:
    with pytest.raises((ConfigError, TypeError), match="no_such_setting"):
        local(2, no_such_setting=1)


def test_each_rank_of_a_local_world_has_metrics_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[int, FakeMetrics] = {}

    def open_metrics(_: Config, port: int, local_rank: int) -> FakeMetrics:
        assert port == 9300
        return made.setdefault(local_rank, FakeMetrics())

    monkeypatch.setattr(metrics_module, "open_metrics", open_metrics)
    monkeypatch.setenv("NEXAR_METRICS_PORT", "9300")
    with local(2) as world:
        sources = [made[rank].collector.source for rank in range(2)]
        assert [source and source.me for source in sources] == [member.node for member in world[0].membership.members]
        assert [each.closed for each in made.values()] == [0, 0]
    assert [each.closed for each in made.values()] == [1, 1]


def test_a_local_world_whose_metrics_cannot_be_served_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise UsageError("that port is taken")

    monkeypatch.setattr(metrics_module, "open_metrics", refuse)
    with pytest.raises(UsageError, match="taken"), local(2, metrics_port=9300):
        pytest.fail("it was made")
