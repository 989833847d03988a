"""The names users write, pinned: adding one is a decision, losing one is a break."""

import tomllib

import pytest

import nexar
from tests.architecture.sources import PACKAGE, ROOT

NAMES = [
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


def test_the_package_exports_exactly_these_names():
    assert nexar.__all__ == NAMES
    assert all(hasattr(nexar, name) for name in NAMES)


@pytest.mark.parametrize(
    ("public", "name"),
    [
        (nexar.Membership, "encode"),
        (nexar.Membership, "decode"),
        (nexar.Membership, "pin"),
        (nexar.Communicator, "resolve_error"),
        (nexar.Communicator, "outcome_to_await"),
    ],
)
def test_what_only_nexar_itself_calls_is_not_a_public_method(public: type, name: str) -> None:
    assert not hasattr(public, name)


def test_the_package_says_the_version_it_is_sold_under():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert nexar.__version__ == project["version"]


def test_the_package_is_marked_as_typed():
    assert (PACKAGE / "py.typed").exists()


def test_only_the_agreed_packages_are_needed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {requirement.split(">=")[0] for requirement in project["dependencies"]}
    assert needed == {"cryptography", "ml-dtypes", "msgspec", "numpy", "psutil", "rich", "typer"}
