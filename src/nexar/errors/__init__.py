"""Every error nexar raises, as one tree. The word in brackets says who can mend it.

    NexarError
    ├── UsageError                          [you]    the call cannot mean anything
    │   └── BufferMismatch                           receive buffer and message differ in size or dtype
    ├── ConfigError                         [you]    a setting has a value that is not allowed
    ├── VersionMismatch                     [you]    two protocol versions met
    ├── CollectiveMismatch                  [you]    ranks called different collectives
    ├── LinkClosed        ConnectionError   [you]    the link was closed on this side
    ├── Cancelled                           [you]    the operation was cancelled on this side
    ├── DeviceError                         [you]    staging to or from a device failed
    ├── JoinRefused       ConnectionError   [seed]   the seed said no
    ├── SeedUnreachable   ConnectionError   [seed]   nobody answered at the seed's addresses
    ├── FormationTimeout  TimeoutError      [they]   not everybody came
    ├── PeerError         ConnectionError   [they]   one peer is the reason
    │   ├── PeerLost                                 it is gone
    │   └── PeerMisbehaved                           it broke the protocol
    ├── OperationTimeout  TimeoutError      [they]   somebody did not answer in time
    │   └── CollectiveTimeout                        … in a collective
    ├── MembershipChanged                   [they]   go on with the successor it carries
    ├── Expelled                            [they]   the others went on without this node
    ├── Revoked                             [they]   a member declared the communicator over
    ├── NoQuorum                            [they]   no majority can be reached
    ├── RecoveryTimeout   TimeoutError      [they]   a majority is there but did not finish
    ├── RpcError                            [they]   a remote call failed
    │   ├── UnknownFunction
    │   ├── RemoteError                              the function raised
    │   ├── RpcTimeout    TimeoutError
    │   ├── RpcOverloaded
    │   └── RpcCancelled
    └── InternalError                       [we]     a bug of nexar

Facts are attributes; the message is built here, from the facts alone, and says what to do next. Constructors take facts
by keyword. Errors travel between processes: facts are plain values, and every class survives pickling.
"""

from nexar.errors.base import NexarError
from nexar.errors.joining import FormationTimeout, JoinRefused, SeedUnreachable
from nexar.errors.membership import Expelled, MembershipChanged, NoQuorum, RecoveryTimeout, Revoked
from nexar.errors.operations import Cancelled, CollectiveMismatch, CollectiveTimeout, OperationTimeout
from nexar.errors.peers import LinkClosed, PeerError, PeerLost, PeerMisbehaved
from nexar.errors.remote_calls import RemoteError, RpcCancelled, RpcError, RpcOverloaded, RpcTimeout, UnknownFunction
from nexar.errors.usage import BufferMismatch, ConfigError, DeviceError, InternalError, UsageError, VersionMismatch

__all__ = [
    "BufferMismatch",
    "Cancelled",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "ConfigError",
    "DeviceError",
    "Expelled",
    "FormationTimeout",
    "InternalError",
    "JoinRefused",
    "LinkClosed",
    "MembershipChanged",
    "NexarError",
    "NoQuorum",
    "OperationTimeout",
    "PeerError",
    "PeerLost",
    "PeerMisbehaved",
    "RecoveryTimeout",
    "RemoteError",
    "Revoked",
    "RpcCancelled",
    "RpcError",
    "RpcOverloaded",
    "RpcTimeout",
    "SeedUnreachable",
    "UnknownFunction",
    "UsageError",
    "VersionMismatch",
]
