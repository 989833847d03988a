import os
import ssl
import stat
from pathlib import Path

import pytest

from nexar.security import tls
from nexar.security.authority import Authority
from nexar.security.certificates import Trust
from nexar.security.tls import client_context, server_context

AUTHORITY = Authority.create("c")
TRUST = Trust(AUTHORITY.certificate_pem)


def talk(server: ssl.SSLContext, client: ssl.SSLContext, name: str | None) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Both ends of a handshake in memory."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(down, up, False, name), server.wrap_bio(up, down, True))
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return ends


def test_both_ends_see_each_others_certificate_in_tls_1_3() -> None:
    server = server_context(AUTHORITY.admit(1), TRUST)
    client, served = talk(server, client_context(AUTHORITY.admit(2), TRUST), "0000000000000001.c.nexar")
    assert client.version() == served.version() == "TLSv1.3"
    assert client.getpeercert(True)
    assert served.getpeercert(True)


def test_a_client_without_a_certificate_is_refused_unless_candidates_are_allowed() -> None:
    anonymous = client_context(None, TRUST)
    with pytest.raises(ssl.SSLError, match=r"(?i)certificate"):
        talk(server_context(AUTHORITY.admit(1), TRUST), anonymous, "0000000000000001.c.nexar")
    welcoming = server_context(AUTHORITY.admit(1), Trust(TRUST.authorities, allow_anonymous=True))
    _, served = talk(welcoming, anonymous, "0000000000000001.c.nexar")
    assert served.getpeercert(True) is None


def test_a_bad_certificate_is_refused_even_where_none_would_do() -> None:
    welcoming = server_context(AUTHORITY.admit(1), Trust(TRUST.authorities, allow_anonymous=True))
    stranger = client_context(Authority.create("c").admit(2), TRUST)
    with pytest.raises(ssl.SSLCertVerificationError):
        talk(welcoming, stranger, "0000000000000001.c.nexar")


def test_a_dial_checks_the_name() -> None:
    server = server_context(AUTHORITY.admit(1), TRUST)
    with pytest.raises(ssl.SSLCertVerificationError, match=r"0000000000000002\.c\.nexar"):
        talk(server, client_context(AUTHORITY.admit(2), TRUST), "0000000000000002.c.nexar")


def test_a_dial_without_authorities_leaves_verification_to_its_caller() -> None:
    server = server_context(AUTHORITY.admit(1), Trust(TRUST.authorities, allow_anonymous=True))
    client, _ = talk(server, client_context(None, Trust(b"")), None)
    assert client.getpeercert(True)


def test_older_versions_of_tls_are_refused() -> None:
    old = client_context(AUTHORITY.admit(2), TRUST)
    old.minimum_version = ssl.TLSVersion.TLSv1_2
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match=r"(?i)version|protocol"):
        talk(server_context(AUTHORITY.admit(1), TRUST), old, "0000000000000001.c.nexar")


@pytest.mark.parametrize("has_memfd", [True, False])
def test_a_key_is_never_left_behind(has_memfd: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_memfd:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    elif not hasattr(os, "memfd_create"):
        pytest.skip("no memfd on this system")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with tls._named_secret(b"secret") as path:
        assert Path(path).read_bytes() == b"secret"
        if not has_memfd:
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
            assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700
    assert not os.path.exists(path)
    assert list(tmp_path.iterdir()) == []
    server_context(AUTHORITY.admit(1), TRUST)
    assert list(tmp_path.iterdir()) == []


def test_a_key_that_does_not_belong_to_the_certificate_is_refused() -> None:
    mine, other = AUTHORITY.admit(1), AUTHORITY.admit(1)
    mixed = type(mine)(1, "c", mine.certificate_chain, other.private_key)
    with pytest.raises(ssl.SSLError):
        server_context(mixed, TRUST)
