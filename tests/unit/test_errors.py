import inspect
import pickle

import pytest

import nexar
from nexar import errors
from nexar.types import AwaitedPeer

PEER = {"rank": 3, "node": 42, "address": "10.0.0.7:4000"}
CALL = {"rank": 3, "function": "evaluate"}

# One example of each class, and words its message must have.
EXAMPLES = [
    (errors.UsageError("tag must be 0 or more"), ["tag must be 0 or more"]),
    (
        errors.BufferMismatch(expected="float32[4]", found="int8[8]", source=1, tag=7),
        ["float32[4]", "int8[8]", "rank 1", "7"],
    ),
    (errors.ConfigError(variable="NEXAR_PORT", value=-1, allowed="0 to 65535"), ["NEXAR_PORT", "-1", "0 to 65535"]),
    (errors.VersionMismatch(ours=2, theirs=1), ["protocol 1", "2", "upgrade nexar on the peer"]),
    (
        errors.CollectiveMismatch(expected="all_reduce(f32[4])", found="barrier()", ranks=[1, 2], sequence=9),
        ["#9", "all_reduce(f32[4])", "barrier()", "ranks 1, 2"],
    ),
    (
        errors.CollectiveMismatch(
            expected="barrier", found="scan", ranks=[1], sequence=3, calls={0: "barrier", 1: "scan", 2: "reduce"}
        ),
        ["#3", "barrier here", "scan on rank 1", "reduce on rank 2"],
    ),
    (errors.Cancelled(operation="barrier #3", reason="Ctrl-C", rank=2), ["barrier #3", "by rank 2", "Ctrl-C"]),
    (errors.LinkClosed(**PEER, operation="send"), ["rank 3", "send", "this side"]),
    (errors.Cancelled(operation="recv from rank 1", reason="Ctrl-C"), ["recv from rank 1", "Ctrl-C"]),
    (
        errors.DeviceError(device="cuda:0", operation="stage_out", cause="no memory"),
        ["cuda:0", "stage_out", "no memory"],
    ),
    (errors.JoinRefused(reason="the cluster is full", address="h:1"), ["h:1", "the cluster is full"]),
    (errors.JoinRefused(reason="it was silent", expelled=3), ["expelled in epoch 3: it was silent"]),
    (
        errors.SeedUnreachable(addresses=["h:1", "h:2"], attempts=5, cause="timed out", timeout=60.0),
        ["h:1, h:2", "5 attempts", "60 s", "timed out"],
    ),
    (
        errors.FormationTimeout(joined=["a"], expected=4, refused={"b": "wrong token"}, timeout=60.0),
        ["1 of 4", "60 s", "b: wrong token", "NEXAR_FORMATION_TIMEOUT_SECS"],
    ),
    (errors.PeerError(**PEER), ["rank 3"]),
    (
        errors.PeerLost(**PEER, cause="connection reset", operation="send"),
        ["rank 3", "during send", "connection reset"],
    ),
    (errors.PeerMisbehaved(**PEER, what="a frame of kind 99"), ["rank 3", "a frame of kind 99"]),
    (
        errors.OperationTimeout(operation="recv", waiting_for=[AwaitedPeer(rank=1)], timeout=5.0),
        ["recv", "rank 1", "5 s", "; check rank 1 first, or raise the limit (timeout=)"],
    ),
    (
        errors.CollectiveTimeout(operation="all_reduce", waiting_for=[AwaitedPeer(rank=1)], timeout=30.0, sequence=7),
        ["all_reduce #7", "rank 1", "30 s", "NEXAR_COLLECTIVE_TIMEOUT_SECS"],
    ),
    (
        errors.MembershipChanged(communicator=None, lost={2: "killed"}, joined=[3], completed_by_all=8),
        ["rank 2: killed", "rank 3", "#8", ".communicator"],
    ),
    (errors.Expelled(epoch=4, reason="silent for 5 s", rank=2), ["rank 2", "epoch 4", "silent for 5 s", "--elastic"]),
    (errors.Expelled(epoch=4, reason="silent", elastic=True), ["epoch 4", "start a new process to join again"]),
    (errors.Revoked(communicator="7", reason="mismatch", rank=1), ["communicator 7", "rank 1", "mismatch"]),
    (errors.NoQuorum(alive=[0], needed=2), ["rank 0", "2"]),
    (errors.NoQuorum(alive=[0], needed=2, left=[1, 2]), ["rank 0", "ranks 1, 2 left", "comm.barrier()"]),
    (errors.RecoveryTimeout(missing_votes=[1], timeout=30.0), ["rank 1", "30 s", "NEXAR_RECOVERY_TIMEOUT_SECS"]),
    (errors.RpcError(**CALL), ["evaluate", "rank 3"]),
    (errors.UnknownFunction(**CALL), ["evaluate", "rank 3", "@comm.serve"]),
    (errors.RemoteError(**CALL, traceback="Traceback …\nValueError: no"), ["evaluate", "rank 3", "ValueError: no"]),
    (errors.RpcTimeout(**CALL, timeout=30.0), ["evaluate", "rank 3", "30 s"]),
    (errors.RpcOverloaded(**CALL, limit=64), ["evaluate", "rank 3", "64", "NEXAR_RPC_CONCURRENCY"]),
    (errors.RpcCancelled(**CALL), ["evaluate", "rank 3"]),
    (errors.InternalError("credit went below zero"), ["credit went below zero", "bug"]),
]
each_example = pytest.mark.parametrize(("error", "words"), EXAMPLES, ids=[type(e).__name__ for e, _ in EXAMPLES])
CLASSES = [c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, errors.NexarError)]


