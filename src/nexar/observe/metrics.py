"""Prometheus metrics of one rank, computed when scraped.

A membership change resets call counters, which Prometheus treats as a restart. Link counters continue.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from http import HTTPStatus
from importlib.metadata import version
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from nexar.cluster.membership import Membership
from nexar.collectives.call_log import CallLog
from nexar.collectives.statistics import Straggler
from nexar.communicator.runtime import NodeRuntime
from nexar.config import Config
from nexar.errors import ConfigError, UsageError
from nexar.links.link import Link
from nexar.observe.http_service import TEXT, HttpResponse, HttpService, ServedPage, check_listen
from nexar.types import NodeId, Rank, format_node

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_LOOPBACK: Final = "127.0.0.1"
_NAME: Final = "metrics"
_REMEDY: Final = "set NEXAR_METRICS_PORT to another one (each rank of a host has the next), or to 0 for any"
_MISSING: Final = HttpResponse(b"The metrics are at /metrics.\n", TEXT, HTTPStatus.NOT_FOUND)
_OPERATION_COUNTERS: Final = {
    "calls": ("nexar_collective_calls", "Collectives that have ended."),
    "bytes": ("nexar_collective_bytes", "Bytes of their arrays."),
    "seconds": ("nexar_collective_seconds", "Seconds spent in them."),
    "seconds_waiting": ("nexar_collective_waiting_seconds", "Seconds of that until the last rank arrived."),
    "errors": ("nexar_collective_errors", "Collectives that ended with an error."),
}
_LINK_COUNTERS: Final = {
    "bytes_sent": ("nexar_link_sent_bytes", "Bytes sent to a peer."),
    "bytes_received": ("nexar_link_received_bytes", "Bytes received from a peer."),
    "messages_sent": ("nexar_link_sent_messages", "Messages sent to a peer."),
    "messages_received": ("nexar_link_received_messages", "Messages received from a peer."),
}


class NodeSource:
    """Input of one node's metrics."""

    def __init__(self, runtime: NodeRuntime) -> None:
        self._runtime = runtime
        self.me: Final = runtime.node.id

    def membership(self) -> Membership:
        return self._runtime.membership_service.membership

    def call_logs(self) -> list[CallLog]:
        return [generation.context.call_log for generation in self._runtime.successors.generations()]

    def links(self) -> Mapping[NodeId, Link]:
        return self._runtime.mesh.links()


