"""`Config`: every setting of nexar, with its default and its explanation.

A field is its variable without `NEXAR_` and `_SECS`, in lower case. A `Config` is always valid.
"""

from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, TypeVar, cast

from nexar.config.value_types import (
    AUTO,
    BufferTiers,
    Choice,
    Endpoint,
    Flag,
    Integer,
    PortRange,
    Schemes,
    Seconds,
    Text,
    Token,
    Topology,
    ValueRefused,
    ValueType,
    WordOr,
)
from nexar.errors import ConfigError

_Value = TypeVar("_Value")

REDACTED = "<secret>"
_HOST = r"[^\s,]+"
_NAME = r"[^\s\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,255}"
_POSITIVE = Integer(least=1)
_TRANSPORTS = ("shm", "quic", "tls")


@dataclass(frozen=True, slots=True)
class Setting:
    """The description of one field of `Config`."""

    name: str
    variable: str
    kind: ValueType
    default: Any
    doc: str
    unit: str
    secret: bool
    same_on_all_ranks: bool
    """Must be equal on every rank, because it determines schedules, topology or membership. The seed compares it."""

    def show(self, value: object) -> object:
        """Hides secrets."""
        return REDACTED if self.secret and value is not None else value

    def refuse(self, value: object, hint: str = "") -> ConfigError:
        """The error for a value that is not allowed."""
        return ConfigError(variable=self.variable, value=self.show(value), allowed=self.kind.allowed, hint=hint)


def _setting(
    default: _Value, kind: ValueType, doc: str, *, secret: bool = False, same_on_all_ranks: bool = False
) -> _Value:
    """Typed as its default, like `dataclasses.field`."""
    described: Any = field(
        default=default, metadata={"kind": kind, "doc": doc, "secret": secret, "same_on_all_ranks": same_on_all_ranks}
    )
    return cast("_Value", described)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Config:
    """All settings of one node. Raises ConfigError for a value that is not allowed."""

    # -- joining
    cluster_token: str | None = _setting(
        None, Token(), "The cluster's secret, if it exists before the seed. It is proven, never sent.", secret=True
    )
    seed: str | None = _setting(None, Endpoint(), "Where the seed listens; used with the token.")
    ticket: str | None = _setting(
        None,
        Text("the string the seed printed", r"\S+"),
        "Seed addresses, the seed's key and the secret in one string.",
        secret=True,
    )
    ticket_in_store: bool = _setting(
        False,
        Flag(),
        "The torch backend may pass the ticket through torch's store: whoever reaches the store can join the cluster.",
    )
    formation_timeout: float = _setting(60.0, Seconds(), "How long the whole cluster may take to form.")
    join_timeout: float = _setting(
        0.0, Seconds(zero="no limit"), "How long a late joiner waits for the checkpoint that admits it."
    )
    join_max_pending: int = _setting(
        256, Integer(least=1, most=1_000_000), "Unauthenticated connections that the seed, or a rank, holds at once."
    )
    join_auth_timeout: float = _setting(
        10.0,
        Seconds(least=0.01),
        "How long a connection may take to authenticate. After its hello it has a third of this time for its proof.",
    )
    certificate_lifetime: float = _setting(
        31_536_000.0, Seconds(), "How long the certificates the seed issues are valid."
    )

    # -- addresses
    iface: str | None = _setting(
        None,
        Text("an interface name, an address, a CIDR network, or ^NAME to exclude one", r"\^?[^\s^]+"),
        "Which network to use and advertise.",
    )
    bind: str | None = _setting(
        None, Text("a host name or address", _HOST), "Address to listen on; unset: every interface in use."
    )
    advertise: str | None = _setting(
        None, Text("host names or addresses separated by commas"), "Addresses advertised to peers; unset: detected."
    )
    port: int = _setting(0, Integer(most=65535, zero="any free port"), "The one port of this process, UDP and TCP.")
    port_range: tuple[int, int] | None = _setting(None, PortRange(), "Ports to take the first free one from.")
    host_id: str | None = _setting(
        None,
        Text("a name of up to 255 printable characters, without spaces", _NAME),
        "Ranks with different host ids never share memory; unset: detected.",
    )

    # -- transports
    transports: tuple[str, ...] = _setting(_TRANSPORTS, Schemes(_TRANSPORTS), "Transports in order of preference.")
    topology: str = _setting("full_mesh", Topology(), "Which pairs of ranks have a data link.", same_on_all_ranks=True)
    enable_tcp_bulk_sidecar: bool | Literal["auto"] = _setting(
        AUTO,
        WordOr(AUTO, AUTO, Flag()),
        "Send large payloads over a separate TCP connection; auto: where that is faster.",
    )
    encrypt_bulk_transport: bool = _setting(True, Flag(), "Encrypt that connection; off only on trusted networks.")
    buffer_profile: str | tuple[tuple[int, int], ...] = _setting(
        "training", BufferTiers(), "Sizes and numbers of pooled receive buffers."
    )
    spin_microsecs: int | Literal["auto"] = _setting(
        AUTO, WordOr(AUTO, AUTO, Integer()), "How long a waiting thread yields before it sleeps."
    )

    # -- messages
    eager_limit_bytes: int = _setting(
        65_536,
        Integer(least=1, most=1 << 20),
        "Messages up to this size are sent at once; larger ones wait for a grant.",
    )
    credit_bytes: int = _setting(
        1_048_576,
        Integer(least=262_144, most=1 << 40),
        "Eager bytes that one peer may have in flight, per communicator.",
    )
    early_bytes: int = _setting(536_870_912, _POSITIVE, "Bytes of unexpected messages that this node holds.")

    # -- collectives
    collective_timeout: float = _setting(30.0, Seconds(), "Deadline of a collective without progress.")
    barrier_timeout: float = _setting(30.0, Seconds(), "Deadline of a barrier without progress.")
    large_msg_bytes: int = _setting(
        8_388_608, _POSITIVE, "From this size on, schedules are chosen for throughput.", same_on_all_ranks=True
    )
    pipeline_segment_bytes: int = _setting(
        2_097_152, _POSITIVE, "Segment of a pipelined schedule.", same_on_all_ranks=True
    )
    ring_max_world: int = _setting(8, _POSITIVE, "Largest world that uses the plain ring.", same_on_all_ranks=True)
    bucket_bytes: int = _setting(
        26_214_400, _POSITIVE, "Largest size of a bucket of all_reduce_bucketed.", same_on_all_ranks=True
    )
    compressed_allreduce_max_bytes: int = _setting(
        4_294_967_296, Integer(zero="no check"), "Most memory a compressed all_reduce may take.", same_on_all_ranks=True
    )

    # -- remote calls
    rpc_timeout: float = _setting(30.0, Seconds(), "Deadline of a remote call.")
    rpc_concurrency: int = _setting(64, _POSITIVE, "Remote calls served at once; more are rejected.")

    # -- failure and recovery
    heartbeat_interval: float = _setting(
        1.0,
        Seconds(),
        "Time between two heartbeats, and between two measurements of this rank's own delay.",
        same_on_all_ranks=True,
    )
    heartbeat_timeout: float = _setting(
        5.0, Seconds(), "Silence after which a peer counts as dead.", same_on_all_ranks=True
    )
    stuck_timeout: float = _setting(
        60.0, Seconds(), "Time without a heartbeat after which a peer is expelled although its packets arrive."
    )
    recovery_timeout: float = _setting(30.0, Seconds(), "How long agreeing on the next membership may take.")
    recovery_policy: str = _setting(
        "automatic",
        Choice(("automatic", "manual", "abort"), aliases=((AUTO, "automatic"),)),
        "What happens after the loss of a member.",
        same_on_all_ranks=True,
    )

    # -- growing and shrinking
    elastic_enabled: bool = _setting(False, Flag(), "Admit nodes after the cluster has formed.")
    elastic_min_world_size: int = _setting(1, _POSITIVE, "With fewer members than this a checkpoint waits for more.")
    elastic_max_world_size: int = _setting(0, Integer(zero="unlimited"), "More members than this are rejected.")
    elastic_checkpoint_timeout: float = _setting(
        60.0, Seconds(), "Deadline of a checkpoint that changes the membership."
    )

    # -- watching
    metrics_port: int | None = _setting(
        None,
        WordOr("off", None, Integer(most=65535, zero="any free port")),
        "Port of the metrics for Prometheus; each further rank of a host has the next one.",
    )
    trace_dir: str | None = _setting(
        None, Text("a directory"), "Where each rank writes its part of a trace when it ends."
    )
    dump_dir: str | None = _setting(
        None,
        Text("a directory"),
        "Where the flight recorder writes when a collective fails; unset: only on SIGUSR1, to ./nexar-dumps.",
    )

    def __post_init__(self) -> None:
        for setting in settings():
            value = getattr(self, setting.name)
            try:
                object.__setattr__(self, setting.name, setting.kind.accept(value))
            except ValueRefused:
                raise setting.refuse(value) from None
        _check_together(self)

    def __repr__(self) -> str:
        """Without defaults and secrets."""
        changed = [(s, getattr(self, s.name)) for s in settings() if getattr(self, s.name) != s.default]
        return f"Config({', '.join(f'{setting.name}={setting.show(value)!r}' for setting, value in changed)})"


