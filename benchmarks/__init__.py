"""Benchmarks as data: candidates x shapes, verified, then timed in turns, on CPU or GPU. Outside the installed package.

    python -m benchmarks list
    python -m benchmarks run [NAME]... --out docs/results/data --repeats 7 --threads 1
    python -m benchmarks show FILE      prints a result of docs/results/data/
    python -m benchmarks table          rewrites the tables of docs/results/ from docs/results/data/
    python -m benchmarks.gpu --out DIR  all that is measured on a GPU, in minutes

registry.py    what a benchmark is: shapes, candidates, operations     suites/   the benchmarks, a file each
operations.py  candidates: our layer, the bare memory, attention, peers  cost.py   FLOPs and bytes, written out
verify.py      equality to the definition, or what can be checked      measure.py  turns, rates, ratios
peak.py        peak memory                                             profile.py  time by kind of operation
machine.py     where it ran                                            run.py    a benchmark to its result
results.py     JSON and tables                          cli.py, gpu.py    the commands
"""
