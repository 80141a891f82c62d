"""Traces, probes and alarms of a model's memories. Names are imported lazily: the logs are read without torch."""

from typing import TYPE_CHECKING

from atlas_memory.lazy_import import lazy_getattr

if TYPE_CHECKING:
    from atlas_memory.monitor.logs import Alarm
    from atlas_memory.monitor.tracing import MemoryTrace, Trace, alarms, effective_remembrance, summarise, trace, traces

__all__ = ["Alarm", "MemoryTrace", "Trace", "alarms", "effective_remembrance", "summarise", "trace", "traces"]

__getattr__ = lazy_getattr(__name__, {name: ".logs" if name == "Alarm" else ".tracing" for name in __all__})
