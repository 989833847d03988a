"""Join messages of every kind, for tests that want any of them."""

from hypothesis import strategies as st

from nexar.security.proof import NONCE_BYTES, PROOF_BYTES
from nexar.wire.join import (
    MAX_LISTED,
    MAX_RANKS,
    Challenge,
    ChildDied,
    Committed,
    Connected,
    Current,
    FormationFailed,
    FormationProgress,
    FormationQuery,
    JoinMessage,
    JoinRefusedMessage,
    JoinRequest,
    Leave,
    LivenessQuery,
    LivenessReply,
    MemberDied,
    Ready,
    Renew,
    Renewed,
    ReserveRanks,
    RunFailed,
    SeedPaxosMessage,
    Started,
    StartFailed,
    StatusPageReply,
    StatusPageRequest,
    StatusUpdate,
    WaitingJoiners,
    WatchStatus,
    Welcome,
)
from nexar.wire.status import LateRank, PeerTraffic, StatusPage, StatusReport, StatusRow
from nexar.wire.text import line

nonces = st.binary(min_size=NONCE_BYTES, max_size=NONCE_BYTES)
proofs = st.binary(min_size=PROOF_BYTES, max_size=PROOF_BYTES)
blobs = st.binary(min_size=1, max_size=200)
ranks = st.integers(0, MAX_RANKS - 1)
counts = st.integers(1, MAX_RANKS)
maybe_ranks = st.one_of(st.none(), ranks)
lines = st.text(max_size=40).map(line)
words = lines.filter(bool)
addresses = st.dictionaries(st.sampled_from(["quic", "tls", "shm"]), st.lists(words, max_size=3).map(tuple), max_size=3)
codes = st.text("abcxyz_", max_size=32)
numbers = st.integers(0, 2**63 - 1)
launchers = st.integers(0, 2**64 - 1)
counters = st.integers(0, 2**62 - 1)
ages = st.floats(0, 1e9)
short = lines.map(lambda text: text[:40])
bulletins = st.builds(
    StatusReport,
    ranks,
    counters,
    host=short,
    operation=short,
    began=ages,
    waiting_for=st.lists(ranks, max_size=3).map(tuple),
    peers=st.lists(st.builds(PeerTraffic, ranks, short, counters, counters), max_size=3).map(tuple),
    late=st.lists(st.builds(LateRank, ranks, ages, ages, counters, st.floats(0, 1)), max_size=3).map(tuple),
)
rows = st.builds(
    StatusRow,
    st.integers(1, 2**64 - 1),
    ranks,
    st.sampled_from(["running", "waiting", "stuck", "lost", "left"]),
    words,
    cause=short,
    gone=st.one_of(st.none(), ages),
    bulletin=st.one_of(st.none(), bulletins),
)
boards = st.builds(StatusPage, short, counters, counters, counters, st.lists(rows, max_size=3).map(tuple))

messages: st.SearchStrategy[JoinMessage] = st.one_of(
    st.builds(Challenge, nonces, proofs),
    st.builds(
        JoinRequest,
        proofs,
        blobs,
        words,
        addresses,
        maybe_ranks,
        launchers,
        numbers,
        size=st.integers(0, MAX_RANKS),
        clock=st.floats(0, 1e12),
        settings=st.dictionaries(st.from_regex(r"\A[a-z][a-z0-9_]{0,63}\Z"), short, max_size=3),
        confirms=st.booleans(),
    ),
    st.builds(ReserveRanks, proofs, blobs, words, counts, maybe_ranks, numbers),
    st.builds(Welcome, words, blobs, blobs, lines, counts, maybe_ranks, maybe_ranks, elastic=st.booleans()),
    st.builds(Ready),
    st.builds(Connected),
    st.builds(StartFailed, lines),
    st.builds(Started),
    st.builds(FormationQuery),
    st.builds(
        FormationProgress,
        st.integers(0, MAX_RANKS),
        counts,
        st.lists(ranks, max_size=MAX_LISTED).map(tuple),
        st.dictionaries(lines, lines, max_size=MAX_LISTED),
        st.booleans(),
    ),
    st.builds(Committed, blobs),
    st.builds(
        FormationFailed,
        st.lists(lines, max_size=3).map(tuple),
        counts,
        st.dictionaries(lines, lines, max_size=3),
        st.floats(0, 1e6),
        st.integers(0, 2**40),
        lines,
    ),
    st.builds(JoinRefusedMessage, lines, st.integers(0, 2**32), st.booleans(), codes),
    st.builds(Renew, blobs),
    st.builds(Renewed, blobs),
    st.builds(ChildDied, ranks, st.text(max_size=40)),
    st.builds(RunFailed, ranks, lines, st.integers(1, 255), st.booleans(), lines),
    st.builds(Leave, lines),
    st.builds(Current, blobs),
    st.builds(SeedPaxosMessage, blobs),
    st.builds(MemberDied, st.integers(1, 2**64 - 1), numbers, st.text(max_size=40), codes),
    st.builds(LivenessQuery, numbers),
    st.builds(LivenessReply, numbers),
    st.builds(WaitingJoiners, st.lists(blobs, max_size=3).map(tuple)),
    st.builds(WatchStatus, proofs),
    st.builds(StatusPageRequest, numbers),
    st.builds(StatusPageReply, boards),
    st.builds(StatusUpdate, blobs),
)
