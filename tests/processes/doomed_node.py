"""A node that keeps death lines, in a process that a test is about to kill.

It says on standard output, one line of JSON each: who it is, then to whom it has lines.
"""

import json
import sys
import threading

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509 import load_pem_x509_certificate

from nexar.cluster.membership import decode_membership, encode_member
from tests.unit.cluster.connection_ends import End


def say(facts: object) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def main() -> None:
    end = End()
    public = end.node.key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    say({"node": end.node.id, "key": public.decode(), "member": encode_member(end.member).hex()})
    answer = json.loads(sys.stdin.readline())
    end.certify_with(load_pem_x509_certificate(answer["certificate"].encode()), answer["authority"].encode())
    end.adopt(decode_membership(bytes.fromhex(answer["membership"])))
    wait = threading.Event()
    while not end.lines.peers:
        wait.wait(0.005)
    say({"lines": sorted(end.lines.peers)})
    sys.stdin.readline()
    end.close()


if __name__ == "__main__":
    main()
