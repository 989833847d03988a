"""Carriers between ranks of one process: `nexar.local`, and tests that own the time and the faults."""

from nexar.transport.memory.carrier import MemoryCarrier
from nexar.transport.memory.network import MemoryNetwork
from nexar.transport.memory.transport import MemoryTransport
from nexar.transport.memory.weather import Verdict, Way, Weather

__all__ = ["MemoryCarrier", "MemoryNetwork", "MemoryTransport", "Verdict", "Way", "Weather"]
