"""The benchmarks, by name."""

from benchmarks.registry import Benchmark
from benchmarks.suites.decode import DECODE
from benchmarks.suites.gpu import CHUNK, NEWTON_SCHULZ
from benchmarks.suites.gpu_training import TRAINING
from benchmarks.suites.length import LENGTH
from benchmarks.suites.mixers import MIXERS
from benchmarks.suites.muon import MUON
from benchmarks.suites.oracle import ORACLE
from benchmarks.suites.tnt import TNT
from benchmarks.suites.utilisation import UTILISATION

ON_CPU = MIXERS, MUON, ORACLE, LENGTH, DECODE, TNT, UTILISATION
ON_GPU = CHUNK, NEWTON_SCHULZ, TRAINING
BENCHMARKS: dict[str, Benchmark] = {b.name: b for b in (*ON_CPU, *ON_GPU)}
