"""Seeing what memories do while a model reads: their gates, what they hold, and whether anything is made of it."""

from atlas_memory.monitor.alarm import Alarm, alarms
from atlas_memory.monitor.remembrance import effective_remembrance
from atlas_memory.monitor.summary import summarise
from atlas_memory.monitor.trace import MemoryTrace, Trace, trace, traces

__all__ = ["Alarm", "MemoryTrace", "Trace", "alarms", "effective_remembrance", "summarise", "trace", "traces"]
