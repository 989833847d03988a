"""nexar: a distributed runtime for Python.

Modules that run a cluster are loaded on first use, so that `import nexar` and the commands start quickly.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nexar.config import Config
from nexar.errors import (
    BufferMismatch,
    Cancelled,
    CollectiveMismatch,
    CollectiveTimeout,
    ConfigError,
    DeviceError,
    Expelled,
    FormationTimeout,
    InternalError,
    JoinRefused,
    LinkClosed,
    MembershipChanged,
    NexarError,
    NoQuorum,
    OperationTimeout,
    PeerError,
    PeerLost,
    PeerMisbehaved,
    RecoveryTimeout,
    RemoteError,
    Revoked,
    RpcCancelled,
    RpcError,
    RpcOverloaded,
    RpcTimeout,
    SeedUnreachable,
    UnknownFunction,
    UsageError,
    VersionMismatch,
)
from nexar.types import ANY_SOURCE, ANY_TAG

if TYPE_CHECKING:
    from nexar.arrays.compression.base import Compressor
    from nexar.arrays.compression.quantized import FP8, Int8, NoCompression
    from nexar.arrays.compression.sparse import RandomK, TopK
    from nexar.cluster.membership import Membership
    from nexar.communicator.communicator import Communicator
    from nexar.communicator.events import FailureEvent, MembershipEvent
    from nexar.communicator.request import Request, wait_all
    from nexar.communicator.resilient import Team
    from nexar.launch.init import connect, init
    from nexar.launch.local import local
    from nexar.launch.seed import Seed
    from nexar.launch.spawn import spawn

__version__ = "0.2.0"

__all__ = [
    "ANY_SOURCE",
    "ANY_TAG",
    "FP8",
    "BufferMismatch",
    "Cancelled",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Communicator",
    "Compressor",
    "Config",
    "ConfigError",
    "DeviceError",
    "Expelled",
    "FailureEvent",
    "FormationTimeout",
    "Int8",
    "InternalError",
    "JoinRefused",
    "LinkClosed",
    "Membership",
    "MembershipChanged",
    "MembershipEvent",
    "NexarError",
    "NoCompression",
    "NoQuorum",
    "OperationTimeout",
    "PeerError",
    "PeerLost",
    "PeerMisbehaved",
    "RandomK",
    "RecoveryTimeout",
    "RemoteError",
    "Request",
    "Revoked",
    "RpcCancelled",
    "RpcError",
    "RpcOverloaded",
    "RpcTimeout",
    "Seed",
    "SeedUnreachable",
    "Team",
    "TopK",
    "UnknownFunction",
    "UsageError",
    "VersionMismatch",
    "connect",
    "init",
    "local",
    "spawn",
    "wait_all",
]

_LAZY_NAMES = {
    "Communicator": "nexar.communicator.communicator",
    "Compressor": "nexar.arrays.compression.base",
    "FP8": "nexar.arrays.compression.quantized",
    "FailureEvent": "nexar.communicator.events",
    "Int8": "nexar.arrays.compression.quantized",
    "Membership": "nexar.cluster.membership",
    "MembershipEvent": "nexar.communicator.events",
    "NoCompression": "nexar.arrays.compression.quantized",
    "RandomK": "nexar.arrays.compression.sparse",
    "Request": "nexar.communicator.request",
    "Seed": "nexar.launch.seed",
    "Team": "nexar.communicator.resilient",
    "TopK": "nexar.arrays.compression.sparse",
    "connect": "nexar.launch.init",
    "init": "nexar.launch.init",
    "local": "nexar.launch.local",
    "spawn": "nexar.launch.spawn",
    "wait_all": "nexar.communicator.request",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY_NAMES:
        raise AttributeError(f"module 'nexar' has no attribute {name!r}")
    return getattr(import_module(_LAZY_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
