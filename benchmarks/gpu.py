"""What the kernels do on a GPU, in one command from the source tree: PYTHONPATH=src python -m benchmarks.gpu --out DIR

Peaks of the machine first; then each kernel, held against the PyTorch form in float64 on fresh random data and timed
only if it is equal; then training speed of whole models. Most important items first; each by itself, so that one that
fails is recorded and the rest goes on; none begins after ``--minutes``. DIR/gpu.json is written after every item.
``--dry-run``: tiny shapes on the CPU, kernels in Triton's interpreter; its times mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1" if "--dry-run" in sys.argv else "0"  # before anything imports triton
os.environ["ATLAS_MEMORY_KERNELS"] = "1"

import torch
import torch.nn.functional as F
import triton
from torch import Tensor, nn

from atlas_memory import AtlasConfig, AtlasForCausalLM
from atlas_memory.kernels.chunk import chunk_recurrence
from atlas_memory.kernels.gram_newton_schulz import gram_newton_schulz
from atlas_memory.memory import (
    RULES,
    Decay,
    Gates,
    GradientDescent,
    Identity,
    Linear,
    MemoryState,
    Params,
    Rule,
    chunkwise,
    gram_polynomial,
    initial_state,
    l2_normalise,
)
from atlas_memory.models.presets import PRESETS

Form = Callable[[Rule, Params, Tensor, Tensor, Tensor, Gates], tuple[Tensor, MemoryState]]
# What the chunk kernels compute: bare steps at frozen gradients, in a memory that fades to zero.
RULE = replace(
    RULES["omeganet"],
    features=Identity(),
    retention=Decay(),
    optimiser=GradientDescent(bounded=False, live=False),
)


class Bench:
    """The items, their records and the clock."""

    def __init__(self, out: Path, minutes: float, dry: bool) -> None:
        self.out, self.dry, self.begun, self.minutes = out, dry, time.time(), minutes
        self.device = "cpu" if dry else "cuda"
        self.records: list[dict[str, Any]] = []
        self.peaks: dict[str, float] = {}

    def item(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Run one item and record what it gives, or why it gave nothing."""
        begun = time.time()
        if begun - self.begun > 60 * self.minutes:
            record: dict[str, Any] = {"skipped": f"{self.minutes} minutes were over"}
        else:
            try:
                record = measure()
            except Exception as error:
                record = {
                    "failed": f"{type(error).__name__}: {str(error)[:400]}",
                    "trace": traceback.format_exc()[-2000:],
                }
        self.records.append({"item": name, **record, "wall_s": round(time.time() - begun, 2)})
        gc.collect()
        if not self.dry:
            torch.cuda.empty_cache()
        self.write()
        print(line(self.records[-1]), flush=True)

    def write(self) -> None:
        about = {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()}
        about["device"] = "cpu, interpreter" if self.dry else torch.cuda.get_device_name()
        about["float32_matmul"] = torch.get_float32_matmul_precision()
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "gpu.json").write_text(json.dumps({"about": about, "items": self.records}, indent=1))

    def timed(self, run: Callable[[], Any], rep: int = 100) -> dict[str, float]:
        """Median and 20 and 80 per cent quantiles in milliseconds."""
        if self.dry:
            begun = time.perf_counter()
            run()
            ms = [1e3 * (time.perf_counter() - begun)] * 3
        else:
            ms = triton.testing.do_bench(run, warmup=25, rep=rep, quantiles=[0.5, 0.2, 0.8])
        return {"ms": ms[0], "ms_20": ms[1], "ms_80": ms[2]}

    def rated(self, run: Callable[[], Any], flops: float, moved: float, peak: str) -> dict[str, Any]:
        """As ``timed``, with the shares of the measured peak and bandwidth."""
        record = self.timed(run)
        rate = {"tflops": flops / record["ms"] * 1e-9, "gb_s": moved / record["ms"] * 1e-6}
        if peak in self.peaks and "copy" in self.peaks:
            rate |= {"of_peak": rate["tflops"] / self.peaks[peak], "of_copy": rate["gb_s"] / self.peaks["copy"]}
        return {**record, "flops": flops, "bytes": moved, "peak": peak, **rate}

    def copy(self) -> dict[str, Any]:
        x = torch.randn(2**12 if self.dry else 2**29, device=self.device)
        y = torch.empty_like(x)
        record = self.rated(lambda: y.copy_(x), 0, 2 * x.numel() * 4, "")
        self.peaks["copy"] = record["gb_s"]
        return record

    def matmul(self, kind: str) -> dict[str, Any]:
        size = 64 if self.dry else 8192
        a, b = (torch.randn(size, size, device=self.device) for _ in range(2))
        a, b = (a.bfloat16(), b.bfloat16()) if kind == "bf16" else (a, b)
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
        try:
            record = self.rated(lambda: a @ b, 2 * size**3, 0, "")
        finally:
            torch.set_float32_matmul_precision(before)
        self.peaks[kind] = record["tflops"]
        return record

    def gram(self, size: int, backward: bool, kernel: bool) -> dict[str, Any]:
        """Newton-Schulz on Gram matrices. FLOPs: the kernel's products. Bytes: G and Q once, and the gradients."""
        count, steps = 2 if self.dry else 4096, 5
        s = torch.randn(count, size, 2 * size, device=self.device)
        gram, weight = s @ s.mT, torch.randn(count, size, size, device=self.device)
        gram.requires_grad_()
        form = gram_newton_schulz if kernel else polynomial
        results = []
        for f, dtype in ((polynomial, torch.float64), (polynomial, torch.float32), (form, torch.float32)):
            x = gram[:64].detach().to(dtype).requires_grad_()
            q = f(x, steps)
            results.append((q.detach(), torch.autograd.grad((q * weight[:64]).sum(), x)[0]))
        record = equal(*results)
        products = 4 * steps - 3 if not backward else 7 * steps + 1 + 2 * steps * (steps - 1)
        flops, moved = 2.0 * products * size**3 * count, (3 if backward else 2) * 4.0 * size**2 * count
        q = form(gram, steps)
        run = (
            partial(torch.autograd.grad, q, gram, weight, retain_graph=True) if backward else partial(form, gram, steps)
        )
        return record | self.rated(run, flops, moved, "fp32")

    def chunk(self, rule: Rule, form: str, batch: int, heads: int, length: int, dim: int) -> dict[str, Any]:
        """The chunk path, forward and forward with backward. One form a call, so that memory is freed between."""
        forms: dict[str, Form] = {"eager": eager, "compiled": compiled, "kernel": kernel}
        record = self.check_chunk(rule, dim, kernel) if form == "kernel" else {}
        leaves, call = problem(rule, batch, heads, length, dim, self.device)
        with torch.no_grad():
            run = partial(call, forms[form])
            record["forward"] = self.rated(run, *model_of_chunk(rule, batch * heads, length, dim, False), "tf32")

        def both() -> None:
            y, _ = call(forms[form])
            torch.autograd.grad(y.sum(), leaves, allow_unused=True)

        record["both"] = self.rated(both, *model_of_chunk(rule, batch * heads, length, dim, True), "tf32")
        record["tokens_s"] = batch * length / record["both"]["ms"] * 1e3
        if not self.dry:
            torch.cuda.reset_peak_memory_stats()
            both()
            record["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return record

    def check_chunk(self, rule: Rule, dim: int, form: Form) -> dict[str, Any]:
        """Ragged time; every gradient and the final memory."""
        seed, results = int(time.time()), []
        for dtype, f in ((torch.float64, eager), (torch.float32, eager), (torch.float32, form)):
            leaves, call = problem(rule, 1, 2, 2 * rule.window.chunk + 5, dim, self.device, dtype, seed)
            y, end = call(f)
            loss = y.square().sum() + sum(w.square().sum() for w in (*end.weights, *end.frozen))
            grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
            results.append((y.detach(), *(w.detach() for w in end.weights), *grads))
        return equal(*results)

    def training(self, preset: str, kind: str, length: int) -> dict[str, Any]:
        """Tokens a second of forward, backward and AdamW in bf16 autocast, 32K tokens a step. Heads of width 64."""
        batch = 1 if self.dry else max(1, 32768 // length)
        sizes = dict(PRESETS[preset].config)
        sizes["num_attention_heads"] = sizes["hidden_size"] // 64
        if self.dry:
            sizes |= {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 64}
            sizes["vocab_size"] = 64
        model = build(kind, sizes).to(self.device)
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=not self.dry)
        tokens = torch.randint(sizes["vocab_size"], (batch, length + 1), device=self.device)

        def step() -> None:
            with torch.autocast(self.device, torch.bfloat16):
                logits = model(tokens[:, :-1], use_cache=False).logits
            F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

        times = []
        for _ in range(2 if self.dry else 5):
            self.synchronise()
            begun = time.perf_counter()
            step()
            self.synchronise()
            times.append(time.perf_counter() - begun)
        times = sorted(times[1 if self.dry else 2 :])
        count = sum(p.numel() for p in model.parameters())
        seconds = times[len(times) // 2]
        return {"tokens_s": batch * length / seconds, "steps_s": times, "parameters": count, "batch": batch}

    def synchronise(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()


def polynomial(gram: Tensor, steps: int) -> Tensor:
    """``gram_polynomial`` in PyTorch; the kernel makes its input symmetric."""
    return gram_polynomial(0.5 * (gram + gram.mT), steps)


def eager(rule: Rule, params: Params, q: Tensor, k: Tensor, v: Tensor, gates: Gates) -> tuple[Tensor, MemoryState]:
    """``chunkwise`` in PyTorch alone."""
    with patch("atlas_memory.kernels.dispatch.supports", lambda *_: False):
        return chunkwise(rule, params, q, k, v, gates)


def compiled(rule: Rule, params: Params, q: Tensor, k: Tensor, v: Tensor, gates: Gates) -> tuple[Tensor, MemoryState]:
    """``eager`` with each chunk compiled."""
    with patch("atlas_memory.kernels.dispatch.supports", lambda *_: False):
        return chunkwise(rule, params, q, k, v, gates, compiled=True)


def kernel(rule: Rule, params: Params, q: Tensor, k: Tensor, v: Tensor, gates: Gates) -> tuple[Tensor, MemoryState]:
    """The Triton kernels."""
    full = gates.complete(q, rule.window.size)
    return chunk_recurrence(rule, q, k, v, full, initial_state(rule, params.initial, k))


def problem(
    rule: Rule,
    batch: int,
    heads: int,
    length: int,
    dim: int,
    device: str,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[list[Tensor], Callable[[Form], tuple[Tensor, MemoryState]]]:
    """Random leaves (the same for every dtype), and what calls a form on them."""
    g = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device=device)

    size = (batch, heads, length)
    q, k, v = l2_normalise(randn(*size, dim)), l2_normalise(randn(*size, dim)), randn(*size, dim)
    eta, alpha, gamma = randn(*size).sigmoid(), (4 + randn(*size)).sigmoid(), randn(*size, rule.window.size).sigmoid()
    initial = [randn(heads, *shape) * shape[1] ** -0.5 for shape in rule.shapes(dim)]
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, eta, alpha, gamma, *initial)]
    q, k, v, eta, alpha, gamma, *initial = leaves
    gates = Gates(eta, alpha, gamma=gamma)
    return leaves, lambda form: form(rule, Params(tuple(initial)), q, k, v, gates)


def equal(truth: tuple[Tensor, ...], plain: tuple[Tensor, ...], got: tuple[Tensor, ...]) -> dict[str, Any]:
    """The errors of ``got`` against float64, beside those of PyTorch in float32.

    Raises:
        ValueError: one is above 1e-4 and above four times PyTorch's: nothing is timed that is not equal.
    """

    def error(x: Tensor, exact: Tensor) -> float:
        return float((x.double() - exact).norm() / exact.norm().clamp_min(1e-30))

    errors = [(error(x, t), error(p, t)) for x, p, t in zip(got, plain, truth, strict=True)]
    for i, (ours, theirs) in enumerate(errors):
        if not ours <= max(1e-4, 4 * theirs):
            raise ValueError(f"result {i} is off by {ours:.1e}, PyTorch in float32 by {theirs:.1e}: not timed")
    return {"error": max(e for e, _ in errors), "error_of_pytorch": max(e for _, e in errors)}


def model_of_chunk(rule: Rule, programs: int, length: int, dim: int, backward: bool) -> tuple[float, float]:
    """FLOPs and bytes of the kernels' equations, matrix products alone.

    Per chunk of b tokens, with N = b + c - 1 and H hidden units: forward 6 products of N H d multiply-adds (h twice, p,
    F and both writes), 2 of b H d, 2 of b N H; backward, with its recomputation, 17, 5 and 6 more. Bytes: q, k, v, y
    once, the memory written once and read twice; backward q, k, v, y's gradient and four gradients, the memory read
    three times, its gradient read and written twice.
    """
    chunk = rule.window.chunk
    window, shapes = chunk + rule.window.size - 1, rule.shapes(dim)
    hidden, deep = shapes[-1][1], len(shapes) == 2
    memory = sum(rows * columns for rows, columns in shapes)
    n_h_d, b_h_d, b_n_h = window * hidden * dim, chunk * hidden * dim, chunk * window * hidden
    products = 6 * n_h_d + 2 * b_h_d + 2 * b_n_h if deep else 2 * n_h_d + b_h_d + b_n_h
    moved = 4 * chunk * dim + 3 * memory
    if backward:
        products += 17 * n_h_d + 5 * b_h_d + 6 * b_n_h if deep else 5 * n_h_d + 2 * b_h_d + 3 * b_n_h
        moved += 8 * chunk * dim + 7 * memory
    chunks = programs * -(-length // chunk)
    return 2.0 * products * chunks, 4.0 * moved * chunks


def build(kind: str, sizes: dict[str, Any]) -> nn.Module:
    """A language model of a preset's sizes: our memory, our attention or fla's Gated DeltaNet."""
    if kind == "attention":
        return AtlasForCausalLM(AtlasConfig(**sizes, block="attention"))
    if kind == "gated-deltanet of fla":
        if find_spec("fla") is None:
            raise ModuleNotFoundError("fla is not installed")
        from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

        names = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")
        given = {name: sizes[name] for name in names}
        return GatedDeltaNetForCausalLM(GatedDeltaNetConfig(**given, num_heads=sizes["num_attention_heads"]))
    options = {"features": {"kind": "Identity"}}
    if kind == "linear memory":
        options["network"] = {"kind": "Linear"}
    return AtlasForCausalLM(
        AtlasConfig(
            **sizes, rule="omeganet", rule_options=options, window=1, chunk_size=16 if sizes["vocab_size"] == 64 else 64
        )
    )


def line(record: dict[str, Any]) -> str:
    """A record as a row of the table."""
    row = f"{record['item']:<58}"
    for name in ("skipped", "failed"):
        if name in record:
            return f"{row} {name}: {record[name][:90]}"
    parts = [record.get("forward", record), record.get("both")]
    row += "".join(f" {p['ms']:9.3f} ms {100 * p.get('of_peak', 0):5.1f}%" for p in parts if p and "ms" in p)
    row += f" {record['tokens_s']:12,.0f} tokens/s" if "tokens_s" in record else ""
    return row + (f"  error {record['error']:.0e}" if "error" in record else "")


def main(out: Path, minutes: float, dry: bool) -> None:
    """All items, most important first."""
    bench = Bench(out, minutes, dry)
    dim, chunk, heads = (16, 16, 1) if dry else (64, 64, 16)
    deep = RULE.vary(window={"size": 1, "chunk": chunk}, network={"expansion": 1 if dry else 4})
    lengths = (20,) if dry else (2048, 8192, 32768)
    names = ("attention", "memory", "gated-deltanet of fla", "linear memory")[: 3 if dry else 4]
    bench.item("copy bandwidth", bench.copy)
    for kind in ("fp32", "tf32", "bf16"):
        bench.item(f"matmul {kind}", partial(bench.matmul, kind))

    def chunks(rule: Rule, forms: tuple[str, ...], lengths: tuple[int, ...]) -> None:
        for length in lengths:
            batch = 1 if dry else max(1, 16384 // length)
            for form in forms:
                name = f"chunk {type(rule.network).__name__} T={length} batch {batch} {form}: forward, both"
                bench.item(name, partial(bench.chunk, rule, form, batch, heads, length, dim))

    def grams(sizes: tuple[int, ...]) -> None:
        for size in sizes:
            for form in ("eager", "kernel"):
                for way in ("forward", "backward"):
                    call = partial(bench.gram, size, way == "backward", form == "kernel")
                    bench.item(f"Gram Newton-Schulz m={size} {form} {way}", call)

    def models(preset: str, lengths: tuple[int, ...]) -> None:
        for length in lengths:
            for name in names:
                bench.item(f"training {preset} T={length} {name}", partial(bench.training, preset, name, length))

    chunks(deep, ("kernel", "eager"), lengths[:1])
    grams((16,) if dry else (64, 16))
    models("170m", lengths[:1])
    chunks(deep, ("kernel", "eager"), lengths[1:])
    chunks(replace(deep, network=Linear()), ("kernel", "eager"), lengths[:1])
    models("170m", lengths[1:])
    if not dry:  # compiling takes long, and on a CPU needs a C++ compiler
        models("340m", lengths)
        chunks(deep, ("compiled",), lengths)
    print("\n" + "\n".join(map(line, bench.records)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu.json; made if missing")
    parser.add_argument("--minutes", type=float, default=8.5, help="begin no item after so many")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    arguments = parser.parse_args()
    if not arguments.dry_run and not torch.cuda.is_available():
        parser.error("no CUDA device: give --dry-run to try the program itself")
    main(arguments.out, arguments.minutes, arguments.dry_run)
