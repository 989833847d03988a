"""Writes the first packets of COUNT QUIC clients, which will never send another, to the standard output."""

import socket
import sys

PACKET_BYTES = 1200
"""A client pads its first packet to this size."""


def main(count: int) -> None:
    from nexar_native import quic  # the test, which imports this module, also runs without it

    settings = quic.Settings(max_streams=1)
    with socket.socket(type=socket.SOCK_DGRAM) as sink:
        sink.bind(("127.0.0.1", 0))
        sink.settimeout(20.0)
        with quic.Endpoint(("127.0.0.1", 0), None, quic.Trust(), settings) as clients:
            known: set[bytes] = set()
            for _ in range(count):
                dial = clients.post_connect(sink.getsockname(), "anybody", verify=False)
                sys.stdout.buffer.write(_first_packet(sink, known))
                dial.cancel()


def _first_packet(sink: socket.socket, known: set[bytes]) -> bytes:
    """Of a connection that is not `known`: those before may have said their end meanwhile."""
    while True:
        packet = sink.recv(65536)
        connection = packet[6 : 6 + packet[5]]
        if len(packet) == PACKET_BYTES and connection not in known:
            known.add(connection)
            return packet


if __name__ == "__main__":
    main(int(sys.argv[1]))
