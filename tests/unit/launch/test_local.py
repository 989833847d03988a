import pytest

from nexar.config import Config
from nexar.errors import ConfigError
from nexar.launch.local import local


def test_a_local_world_takes_the_settings_that_init_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEXAR_BARRIER_TIMEOUT_SECS", "7")
    with local(2, Config(collective_timeout=5), rpc_timeout=3) as world:
        chosen = world[1].config
        assert (chosen.barrier_timeout, chosen.collective_timeout, chosen.rpc_timeout) == (7, 5, 3)


def test_a_setting_that_does_not_exist_is_refused_before_anything_is_opened() -> None:
    with pytest.raises((ConfigError, TypeError), match="no_such_setting"):
        local(2, no_such_setting=1)
