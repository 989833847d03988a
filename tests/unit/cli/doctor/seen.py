"""Observations for the tests of what follows from them."""

from msgspec.structs import replace

from nexar.cli.doctor.observations import (
    Attachment,
    DoctorReport,
    FreeSpace,
    Limits,
    ListenPort,
    Machine,
    Reach,
    RoundTrip,
    Version,
)

HEALTHY = Machine(
    name="a",
    host="aaaa",
    wanted=("shm", "quic", "tls"),
    versions=(Version("python", "3.11.7"), Version("nexar", "0.1.0"), Version("nexar-native", "0.1.0")),
    interfaces=(
        Attachment("lo", ("127.0.0.1/8",), 65536, up=True, loopback=True),
        Attachment("eth0", ("10.0.0.1/24",), 1500, up=True, loopback=False),
    ),
    door=ListenPort("[::]:4000", ("10.0.0.1:4000",)),
    trips=(RoundTrip("shm", 20e-6), RoundTrip("quic", 40e-6), RoundTrip("tls", 50e-6)),
    memory=FreeSpace("/dev/shm", 1 << 30, 1 << 29),
    limits=Limits(20_000, 20_000, 8 << 20, 4 << 20, 4 << 20),
    cpus=2,
    load=0.5,
    clock=1_700_000_000.0,
)


def machine(**changes):
    return replace(HEALTHY, **changes)


def report(rank, host, *reaches, fixed_port=True, **changes):
    """Of a rank on this host; `reaches` are (dest, scheme, round trip, problem, or None if it is not offered)."""
    seen = []
    for dest, scheme, found in reaches:
        if found is None:
            seen.append(Reach(rank, dest, scheme, problem="whatever it says", offered=False))
        elif isinstance(found, str):
            seen.append(Reach(rank, dest, scheme, problem=found))
        else:
            seen.append(
                Reach(rank, dest, scheme, round_trip=found, mtu_bytes=1452 if scheme == "quic" else None, skew=0.0)
            )
    about = machine(name=host, host=host * 4, **changes)
    return DoctorReport(rank, about, f"10.0.0.{rank + 1}:4000", fixed_port, tuple(seen))


def reports(*given):
    return {each.rank: each for each in given}
