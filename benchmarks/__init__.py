"""Benchmarks as data, on CPU: candidates x shapes, verified, then timed in turns. Outside the installed package.

    python -m benchmarks list
    python -m benchmarks run [NAME]... --out docs/performance --repeats 7 --threads 1
    python -m benchmarks table          rewrites the tables of docs/performance.md from docs/performance/*.json

registry.py    what a benchmark is: shapes, candidates, operations     suites/   the benchmarks, a file each
operations.py  candidates: our layer, the bare memory, attention, peers  cost.py   FLOPs and bytes, written out
verify.py      equality to the definition, or what can be checked      measure.py  turns, rates, ratios
peak.py        peak memory, in a process of its own                    profile.py  time by kind of operation
machine.py     where it ran                                            run.py    a benchmark to its result
results.py     JSON and tables                                         cli.py    the command
"""
