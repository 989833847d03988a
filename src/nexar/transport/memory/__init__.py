"""Transport between nodes of one process, for `nexar.local` and tests."""

from nexar.transport.memory.carrier import MemoryCarrier
from nexar.transport.memory.pipe import DeliveryFault, Direction, FaultModel
from nexar.transport.memory.transport import MemoryNetwork, MemoryTransport

__all__ = ["DeliveryFault", "Direction", "FaultModel", "MemoryCarrier", "MemoryNetwork", "MemoryTransport"]
