import msgspec

from nexar import Config
from nexar.launch.seed_terms import SeedFailed, SeedReady, SeedTerms, changed_settings


def test_a_config_is_the_same_on_the_other_side():
    config = Config(port_range=(4000, 4100), transports=("tls",), elastic_enabled=True, buffer_profile=((1024, 2),))
    sent = msgspec.json.encode(SeedTerms(4, ":0", changed_settings(config)))
    assert Config(**msgspec.json.decode(sent, type=SeedTerms).settings) == config


def test_defaults_are_not_sent():
    assert changed_settings(Config()) == {}


def test_an_answer_is_one_or_the_other():
    for answer in (SeedReady("T", "a:1", 7), SeedFailed("no")):
        assert msgspec.json.decode(msgspec.json.encode(answer), type=SeedReady | SeedFailed) == answer
