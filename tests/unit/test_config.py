import dataclasses
import math
import pickle
import re

import pytest

from nexar import Config, ConfigError
from nexar.config import settings

TOKEN = "5f1d7c0a93be48e2a6d4c8f07b3e9a15"

# The variables users were promised, with the default each has.
PROMISED = {
    "NEXAR_CLUSTER_TOKEN": None,
    "NEXAR_SEED": None,
    "NEXAR_TICKET": None,
    "NEXAR_TICKET_IN_STORE": False,
    "NEXAR_TOPOLOGY": "full_mesh",
    "NEXAR_COLLECTIVE_TIMEOUT_SECS": 30.0,
    "NEXAR_BARRIER_TIMEOUT_SECS": 30.0,
    "NEXAR_RPC_TIMEOUT_SECS": 30.0,
    "NEXAR_FORMATION_TIMEOUT_SECS": 60.0,
    "NEXAR_LARGE_MSG_BYTES": 8388608,
    "NEXAR_PIPELINE_SEGMENT_BYTES": 2097152,
    "NEXAR_RING_MAX_WORLD": 8,
    "NEXAR_ENABLE_TCP_BULK_SIDECAR": "auto",
    "NEXAR_ENCRYPT_BULK_TRANSPORT": True,
    "NEXAR_COMPRESSED_ALLREDUCE_MAX_BYTES": 4294967296,
    "NEXAR_HEARTBEAT_INTERVAL_SECS": 1.0,
    "NEXAR_HEARTBEAT_TIMEOUT_SECS": 5.0,
    "NEXAR_RECOVERY_TIMEOUT_SECS": 30.0,
    "NEXAR_RECOVERY_POLICY": "automatic",
    "NEXAR_ELASTIC_ENABLED": False,
    "NEXAR_ELASTIC_MIN_WORLD_SIZE": 1,
    "NEXAR_ELASTIC_MAX_WORLD_SIZE": 0,
    "NEXAR_ELASTIC_CHECKPOINT_TIMEOUT_SECS": 60.0,
    "NEXAR_TRANSPORTS": ("shm", "quic", "tls"),
    "NEXAR_IFACE": None,
    "NEXAR_BIND": None,
    "NEXAR_ADVERTISE": None,
    "NEXAR_PORT": 0,
    "NEXAR_PORT_RANGE": None,
    "NEXAR_HOST_ID": None,
    "NEXAR_STUCK_TIMEOUT_SECS": 60.0,
    "NEXAR_JOIN_TIMEOUT_SECS": 0.0,
    "NEXAR_EARLY_BYTES": 536870912,
    "NEXAR_CERTIFICATE_LIFETIME_SECS": 31536000.0,
    "NEXAR_BUFFER_PROFILE": "training",
    "NEXAR_EAGER_LIMIT_BYTES": 65536,
    "NEXAR_CREDIT_BYTES": 1048576,
    "NEXAR_METRICS_PORT": None,
    "NEXAR_TRACE_DIR": None,
    "NEXAR_DUMP_DIR": None,
    "NEXAR_JOIN_MAX_PENDING": 256,
    "NEXAR_JOIN_AUTH_TIMEOUT_SECS": 10.0,
    "NEXAR_BUCKET_BYTES": 26214400,
    "NEXAR_RPC_CONCURRENCY": 64,
    "NEXAR_SPIN_MICROSECS": "auto",
}


def test_every_promised_variable_is_a_setting_with_its_default():
    assert {setting.variable: setting.default for setting in settings()} == PROMISED


def test_a_field_is_its_variable_without_prefix_and_seconds():
    for setting in settings():
        assert setting.name == setting.variable.removeprefix("NEXAR_").removesuffix("_SECS").lower()


def test_every_setting_explains_itself():
    for setting in settings():
        assert re.fullmatch(r"[A-Z].{10,}\.", setting.doc), setting.name
        assert setting.kind.allowed


def test_units_follow_the_names():
    units = {setting.name: setting.unit for setting in settings()}
    assert (units["rpc_timeout"], units["credit_bytes"], units["spin_microsecs"]) == (
        "seconds",
        "bytes",
        "microseconds",
    )
    assert units["port"] == ""


def test_the_defaults_are_valid_and_equal():
    assert Config() == Config()
    assert repr(Config()) == "Config()"


def test_a_config_cannot_be_changed_only_replaced():
    config = Config(port=4000)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.port = 5000
    assert dataclasses.replace(config, port=5000) == Config(port=5000)


def test_a_config_survives_the_way_to_another_process():
    config = Config(port_range=(4000, 4100), cluster_token=TOKEN)
    assert pickle.loads(pickle.dumps(config)) == config


def test_settings_are_given_by_name_only():
    with pytest.raises(TypeError):
        Config(TOKEN)