def agreed_settings(config: Config) -> dict[str, str]:
    """The settings that must be equal on every rank, as text. A joiner sends them, and the seed compares them."""
    return {setting.name: f"{getattr(config, setting.name)}" for setting in settings() if setting.same_on_all_ranks}


def settings() -> tuple[Setting, ...]:
    """In the order of this file."""
    return _SETTINGS


def _describe(described: Field[Any]) -> Setting:
    name, kind = described.name, described.metadata["kind"]
    unit = _unit(name, kind)
    variable = f"NEXAR_{name.upper()}" + ("_SECS" if unit == "seconds" else "")
    doc, secret, same_on_all_ranks = (described.metadata[key] for key in ("doc", "secret", "same_on_all_ranks"))
    return Setting(name, variable, kind, described.default, doc, unit, secret, same_on_all_ranks)


def _unit(name: str, kind: ValueType) -> str:
    if isinstance(kind, Seconds):
        return "seconds"
    return {"bytes": "bytes", "microsecs": "microseconds"}.get(name.rpartition("_")[2], "")


_SETTINGS = tuple(_describe(described) for described in fields(Config))


def _check_together(config: Config) -> None:
    """ConfigError for values that contradict one another. A rule: condition, the setting to blame, what is allowed."""
    largest = config.elastic_max_world_size
    rules = (
        (
            config.heartbeat_timeout > config.heartbeat_interval,
            "heartbeat_timeout",
            f"more than heartbeat_interval ({config.heartbeat_interval:g} s)",
        ),
        (
            config.credit_bytes >= 4 * config.eager_limit_bytes,
            "credit_bytes",
            f"at least 4 times eager_limit_bytes ({4 * config.eager_limit_bytes})",
        ),
        (
            largest == 0 or config.elastic_min_world_size <= largest,
            "elastic_min_world_size",
            f"at most elastic_max_world_size ({largest})",
        ),
    )
    for holds, name, allowed in rules:
        if not holds:
            setting = next(setting for setting in settings() if setting.name == name)
            raise ConfigError(variable=setting.variable, value=getattr(config, name), allowed=allowed)
