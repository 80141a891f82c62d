"""The benchmarks, by name."""

from benchmarks.registry import Benchmark
from benchmarks.suites.decode import DECODE
from benchmarks.suites.length import LENGTH
from benchmarks.suites.mixers import MIXERS
from benchmarks.suites.muon import MUON
from benchmarks.suites.oracle import ORACLE
from benchmarks.suites.tnt import TNT
from benchmarks.suites.utilisation import UTILISATION

BENCHMARKS: dict[str, Benchmark] = {b.name: b for b in (MIXERS, MUON, ORACLE, LENGTH, DECODE, TNT, UTILISATION)}
