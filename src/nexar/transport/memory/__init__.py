"""Carriers between ranks of one process: `nexar.local`, and tests that own the time and the faults."""

from nexar.transport.memory.carrier import MemoryCarrier
from nexar.transport.memory.pipe import DeliveryFault, Direction, FaultModel
from nexar.transport.memory.transport import MemoryNetwork, MemoryTransport

__all__ = ["DeliveryFault", "Direction", "FaultModel", "MemoryCarrier", "MemoryNetwork", "MemoryTransport"]