def test_every_class_has_an_example_here_except_the_root():
    assert {type(error) for error, _ in EXAMPLES} == set(CLASSES) - {errors.NexarError}


@each_example
def test_the_message_names_the_facts(error, words):
    missing = [word for word in words if word not in str(error)]
    assert not missing, str(error)


@each_example
def test_an_error_survives_the_way_to_another_process(error, words):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), vars(copy)) == (str(error), vars(error))


@each_example
def test_an_error_keeps_notes_on_the_way(error, words):
    noted = pickle.loads(pickle.dumps(error))
    noted.add_note("seen on rank 0")
    assert pickle.loads(pickle.dumps(noted)).__notes__ == ["seen on rank 0"]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_is_drawn_in_the_tree_and_exported(cls):
    assert f"─ {cls.__name__} " in errors.__doc__.replace("\n", " \n") or cls is errors.NexarError
    assert getattr(nexar, cls.__name__) is cls


def test_existing_except_clauses_still_catch():
    for cls in (errors.OperationTimeout, errors.RpcTimeout, errors.FormationTimeout, errors.RecoveryTimeout):
        assert issubclass(cls, TimeoutError)
    for cls in (errors.PeerError, errors.LinkClosed, errors.SeedUnreachable, errors.JoinRefused):
        assert issubclass(cls, ConnectionError)


def test_a_barrier_that_came_too_late_names_the_setting_that_gives_it_more_time():
    late = errors.CollectiveTimeout(operation="barrier", waiting_for="rank 1", timeout=30.0, sequence=7)
    assert "NEXAR_BARRIER_TIMEOUT_SECS" in str(late)


@pytest.mark.parametrize(
    ("operation", "setting"),
    [("nexar.init()", "NEXAR_FORMATION_TIMEOUT_SECS"), ("joining the cluster", "NEXAR_JOIN_TIMEOUT_SECS")],
)
def test_a_timeout_of_init_names_a_setting_because_init_has_no_argument_of_that_name(operation, setting):
    late = errors.OperationTimeout(operation=operation, waiting_for="the seed", timeout=60.0)
    assert str(late).endswith(f"raise the limit ({setting})")


def test_facts_are_given_by_name_only():
    with pytest.raises(TypeError):
        errors.PeerLost(3, 42, "10.0.0.7:4000", "reset")


def test_a_peer_without_a_rank_is_named_by_its_node_or_its_address():
    assert "node 000000000000002a" in str(errors.PeerLost(node=42, cause="reset"))
    assert "a peer at h:1" in str(errors.PeerLost(address="h:1", cause="reset"))


def test_a_timeout_may_wait_for_something_that_is_no_peer():
    error = errors.OperationTimeout(operation="close", waiting_for="the progress thread", timeout=1.0)
    assert str(error).endswith("waiting for the progress thread; raise the limit (timeout=)")


