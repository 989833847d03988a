"""What is stored in files, shown to programs, or handed to processes: written by the code that writes it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import patch

from nexar.cli.bench import protocol
from nexar.cli.doctor import observations
from nexar.cli.doctor.report import report_json
from nexar.cluster import seed_state
from nexar.cluster.decisions.paxos import Vote
from nexar.cluster.membership import Member, Membership, decode_member, encode_member, encode_membership
from nexar.collectives import trace_writer
from nexar.config import Config, settings
from nexar.launch import entry, rendezvous, seed_process
from nexar.launch.detect import LaunchInfo
from nexar.launch.plan import Command, HostBlock, RankPlan, plan_ranks
from nexar.launch.seed_process import changed_settings
from nexar.observe.overview import OverviewBuilder
from nexar.security.certificates import node_name
from nexar.security.invitation import Invitation, format_ticket, invitation_from_token, parse_ticket
from nexar.security.proof import Role, prove, proves
from nexar.transport.shm.socket_directory import ShmAddress, parse_shm_address
from nexar.wire.status import StatusPage
from tests.architecture.golden.filling import Filler
from tests.architecture.golden.sample import NODE, OTHER_NODE, Sample, json_text, text
from tests.architecture.golden.structs import KEYS


def file_samples() -> Iterator[Sample]:
    """All of them."""
    for samples in (
        _proofs, _tickets, _names, _seed_state, _ticket_file, _rendezvous_keys, _child_environments, _settings,
        _trace_file, _doctor_page, _status_facts, _bench_lines, _membership_in_order,
    ):  # fmt: skip
        yield from samples()


# ---------------------------------------------------------------- security


def _proofs() -> Iterator[Sample]:
    secret, nonces, certificate = bytes(range(32)), (bytes(range(32, 64)), bytes(range(64, 96))), b"certificate"
    for role in get_args(Role):
        proof = prove(secret, role, *nonces, certificate)
        assert proves(proof, secret, role, *nonces, certificate)
        yield Sample(f"proof of {role}", proof)


def _tickets() -> Iterator[Sample]:
    invitation = Invitation(("192.0.2.7:4000", "[2001:db8::7]:4001"), bytes(range(32)), bytes(range(32, 64)))
    ticket = format_ticket(invitation)
    assert parse_ticket(ticket) == invitation
    yield text("ticket", ticket)
    token = "0123456789abcdef" * 4
    yield Sample("secret of a cluster token", invitation_from_token(token, ("192.0.2.7:4000",)).secret)


def _names() -> Iterator[Sample]:
    yield text("name of a node in its certificate", node_name(NODE, "cluster"))
    address = ShmAddress(NODE, "/run/nexar/socket", bytes(range(32)))
    assert parse_shm_address(address.secret) == address
    yield text("address of shared memory", address.secret)
    yield text("address of shared memory, shown", address.shown)
    for start in (LaunchInfo(kind="slurm", rank=0, size=4, job="1234"), LaunchInfo(kind="nexar", rank=0, size=4)):
        yield text(f"port of the seed of job {start.job}", str(entry.rank_zero_port(start, Config())))
        yield text(f"name of the ticket file of job {start.job}", entry._file_name(start, 99))


# ---------------------------------------------------------------- files and processes


def _seed_state() -> Iterator[Sample]:
    """The three files, as a seed writes them. Key and authority are stand-ins: their forms are X.509's."""
    key = SimpleNamespace(private_bytes=lambda *_: b"key")
    authority = SimpleNamespace(export=lambda: b"authority")
    identity: Any = seed_state.SeedIdentity(NODE, key, authority, bytes(range(32)), 4000)  # type: ignore[arg-type]
    vote, membership = Filler(KEYS).full(Vote), Membership("cluster", 2, _members())
    with tempfile.TemporaryDirectory() as folder:
        state = seed_state.SeedState(folder)
        state.keep_identity(identity)
        state.keep_vote(vote)
        state.keep_membership(membership)
        assert state.load_vote() == vote
        assert state.load_membership("cluster") == membership
        for path in sorted(Path(folder).iterdir()):
            yield Sample(f"seed state file {path.name}", path.read_bytes(), "msgpack")


def _ticket_file() -> Iterator[Sample]:
    """As rank 0 writes it; the process id and when that process started are replaced."""
    with tempfile.TemporaryDirectory() as folder, patch.object(tempfile, "tempdir", folder):
        with seed_process.offered_ticket("name", "ticket", os.getpid()):
            (path,) = Path(folder).glob("*/name")
            note = json.loads(path.read_bytes())
            assert seed_process.wait_for_ticket("name", 60.0) == "ticket"
        private = path.parent.relative_to(folder)
    assert str(private) == f"nexar-{os.geteuid()}"
    assert note["seed"] == os.getpid()
    yield Sample("ticket file as it is written", json.dumps(note | {"seed": 1, "started": "2"}).encode(), "json")