@pytest.mark.parametrize(
    ("name", "value", "normal"),
    [
        ("recovery_policy", "auto", "automatic"),
        ("recovery_policy", " Manual ", "manual"),
        ("rpc_timeout", 5, 5.0),
        ("rpc_timeout", 0.25, 0.25),
        ("join_timeout", 0, 0.0),
        ("topology", "K_Regular:04", "k_regular:4"),
        ("topology", "hypercube", "hypercube"),
        ("transports", "TLS, shm", ("tls", "shm")),
        ("transports", ["memory"], ("memory",)),
        ("port_range", "4000-4100", (4000, 4100)),
        ("port_range", [4000, 4000], (4000, 4000)),
        ("buffer_profile", "Inference", "inference"),
        ("buffer_profile", "65536:8, 1048576:2", ((65536, 8), (1048576, 2))),
        ("enable_tcp_bulk_sidecar", "AUTO", "auto"),
        ("enable_tcp_bulk_sidecar", False, False),
        ("spin_microsecs", 0, 0),
        ("metrics_port", "off", None),
        ("metrics_port", 9100, 9100),
        ("seed", " [fe80::1%eth0]:4000 ", "[fe80::1%eth0]:4000"),
        ("seed", "seed.example:4000", "seed.example:4000"),
        ("iface", "^docker0", "^docker0"),
        ("cluster_token", TOKEN, TOKEN),
    ],
)
def test_values_come_into_their_normal_form(name, value, normal):
    stored = getattr(Config(**{name: value}), name)
    assert (stored, type(stored)) == (normal, type(normal))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("formation_timeout", 1e300),
        ("formation_timeout", math.nextafter(1e9, math.inf)),
        ("join_timeout", 2e9),
        ("join_auth_timeout", 0.0001),
        ("join_max_pending", 10**20),
        ("credit_bytes", 10**20),
        ("port", -1),
        ("port", 65536),
        ("port", True),
        ("port", 1.0),
        ("port", None),
        ("rpc_timeout", 0),
        ("rpc_timeout", -1),
        ("rpc_timeout", float("nan")),
        ("rpc_timeout", float("inf")),
        ("rpc_timeout", True),
        ("rpc_timeout", "30"),
        ("join_timeout", -1),
        ("rpc_concurrency", 0),
        ("elastic_enabled", 1),
        ("elastic_enabled", "true"),
        ("recovery_policy", "sometimes"),
        ("recovery_policy", None),
        ("topology", "k_regular:3"),
        ("topology", "k_regular:0"),
        ("topology", "ring"),
        ("transports", ()),
        ("transports", "tls,tls"),
        ("transports", "tls,,shm"),
        ("transports", 3),
        ("port_range", "4100-4000"),
        ("port_range", "4000"),
        ("port_range", (0, 10)),
        ("buffer_profile", "huge"),
        ("buffer_profile", "64:1,64:2"),
        ("buffer_profile", ()),
        ("seed", "nowhere"),
        ("seed", "fe80::1:4000"),
        ("seed", "host:0"),
        ("seed", "host:70000"),
        ("host_id", ""),
        ("host_id", "two words"),
        ("host_id", "red\x1b[31m"),
        ("host_id", "not\udce9unicode"),
        ("host_id", "x" * 256),
        ("metrics_port", 70000),
        ("spin_microsecs", "long"),
    ],
)
def test_a_wrong_value_is_refused_with_its_variable_and_what_is_allowed(name, value):
    with pytest.raises(ConfigError) as caught:
        Config(**{name: value})
    setting = next(setting for setting in settings() if setting.name == name)
    assert caught.value.variable == setting.variable
    assert caught.value.value is value
    assert caught.value.allowed in str(caught.value)


@pytest.mark.parametrize(
    "token", ["", "short", "0123456789abcdef" + "0123456789abcde", "a" * 64, "correct horse battery"]
)
def test_a_weak_token_is_refused_with_a_way_to_make_one_and_not_shown(token):
    with pytest.raises(ConfigError, match="token_hex") as caught:
        Config(cluster_token=token)
    assert not token or token not in str(caught.value)


def test_secrets_are_not_shown():
    shown = repr(Config(cluster_token=TOKEN, ticket="nexar1-secret", port=7))
    assert shown == "Config(cluster_token='<secret>', ticket='<secret>', port=7)"


@pytest.mark.parametrize(
    ("given", "variable", "allowed"),
    [
        ({"heartbeat_interval": 5.0}, "NEXAR_HEARTBEAT_TIMEOUT_SECS", "more than heartbeat_interval (5 s)"),
        ({"eager_limit_bytes": 300_000}, "NEXAR_CREDIT_BYTES", "at least 4 times eager_limit_bytes (1200000)"),
        (
            {"elastic_min_world_size": 4, "elastic_max_world_size": 2},
            "NEXAR_ELASTIC_MIN_WORLD_SIZE",
            "at most elastic_max_world_size (2)",
        ),
    ],
)
def test_settings_that_contradict_one_another_are_refused(given, variable, allowed):
    with pytest.raises(ConfigError) as caught:
        Config(**given)
    assert (caught.value.variable, caught.value.allowed) == (variable, allowed)


def test_an_unlimited_world_has_no_largest_size_to_contradict():
    assert Config(elastic_min_world_size=100).elastic_max_world_size == 0
