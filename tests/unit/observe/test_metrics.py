import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="prometheus-client is not installed: pip install 'nexar[metrics]'")

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from nexar.cluster.membership import Member, Membership
from nexar.collectives.call_log import CallLog
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.operations import OperationCode
from nexar.config import Config
from nexar.errors import ConfigError
from nexar.observe.metrics import Collector, check_metrics, open_metrics
from tests.unit.collectives.recorded_world import World

ROOT = Path(__file__).parents[3]
BARRIER = Fingerprint(OperationCode.BARRIER)


class FakeLink:
    schemes = ("quic", "shm")
    failure: Exception | None = None

    def stats(self) -> dict[str, float]:
        return {"bytes_sent": 10, "bytes_received": 20, "messages_sent": 1, "messages_received": 2, "more": 9}


class FakeSource:
    def __init__(self, world: World, rank: int = 0) -> None:
        self._group = world[rank]
        self.me = self._group.membership.members[rank].node

    def membership(self) -> Membership:
        return self._group.membership

    def call_logs(self) -> list[CallLog]:
        return [self._group.call_log]

    def links(self) -> dict[int, FakeLink]:
        other = next(member.node for member in self.membership().members if member.node != self.me)
        return {other: FakeLink(), 424242: FakeLink()}


def scraped(collector: Collector) -> dict[tuple[str, str], float]:
    """By name, and by the labels but for the rank."""
    registry = CollectorRegistry()
    registry.register(collector)
    text = generate_latest(registry).decode()
    return {
        (sample.name, " ".join(value for name, value in sample.labels.items() if name not in ("rank", "version"))): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def watched() -> tuple[World, Collector]:
    world = World(2)
    for rank in range(2):
        world[rank].call_log.end(world[rank].call_log.begin(BARRIER))
    collector = Collector()
    collector.source = FakeSource(world)
    return world, collector


def test_peers_have_the_ranks_of_now_whichever_communicator_saw_them_late() -> None:
    half = World(2)[0]  # ranks 2 and 1 of the world are 0 and 1 in it
    first, second = half.membership.members
    entry = half.call_log.begin(BARRIER)
    entry.arrivals[second.node] = entry.began + 1
    half.call_log.end(entry)
    source = FakeSource(half.world)
    world = replace(half.membership, members=(Member(7, "elsewhere", bytes(32), {}), second, first))
    source.membership = lambda: world  # type: ignore[method-assign]
    collector = Collector()
    collector.source = source
    found = scraped(collector)
    assert found["nexar_waiting_for_seconds_total", "1"] == pytest.approx(1.0)
    assert {labels for name, labels in found if name == "nexar_times_last_total"} == {"1", "2"}
    world = replace(world, members=(world.members[0], first))
    assert ("nexar_waiting_for_seconds_total", "1") not in scraped(collector), "who is gone has no rank"


def test_before_this_node_has_joined_there_is_nothing_and_no_error() -> None:
    assert scraped(Collector()) == {}


def test_what_calls_count_anyway_is_what_is_reported() -> None:
    world, collector = watched()
    found = scraped(collector)
    assert found["nexar_collective_calls_total", "barrier"] == 1
    assert found["nexar_collective_errors_total", "barrier"] == 0
    assert found["nexar_world_size", ""] == 2
    assert found["nexar_link_sent_bytes_total", "1"] == 10
    assert found["nexar_link_carrier", "quic 1"] == 1
    assert found["nexar_collectives_in_flight", ""] == 0
    entry = world[0].call_log.begin(BARRIER)
    found = scraped(collector)
    assert found["nexar_collectives_in_flight", ""] == 1
    assert found["nexar_collective_age_seconds", ""] >= 0
    world[0].call_log.end(entry)


def test_a_node_that_is_no_member_any_more_reports_nothing() -> None:
    _, collector = watched()
    assert collector.source is not None
    collector.source.me = 99  # type: ignore[misc]
    assert scraped(collector) == {}


def test_the_dashboard_asks_only_for_metrics_and_labels_that_exist() -> None:
    _, collector = watched()
    samples = {name for name, _ in scraped(collector)}
    families = {metric.name: metric for metric in collector.collect()}
    known = samples | {f"{name}_total" if metric.type == "counter" else name for name, metric in families.items()}
    dashboard = json.loads((ROOT / "dashboards" / "nexar.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(expressions) >= 12
    for expression in expressions:
        assert set(re.findall(r"nexar_\w+", expression)) <= known, expression
        assert set(re.findall(r"nexar_\w+", expression)), expression
        assert set(re.findall(r"by \((\w+)\)", expression)) <= {"rank", "peer", "operation", "carrier", "version"}


def test_the_how_to_names_every_metric() -> None:
    text = (ROOT / "docs" / "howto" / "metrics.md").read_text()
    _, collector = watched()
    missing = {metric.name for metric in collector.collect() if f"`{metric.name}" not in text}
    assert missing == set()


def test_ports_of_further_ranks_must_exist() -> None:
    with pytest.raises(ConfigError, match="NEXAR_METRICS_PORT"):
        open_metrics(Config(), 65535, 3)
    with pytest.raises(ConfigError, match="NEXAR_METRICS_PORT"):
        check_metrics(Config(metrics_port=65535), 2)


def test_who_wants_no_metrics_needs_no_port() -> None:
    check_metrics(Config(), 70000)
