import os

import pytest

from nexar import Config, ConfigError, environment
from nexar.config import settings
from nexar.environment import effective

TOKEN = "5f1d7c0a93be48e2a6d4c8f07b3e9a15"


@pytest.fixture
def write(tmp_path):
    def write_file(text):
        path = tmp_path / "nexar.toml"
        path.write_text(text)
        return str(path)

    return write_file


def test_nothing_given_means_defaults_everywhere():
    found = effective(environ={})
    assert found.config == Config()
    assert set(found.origins.values()) == {"default"}
    assert list(found.origins) == [setting.name for setting in settings()]


def test_the_argument_wins_then_the_variable_then_the_file_then_the_default(write):
    path = write("port = 1\nrpc_timeout = 2\nring_max_world = 3\n")
    environ = {"NEXAR_CONFIG": path, "NEXAR_PORT": "11", "NEXAR_RPC_TIMEOUT_SECS": "12"}
    found = effective({"port": 21}, environ)
    assert (found.config.port, found.origins["port"]) == (21, "argument")
    assert (found.config.rpc_timeout, found.origins["rpc_timeout"]) == (12.0, "NEXAR_RPC_TIMEOUT_SECS")
    assert (found.config.ring_max_world, found.origins["ring_max_world"]) == (3, path)
    assert (found.config.bucket_bytes, found.origins["bucket_bytes"]) == (26214400, "default")


def test_the_process_environment_is_read_when_no_other_is_given(monkeypatch):
    monkeypatch.setenv("NEXAR_PORT", "4000")
    assert effective().config.port == 4000


def test_an_empty_variable_counts_as_unset():
    found = effective(environ={"NEXAR_PORT": "", "NEXAR_SEED": "  ", "NEXAR_CONFIG": ""})
    assert found.config == Config()
    assert found.origins["port"] == "default"


@pytest.mark.parametrize("text", ["1", "true", "YES", " on "])
def test_texts_for_true(text):
    assert effective(environ={"NEXAR_ELASTIC_ENABLED": text}).config.elastic_enabled is True


@pytest.mark.parametrize("text", ["0", "False", "no", "OFF"])
def test_texts_for_false(text):
    assert effective(environ={"NEXAR_ENCRYPT_BULK_TRANSPORT": text}).config.encrypt_bulk_transport is False


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("NEXAR_HEARTBEAT_INTERVAL_SECS", "0.25", 0.25),
        ("NEXAR_HEARTBEAT_INTERVAL_SECS", " 2 ", 2.0),
        ("NEXAR_RECOVERY_POLICY", "Auto", "automatic"),
        ("NEXAR_RECOVERY_POLICY", "ABORT", "abort"),
        ("NEXAR_TRANSPORTS", "TLS,SHM", ("tls", "shm")),
        ("NEXAR_PORT_RANGE", "4000 - 4100", (4000, 4100)),
        ("NEXAR_ENABLE_TCP_BULK_SIDECAR", "yes", True),
        ("NEXAR_ENABLE_TCP_BULK_SIDECAR", "Auto", "auto"),
        ("NEXAR_METRICS_PORT", "OFF", None),
        ("NEXAR_METRICS_PORT", "9100", 9100),
        ("NEXAR_SPIN_MICROSECS", "50", 50),
        ("NEXAR_CLUSTER_TOKEN", f" {TOKEN}\n", TOKEN),
    ],
)
def test_a_text_becomes_the_value_it_stands_for(variable, text, value):
    name = next(setting.name for setting in settings() if setting.variable == variable)
    assert getattr(effective(environ={variable: text}).config, name) == value


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("NEXAR_PORT", "many"),
        ("NEXAR_PORT", "1.5"),
        ("NEXAR_RPC_TIMEOUT_SECS", "soon"),
        ("NEXAR_RPC_TIMEOUT_SECS", "inf"),
        ("NEXAR_ELASTIC_ENABLED", "maybe"),
        ("NEXAR_RECOVERY_POLICY", "sometimes"),
    ],
)
def test_a_wrong_text_is_refused_with_variable_value_and_what_is_allowed(variable, text):
    with pytest.raises(ConfigError) as caught:
        effective(environ={variable: text})
    assert (caught.value.variable, caught.value.value) == (variable, text)