def _rendezvous_keys() -> Iterator[Sample]:
    yield text("torch rendezvous key of the round", rendezvous._ROUND)
    yield text("torch rendezvous key of a hello", rendezvous._hello_key("number", 3))
    yield text("torch rendezvous key of the answer", rendezvous._answer_key("number"))


def _child_environments() -> Iterator[Sample]:
    """What a launcher gives to its children: variables, command line, names of log files."""
    inherited = {"PATH": "/bin", "NEXAR_SEED": "old", "NEXAR_CLUSTER_TOKEN": "old", "NEXAR_TICKET": "old"}
    for first_rank in (4, None):
        block = HostBlock(
            count=2, first_rank=first_rank, size=8, group_rank=2, launcher=NODE, master_addr="host", master_port=4000
        )
        for target in (Command("script", "train.py", ("--fast",)), Command("module", "train"), Command("program", "a")):
            plans = plan_ranks(
                block, target, python="python3", inherited=inherited, entry={"NEXAR_TICKET": "new"}, mark="mark"
            )
            again = plans[1].replacement_plan(as_joiner=True)
            word = f"{target.form} of a {'rank' if first_rank else 'joiner'}"
            yield json_text(f"child process {word}", _planned(plans[1]))
            yield json_text(f"child process {word}, restarted", _planned(again))


def _planned(plan: RankPlan) -> dict[str, Any]:
    return {
        "rank": plan.rank,
        "local_rank": plan.local_rank,
        "command": plan.command,
        "environment": dict(plan.environment),
        "log": plan.log_name("stderr"),
        "prefix": plan.prefix,
    }


def _settings() -> Iterator[Sample]:
    """Names of settings are in files, in environments, in join messages and in the terms of seed processes."""
    yield from (text(f"setting {setting.name}", setting.variable) for setting in settings())
    changed = Config(cluster_token="0123456789abcdef" * 4, port_range=(4000, 4010), heartbeat_interval=0.25)
    yield json_text("settings for a seed process", changed_settings(changed))


def _trace_file() -> Iterator[Sample]:
    part = Filler(KEYS).full(trace_writer.TracePart)
    with tempfile.TemporaryDirectory() as folder:
        trace_writer._store(Path(folder), part)
        (path,) = Path(folder).iterdir()
        assert trace_writer.decode_trace_part(path.read_bytes()) == part
        yield Sample("trace part file", path.read_bytes(), "msgpack")
        yield text("trace part file name", path.name)


def _doctor_page() -> Iterator[Sample]:
    filler = Filler(KEYS)
    machine, finding = filler.full(observations.Machine), filler.full(observations.DoctorFinding)
    reaches = (observations.Reach(0, 1, "quic", 0.5, skew=0.25), observations.Reach(0, 2, "tls", None, "refused"))
    reports = {0: observations.DoctorReport(0, machine, "192.0.2.7:4000", True, reaches)}
    yield Sample("doctor page", report_json(machine, reports, [finding]).encode(), "json")


def _status_facts() -> Iterator[Sample]:
    """What `nexar status --json` shows, but for the title, which is for people."""
    facts = OverviewBuilder().see(Filler(KEYS).full(StatusPage), 10.0).facts()
    yield json_text("status facts", {name: value for name, value in facts.items() if name != "title"})


def _bench_lines() -> Iterator[Sample]:
    """What `nexar bench` and its ranks say to each other."""
    stated = protocol.BenchOrder(
        measure="all_reduce", count=2, dtype="float32", op="sum", root=1, algorithm="ring", warmups=3, iterations=4,
        check=True,
    )  # fmt: skip
    reply, hello = (
        protocol.BenchReply(nanoseconds=(1, 2), wrong=3, problem="problem"),
        protocol.RankHello(rank=1, version="2"),
    )
    assert protocol.parse_order(stated.line()) == stated
    assert protocol.parse_reply(reply.line()) == reply
    assert protocol.parse_hello(hello.line()) == hello
    yield Sample("bench order", stated.line(), "text")
    yield Sample("bench reply", reply.line(), "text")
    yield Sample("bench hello", hello.line(), "text")


# ---------------------------------------------------------------- members


def _members() -> tuple[Member, ...]:
    addresses = {"tls": ("192.0.2.7:4002",), "quic": ("192.0.2.7:4000", "[2001:db8::7]:4001")}
    abilities = frozenset({"tls", "shm", "quic"})
    return tuple(Member(node, "host", bytes([node % 256]) * 32, addresses, abilities, 7) for node in (NODE, OTHER_NODE))


def _membership_in_order() -> Iterator[Sample]:
    """Equal memberships have equal bytes: addresses and capabilities are sorted, whatever order they come in."""
    member = _members()[0]
    assert decode_member(encode_member(member)) == member
    yield Sample("membership member in canonical order", encode_member(member), "msgpack")
    yield Sample("membership in canonical order", encode_membership(Membership("cluster", 2, _members())), "msgpack")
