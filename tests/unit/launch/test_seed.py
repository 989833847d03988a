"""The public seed: the one of the cluster, with the settings of this process."""

import pytest

import nexar
from nexar.cluster.seed import SeedService as ConfiguredSeed
from nexar.errors import ConfigError


def test_it_has_the_settings_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEXAR_TRANSPORTS", "tls")
    monkeypatch.setenv("NEXAR_BIND", "127.0.0.1")
    with nexar.Seed(size=2) as seed:
        assert isinstance(seed, ConfiguredSeed)
        assert seed.address.startswith("127.0.0.1:")


def test_arguments_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEXAR_BIND", "192.0.2.1")
    with nexar.Seed(size=2, bind="127.0.0.1", transports=("tls",)) as seed:
        assert seed.address.startswith("127.0.0.1:")


def test_a_setting_that_there_is_not_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="formation_timout"):
        nexar.Seed(size=2, formation_timout=3)