def test_a_wrong_token_is_not_shown():
    with pytest.raises(ConfigError) as caught:
        effective(environ={"NEXAR_CLUSTER_TOKEN": "hunter2"})
    assert "hunter2" not in str(caught.value)


def test_a_mistyped_variable_is_refused_with_the_nearest_name_and_its_value_is_not_shown():
    with pytest.raises(ConfigError, match="did you mean NEXAR_CLUSTER_TOKEN") as caught:
        effective(environ={"NEXAR_CLUSTER_TOKN": TOKEN})
    assert TOKEN not in str(caught.value)


def test_the_forgotten_unit_of_a_variable_is_suggested():
    with pytest.raises(
        ConfigError, match=r"^unknown setting NEXAR_RPC_TIMEOUT; did you mean NEXAR_RPC_TIMEOUT_SECS\?$"
    ):
        effective(environ={"NEXAR_RPC_TIMEOUT": "5"})


def test_variables_of_others_and_of_our_launcher_are_left_alone(monkeypatch):
    monkeypatch.setattr(environment, "LAUNCHER_VARIABLES", frozenset({"NEXAR_CHILD"}))
    assert effective(environ={"RANK": "0", "NCCL_DEBUG": "INFO", "NEXAR_CHILD": "1"}).config == Config()


def test_what_is_inherited_is_a_copy(monkeypatch):
    monkeypatch.setenv("NEXAR_PORT", "4000")
    variables = environment.inherited()
    variables["NEXAR_PORT"] = "5000"
    assert environment.inherited()["NEXAR_PORT"] == "4000"


def test_an_unknown_argument_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"^unknown setting heartbeat_timout; did you mean heartbeat_timeout\?$"):
        effective({"heartbeat_timout": 3.0}, {})


def test_the_file_takes_toml_values_and_texts(write):
    path = write(
        'transports = ["tls"]\nelastic_enabled = true\nmetrics_port = "off"\nrecovery_policy = "Auto"\nport = "7"\n'
    )
    config = effective(environ={"NEXAR_CONFIG": path}).config
    assert config == Config(transports=("tls",), elastic_enabled=True, port=7)


def test_an_unknown_key_of_the_file_is_refused_with_the_nearest_name(write):
    with pytest.raises(ConfigError, match="did you mean port"):
        effective(environ={"NEXAR_CONFIG": write("prt = 1\n")})


def test_a_wrong_value_of_the_file_names_the_file(write):
    path = write("port = -1\n")
    with pytest.raises(ConfigError) as caught:
        effective(environ={"NEXAR_CONFIG": path})
    assert path in str(caught.value)


@pytest.mark.parametrize("text", ["port = ", "port = 1\nport = 2\n", "\udcff"])
def test_a_file_that_is_no_toml_is_refused_by_its_variable(tmp_path, text):
    path = tmp_path / "broken.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match="NEXAR_CONFIG"):
        effective(environ={"NEXAR_CONFIG": str(path)})


def test_a_file_that_is_not_there_is_refused_with_the_reason(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        effective(environ={"NEXAR_CONFIG": str(tmp_path / "none.toml")})


def test_values_from_different_places_are_checked_together():
    with pytest.raises(ConfigError, match="more than heartbeat_interval"):
        effective({"heartbeat_interval": 3.0}, {"NEXAR_HEARTBEAT_TIMEOUT_SECS": "2"})


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o602, 0o604])
def test_a_file_with_a_token_that_others_can_read_or_write_is_refused_with_the_remedy(write, mode):
    path = write(f'cluster_token = "{TOKEN}"')
    os.chmod(path, mode)
    with pytest.raises(ConfigError, match="chmod 600") as raised:
        effective(environ={"NEXAR_CONFIG": path})
    assert TOKEN not in str(raised.value)
    os.chmod(path, 0o600)
    assert effective(environ={"NEXAR_CONFIG": path}).config.cluster_token == TOKEN


def test_a_file_without_a_secret_may_be_read_by_anybody(write):
    path = write("port = 7")
    os.chmod(path, 0o644)
    assert effective(environ={"NEXAR_CONFIG": path}).config.port == 7