class Collector:
    """Computes the metrics. Thread-safe."""

    def __init__(self) -> None:
        self.source: NodeSource | None = None
        """Written once, when this node has joined."""

    def describe(self) -> list[Metric]:
        """Empty, or the library would collect everything once at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        source = self.source
        membership = None if source is None else source.membership()
        rank = None if source is None or membership is None else membership.rank_of(source.me)
        if source is None or membership is None or rank is None:
            return  # it has not joined yet, or is no longer a member
        yield from _position(source, membership, rank)
        call_logs = list(source.call_logs())
        yield from _operations(call_logs, rank)
        yield from _in_flight(call_logs, rank)
        yield from _peers(call_logs[0] if call_logs else None, membership, rank)
        yield from _links(source.links(), membership, rank)


def _position(source: NodeSource, membership: Membership, rank: Rank) -> Iterator[Metric]:
    labels = {
        "rank": str(rank),
        "node": format_node(source.me),
        "host": membership.member(rank).host,
        "cluster": membership.cluster,
        "version": version("nexar"),
    }
    yield _gauge("nexar_info", "Identity of this rank; always 1.", [(labels, 1)])
    yield _gauge("nexar_world_size", "Members of the cluster.", [({"rank": str(rank)}, membership.size)])
    yield _gauge(
        "nexar_epoch", "Epoch of the membership; grows with each change.", [({"rank": str(rank)}, membership.epoch)]
    )


def _operations(call_logs: Iterable[CallLog], rank: Rank) -> Iterator[Metric]:
    sums: dict[str, dict[str, float]] = {}
    for call_log in call_logs:
        for operation, facts in call_log.stats()["operations"].items():
            into = sums.setdefault(operation, dict.fromkeys(_OPERATION_COUNTERS, 0.0))
            for name in _OPERATION_COUNTERS:
                into[name] += facts[name]
    for name, (metric, text) in _OPERATION_COUNTERS.items():
        yield _counter(metric, text, [({"rank": str(rank), "operation": each}, sums[each][name]) for each in sums])


def _in_flight(call_logs: Iterable[CallLog], rank: Rank) -> Iterator[Metric]:
    calls = [entry for call_log in call_logs for entry in call_log.in_flight()]
    now, labels = monotonic(), {"rank": str(rank)}
    longest = max((now - entry.began for entry in calls), default=0.0)
    yield _gauge("nexar_collectives_in_flight", "Collectives that this rank is in.", [(labels, len(calls))])
    yield _gauge("nexar_collective_age_seconds", "Age of the oldest of them; 0: none.", [(labels, longest)])


def _peers(call_log: CallLog | None, membership: Membership, rank: Rank) -> Iterator[Metric]:
    waited: dict[Rank, float] = {} if call_log is None else call_log.stats()["waiting_for"]
    late: list[Straggler] = [] if call_log is None else call_log.stragglers()

    def of_members(values: Iterable[tuple[Rank, float]]) -> _Samples:
        """Samples by current rank; drops former members."""
        nodes = () if call_log is None else call_log.nodes
        ranked = [(membership.rank_of(nodes[peer]), value) for peer, value in values]
        return [({"rank": str(rank), "peer": str(peer)}, value) for peer, value in ranked if peer is not None]

    yield _counter(
        "nexar_waiting_for_seconds",
        "Seconds in which this rank was in a collective and the peer was not.",
        of_members(waited.items()),
    )
    yield _gauge(
        "nexar_lateness_seconds",
        "Mean lateness of the peer in collectives, measured by this rank.",
        of_members((each.rank, each.mean_lateness) for each in late),
    )
    yield _counter(
        "nexar_times_last",
        "Collectives that the peer reached last.",
        of_members((each.rank, each.times_last) for each in late),
    )


def _links(links: Mapping[NodeId, Link], membership: Membership, rank: Rank) -> Iterator[Metric]:
    ranked = {peer: link for node, link in links.items() if (peer := membership.rank_of(node)) is not None}
    stats = {peer: link.stats() for peer, link in ranked.items()}
    for name, (metric, text) in _LINK_COUNTERS.items():
        counted = [({"rank": str(rank), "peer": str(peer)}, facts[name]) for peer, facts in stats.items()]
        yield _counter(metric, text, counted)
    carried = [
        ({"rank": str(rank), "peer": str(peer), "carrier": scheme}, 1.0)
        for peer, link in ranked.items()
        if link.failure is None
        for scheme in link.schemes
    ]
    yield _gauge("nexar_link_carrier", "Carriers of the link to a peer; always 1.", carried)


_Samples = list[tuple[dict[str, str], float]]


def _gauge(name: str, text: str, samples: _Samples) -> Metric:
    from prometheus_client.core import GaugeMetricFamily  # noqa: PLC0415 - needed only where metrics are served

    return _filled(GaugeMetricFamily(name, text, labels=_labels(samples)), samples)


def _counter(name: str, text: str, samples: _Samples) -> Metric:
    from prometheus_client.core import CounterMetricFamily  # noqa: PLC0415 - as above

    return _filled(CounterMetricFamily(name, text, labels=_labels(samples)), samples)


def _labels(samples: _Samples) -> list[str]:
    return list(samples[0][0]) if samples else ["rank"]


def _filled(family: Any, samples: _Samples) -> Metric:
    for labels, value in samples:
        family.add_metric(list(labels.values()), value)
    filled: Metric = family
    return filled


class Metrics(ServedPage):
    """Serves `/metrics`; empty until there is a source."""

    def __init__(self, host: str, port: int) -> None:
        """Raises UsageError if it cannot listen or prometheus-client is missing."""
        _check_installed()
        from prometheus_client import CollectorRegistry  # noqa: PLC0415 - needed only where metrics are served
        from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest  # noqa: PLC0415

        self.collector: Final = Collector()
        registry = CollectorRegistry()
        registry.register(self.collector)

        def respond(path: str, _: Mapping[str, str]) -> HttpResponse:
            return HttpResponse(generate_latest(registry), CONTENT_TYPE_LATEST) if path == "/metrics" else _MISSING

        service = HttpService(host, port, respond, name=_NAME, remedy=_REMEDY)
        super().__init__(service)
        self.url: Final = f"{service.url}/metrics"


def open_metrics(config: Config, port: int, local_rank: int) -> Metrics:
    """Serve at port + local rank (0: any), on loopback unless NEXAR_BIND is set. Raises ConfigError, UsageError."""
    return Metrics(*_listen_address(config, port, local_rank))


def check_metrics(config: Config, count: int) -> None:
    """Raises the error that `open_metrics` would raise for one of this host's `count` ranks."""
    if config.metrics_port is None:
        return
    _check_installed()
    for local_rank in range(count):
        check_listen(*_listen_address(config, config.metrics_port, local_rank), name=_NAME, remedy=_REMEDY)


def _listen_address(config: Config, port: int, local_rank: int) -> tuple[str, int]:
    if port and port + local_rank > 65535:
        allowed = f"at most {65535 - local_rank}: each rank of a host has the next port"
        raise ConfigError(variable="NEXAR_METRICS_PORT", value=port, allowed=allowed)
    return config.bind or _LOOPBACK, port + local_rank if port else 0


def _check_installed() -> None:
    try:
        import prometheus_client  # noqa: F401, PLC0415 - needed only where metrics are served
    except ImportError as error:
        raise UsageError(
            f"NEXAR_METRICS_PORT needs the package prometheus-client ({error}): pip install 'nexar[metrics]'"
        ) from error