def test_the_successor_stays_in_its_process():
    successor = object()
    error = errors.MembershipChanged(communicator=successor, lost={}, joined=[], completed_by_all=None)
    assert error.communicator is successor
    assert pickle.loads(pickle.dumps(error)).communicator is None


def test_errors_are_compared_by_identity_so_they_can_be_keys():
    first, second = errors.RpcCancelled(**CALL), errors.RpcCancelled(**CALL)
    assert len({first, second}) == 2


def test_what_others_wrote_moves_no_cursor() -> None:
    cause = "killed \x1b]0;title\x07\n\x1b[2Jgone"
    change = errors.MembershipChanged(communicator=None, lost={1: cause}, joined=[], completed_by_all=None)
    peer = AwaitedPeer(rank=1, host="\x1b[31mred")
    timeout = errors.OperationTimeout(operation="x", waiting_for=[peer], timeout=1)
    remote = errors.RemoteError(rank=1, function="f", traceback=cause)
    expelled = errors.Expelled(epoch=2, reason=cause)
    for error in (change, timeout, remote, expelled, errors.PeerLost(cause=cause)):
        assert all(line.isprintable() for line in str(error).split("\n")), repr(error)


def test_a_variable_that_is_not_set_is_called_not_set():
    error = errors.ConfigError(variable="NEXAR_SEED", value="", allowed="HOST:PORT", hint="start one")
    assert str(error) == "NEXAR_SEED is not set; set it to HOST:PORT (start one)"


def test_a_formation_that_failed_says_the_reason_first():
    facts = {"joined": ["rank 0"], "expected": 2, "refused": {}, "timeout": 1.0}
    error = errors.FormationTimeout(reason="rank 0 offers tls, rank 1 offers quic", **facts)
    assert str(error).splitlines()[0] == "the cluster did not form: rank 0 offers tls, rank 1 offers quic"
    assert "NEXAR_FORMATION_TIMEOUT_SECS" not in str(error), "more time would not help"


LONG = "10.20.30.40:4000 does not answer, and nobody else has seen it for a long time"
LONG_FACTS = [
    errors.FormationTimeout(joined=[f"rank {n} ({LONG})" for n in range(8)], expected=9, refused={}, timeout=60.0),
    errors.FormationTimeout(joined=["rank 0"], expected=2, refused={LONG: LONG}, timeout=60.0),
    errors.FormationTimeout(joined=["rank 0"], expected=2, refused={}, timeout=6.0, reason=f"{LONG}; {LONG}"),
    errors.FormationTimeout(
        joined=["rank 0"], expected=2, refused={}, timeout=6.0, reason=f"rank 1 is old\n{LONG * 2}"
    ),
    errors.JoinRefused(reason=f"{LONG}; {LONG}", address="10.20.30.40:4000"),
    errors.SeedUnreachable(addresses=[LONG, LONG], attempts=5, cause=LONG, timeout=60.0),
    errors.SeedUnreachable(addresses=["h:1"], attempts=1, cause=LONG, answered="10.20.30.40:4000"),
    errors.ConfigError(variable="NEXAR_CLUSTER_TOKEN", value="", allowed=LONG, hint=LONG),
    errors.ConfigError(variable="NEXAR_CLUSTER_TOKEN", value=LONG, allowed=LONG, hint=LONG),
]


@pytest.mark.parametrize("error", LONG_FACTS, ids=[f"{type(e).__name__}-{n}" for n, e in enumerate(LONG_FACTS)])
def test_the_first_line_is_short_however_long_the_facts_are(error):
    assert len(str(error).splitlines()[0]) <= 120, str(error)
    assert LONG in str(error)


def test_the_first_line_of_a_failed_formation_names_the_cause():
    error = errors.FormationTimeout(joined=[], expected=2, refused={}, timeout=6.0, reason=f"rank 1 is old\n{LONG * 2}")
    assert str(error).startswith("the cluster did not form: rank 1 is old\n")


def test_a_seed_that_answers_and_does_not_know_the_token_is_not_called_absent():
    error = errors.SeedUnreachable(
        addresses=["h:1"], attempts=1, cause="it cannot prove that it knows it", answered="h:1", credential="token"
    )
    assert str(error).startswith("a seed answered at h:1, but it does not know this token\n")
    assert "no seed at" not in str(error)
