"""Checks of rules and mixers of your own, to be called in a test, as ``check_estimator`` of scikit-learn is:

    check_rule(dataclasses.replace(RULES["titans"], bias=LogCosh()))
    check_mixer(CausalMean)

Each takes seconds, and raises a ValueError that names the class, the method and the remedy.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError, gradcheck
from torch.utils._pytree import tree_leaves, tree_map_only

from .layers.stateful import Stateful
from .layers.varlen import forward_packed
from .ops.chunkwise import chunkwise
from .ops.fused_recurrent import fused_recurrent
from .ops.recurrent import recurrent
from .rules.bias import Bias
from .rules.features import Features, l2_normalise
from .rules.gates import Gates
from .rules.retention import NewMatrix, OldMatrix
from .rules.rule import BUILT_IN, Params, Rule, resolve_rule
from .rules.step import InnerOptimiser, TokenGates

BATCH, HEADS, DIM, ROWS, COLUMNS = 2, 3, 4, 8, 7
FRONT, MATRIX = (BATCH, HEADS), (BATCH, HEADS, ROWS, COLUMNS)


def check_rule(rule: str | Rule) -> None:
    """Check the parts of a rule (shapes, numbers at padding, gradients, independent sequences and heads, declarations);
    then that ``chunkwise`` and ``fused_recurrent`` equal ``recurrent``, gradients included, that they are causal, and
    that calls continue from states, each row as if alone. ValueError for what does not hold."""
    rule = resolve_rule(rule)
    for axis in BUILT_IN:
        part = getattr(rule, axis)
        extra = vars(part).keys() - {f.name for f in fields(part)} - set(dir(type(part)))
        _require(not extra, f"{axis} {type(part).__name__} has {extra} beside its fields: declare them as fields")
    _check_features(rule.features)
    _check_bias(rule.bias)
    _check_retention(rule.retention)
    _check_optimiser(rule.optimiser)
    _check_ops(rule)


def check_mixer(mixer: nn.Module | Callable[[int, int], nn.Module]) -> None:
    """Check a mixer (layers/blocks.py), a ``Stateful`` module or a function ``(dim, heads)`` that makes one: causality,
    states that continue at any split and are not changed in place, independent rows, padding without effect, and the
    same function in training as in eval mode. ValueError for what does not hold."""
    made: Any = mixer if isinstance(mixer, nn.Module) else mixer(16, 2)
    name = type(made).__name__
    _require(isinstance(made, Stateful), f"{name} must derive from Stateful (atlas_memory.layers.stateful)")
    _require(isinstance(getattr(made, "dim", None), int), f"{name} must set self.dim to the width of x")
    checked = copy.deepcopy(made).double().eval()
    for i, parameter in enumerate(checked.parameters()):  # zeros would hide faults
        parameter.data += 0.05 * _numbers(*parameter.shape, frequency=0.3 + 0.1 * i).to(parameter)
    like = next(checked.parameters(), torch.zeros((), dtype=torch.float64))
    _check_mixer(checked, name, _numbers(2, 7, checked.dim).to(like))


def _numbers(*shape: int, frequency: float = 1.0) -> Tensor:
    """Numbers in (-1, 1) that look random."""
    count = torch.arange(1.0, torch.Size(shape).numel() + 1.0, dtype=torch.float64)
    return (frequency * count).sin().reshape(shape)


def _require(condition: Any, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _gap(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|; inf for NaN or other shapes."""
    if a.shape != b.shape:
        return math.inf
    a, b = a.detach().double(), b.detach().double()
    gap = float((a - b).norm() / b.norm().clamp_min(1e-3))
    return gap if math.isfinite(gap) else math.inf


def _same(a: Any, b: Any, tolerance: float = 1e-9) -> bool:
    ours, theirs = _tensors(a), _tensors(b)
    return len(ours) == len(theirs) and all(_gap(x, y) <= tolerance for x, y in zip(ours, theirs, strict=True))


def _last(x: Tensor) -> Tensor:
    """The last sequence, and all heads but the first, of [batch, heads, ...], [batch] or [heads, ...]."""
    return x[1:, 1:] if x.dim() > 1 and len(x) == BATCH else x[1:]


def _call(part: Any, method: str, shape: Sequence[int] | None, *arguments: Any) -> Any:
    """What a method returns, of this shape if given, without changing its arguments, and the same again and alone."""
    name = f"{type(part).__name__}.{method}"
    before = tree_map_only(Tensor, torch.clone, arguments)
    try:
        found, again = (getattr(part, method)(*arguments) for _ in range(2))
        alone = getattr(part, method)(*tree_map_only(Tensor, _last, arguments))
    except Exception as error:
        shapes = ", ".join(str(list(t.shape)) for t in _tensors(arguments)) or repr(arguments)
        raise ValueError(f"{name} failed for tensors {shapes}: {type(error).__name__}: {error}") from error
    _require(_same(before, arguments, 0.0), f"{name} changes its arguments in place: make new tensors")
    _require(_same(found, again, 0.0), f"{name} returns something else when it is called again: draw and keep nothing")
    for t in _tensors(found):
        fits = shape is None or (list(t.shape) == list(shape) and t.dtype == torch.float64)
        _require(fits, f"{name} must return float64 {shape} for float64 arguments, got {t.dtype} {list(t.shape)}")
    same = _same(alone, tree_map_only(Tensor, _last, found))
    _require(same, f"{name} of one sequence, head or token changes with others: reduce over its own dimensions alone")
    return found


def _check_gradients(part: Any, method: str, function: Callable[..., Any], *tensors: Tensor) -> None:
    """Check that ``function`` is finite, at zeros too, and its gradient right."""
    name = f"{type(part).__name__}.{method}"
    for size in (0.0, 1.0):
        leaves = [(size * t.detach()).requires_grad_() for t in tensors]
        out = _tensors(function(*leaves))
        used = [t.sum() for t in out if t.requires_grad]
        slopes = torch.autograd.grad(used, leaves, allow_unused=True) if used else ()
        finite = all(t.isfinite().all() for t in (*out, *_tensors(slopes)))
        see = "" if size else " at zero, as padding is"
        _require(finite, f"{name} or its gradient is not finite{see}: add a small number to roots and divisors")
    try:
        gradcheck(lambda *x: tuple(_tensors(function(*x))), leaves, fast_mode=True, atol=1e-5, rtol=1e-3)
    except GradcheckError as error:
        raise ValueError(f"the gradient of {name} is not that of its values: detach nothing") from error


def _check_features(features: Features) -> None:
    name, x, y = type(features).__name__, _numbers(*FRONT, DIM), _numbers(*FRONT, 2, DIM, frequency=0.7)
    keys, size = torch.stack([x, 0.3 * x, 0.0 * x], 2), _call(features, "size", None, DIM)
    if features.infinite:
        _require(size == DIM, f"{name}.size(dim) must be dim={DIM}, the columns of M_0, where features are infinite")
    else:
        phi, psi = _call(features, "expand", (*FRONT, size), x), features.expand(keys)  # heads stand for tokens here
        _check_gradients(features, "expand", features.expand, x)
        alone = _same([psi[..., 0, :], features.expand(x[0, 0])], [phi, phi[0, 0]])
        _require(alone, f"{name}.expand of one key, [dim], changes with those beside it")
    kernel, norm = _call(features, "kernel", (*FRONT, 3, 2), keys, y), _call(features, "squared_norm", FRONT, x)
    fits = features.infinite or _same(kernel, psi @ features.expand(y).mT)
    _require(fits, f"{name}.kernel(x, y) must be expand(x) times expand(y)")
    own = features.kernel(keys, keys).diagonal(dim1=-2, dim2=-1)[..., 0]
    _require(_same(norm, own), f"{name}.squared_norm(x) must be kernel(x, x), the squared length of phi(x)")
    _check_gradients(features, "kernel", features.kernel, keys[..., :2, :], y)


def _check_bias(bias: Bias) -> None:
    name = type(bias).__name__
    for size, dim in ((1.0, DIM), (0.01, DIM), (30.0, DIM + 3)):  # far out, a loss may be another one
        prediction, v = 2.0 * size * _numbers(*FRONT, dim), size * _numbers(*FRONT, dim, frequency=0.7)
        v, at = torch.cat([v, 1.1 + _numbers(*FRONT, int(bias.has_delta))], -1), f"at errors of about {size}"
        for method, shape in (("value", FRONT), ("derivative", (*FRONT, dim)), ("curvature", FRONT)):
            _call(bias, method, shape, prediction, v)
            _check_gradients(bias, method, getattr(bias, method), prediction, v)
            far = getattr(bias, method)(1e4 * prediction.float(), v.float())
            _require(far.isfinite().all(), f"{name}.{method} is not finite in float32 where errors are large")
        leaf, error = prediction.clone().requires_grad_(), prediction - v[..., :dim]
        (slope,) = torch.autograd.grad(bias.value(leaf, v).sum(), leaf)
        derivative, curvature = bias.derivative(leaf, v), bias.curvature(prediction, v)
        _require(_same(derivative, slope, 1e-5), f"{name}.derivative is not the derivative of {name}.value {at}")
        constant = not bias.is_linear or _same(bias.derivative(prediction + 1.0, v), derivative)
        _require(constant, f"{name}.derivative depends on the prediction: set is_linear = False")
        linear = not bias.is_quadratic or _same(curvature[..., None] * error, derivative, 1e-6)
        _require(linear, f"{name}.derivative is not curvature (prediction - v): set is_quadratic = False")
        # Where a loss is minimal at v, |derivative| / |error| bounds its second derivative.
        bent = torch.autograd.grad(derivative.sum(), leaf)[0] if derivative.requires_grad else 0.0 * error
        minimal = bias.derivative(v[..., :dim], v).abs().max() <= 1e-6
        pull, most = (derivative, error) if minimal else (bent, torch.ones_like(bent))
        enough = pull.norm(dim=-1) <= 1e-6 + (1.0 + 1e-6) * curvature * most.norm(dim=-1)
        bound = "must be above 0, and bound the second derivative or |derivative| / |error|, or steps are too long"
        _require((enough & (curvature > 0)).all(), f"{name}.curvature is too small {at}: it {bound}")


def _check_retention(retention: Any) -> None:
    name, one = type(retention).__name__, (HEADS, ROWS, COLUMNS)
    initial = _call(retention, "start", one, _numbers(*one))
    begun, targets = (_call(retention, method, one, initial) for method in ("begin", "decay_target"))
    _require(isinstance(targets, tuple), f"{name}.decay_target must return a pair, for W and for A, None for zero")
    states: Any = [None if x is None else torch.stack([x, 1.1 * x]) for x in begun]
    weights, dual = states
    old, step = OldMatrix(weights, weights, dual, initial, *targets), 0.1 * _numbers(*MATRIX, frequency=0.7)
    alpha, depends = 0.5 + 0.4 * _numbers(*FRONT), not retention.gated
    for place in ((False, True), (True, False), (False, False), torch.eye(2).bool().unbind()):
        for gate in (alpha, 0.5 + 0.4 * _numbers(*FRONT, DIM)):
            kept = _call(retention, "keep", MATRIX, old, step, gate, *place)
            fits = isinstance(kept, NewMatrix) and len(_tensors(kept)) == 2 + retention.has_mirror_map
            _require(fits, f"{name}.keep must return NewMatrix(weights, mirrored, dual), with dual if has_mirror_map")
            depends |= not _same(retention.keep(old, step, 0.5 * gate, *place), kept, 0.0)
    _require(depends, f"{name}.keep does not depend on alpha: use it, or set gated = False")

    def keep(step: Tensor, alpha: Tensor, w: Any = weights, dual: Any = dual) -> Any:
        return retention.keep(old._replace(weights=w, dual=dual), step, alpha, False, True)

    _check_gradients(retention, "keep", keep, step, alpha, *_tensors(states))
    if not retention.has_mirror_map:
        all_kept, some_kept = (keep(0.0 * step, torch.full_like(alpha, a)).weights for a in (1.0, 0.1))
        down = ((keep(step, torch.ones_like(alpha)).weights - all_kept) * step).sum((-2, -1)) < 0.0
        _require(down.all(), f"{name}.keep must subtract the step, W - step")
        nearer = (all_kept - weights).norm() <= (some_kept - weights).norm() * (1.0 + 1e-9)
        _require(nearer, f"{name}.keep keeps less where alpha is larger: alpha is the share that is kept, 1 all of it")
    if retention.fixed_row_sums:
        mirrored = retention.keep(old, step - step.mean(-1, keepdim=True), alpha, True, True).mirrored
        sums = torch.cat([begun[0].sum(-1).flatten(), mirrored.sum(-1).flatten()])
        _require(torch.allclose(sums, sums.mean()), f"{name}: rows have different sums: set fixed_row_sums = False")


def _check_optimiser(optimiser: InnerOptimiser) -> None:
    name, count, chunk = type(optimiser).__name__, optimiser.sums(optimiser.is_online), optimiser.every or 4
    weights, g, theta = _numbers(*MATRIX), _numbers(*MATRIX, frequency=0.7), 0.5 + 0.4 * _numbers(*FRONT)
    start = tuple(torch.zeros_like(g) for _ in range(count))
    for channels in ((DIM,), ())[optimiser.mixes_rows :]:
        eta, size = 0.5 + 0.4 * _numbers(*FRONT, *channels), 1.0 + theta if optimiser.normalised else None
        rates = _call(optimiser, "rates", None, theta, eta, size, chunk, chunk)
        at = TokenGates(**rates._asdict(), alpha=eta, gamma=theta, along_key=lambda w: w)
        made: Any = (start, None)
        for _ in range(3):  # the sums are the step's own, on whose sign it may rely
            sums, made = made[0], _call(optimiser, "step", MATRIX, made[0], weights, g, at)
            pair = isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], tuple) and len(made[0]) == count
            _require(pair, f"{name}.step must return {count} sums, as many as it gets, and a step: ((s,), s)")
    for stepped in (False, True, torch.tensor([False, True])):
        _call(optimiser, "readout_weights", MATRIX, sums, weights, stepped)
    if optimiser.is_online:
        _call(optimiser, "chunk_change", MATRIX, sums, weights, g)
    _require(len(_call(optimiser, "end_chunk", MATRIX, sums)) == count, f"{name}.end_chunk must return {count} sums")
    gates = {key: x for key, x in at._asdict().items() if isinstance(x, Tensor)}

    def step(g: Tensor, weights: Tensor, *others: Tensor) -> Any:
        now: Any = dict(zip(gates, others[count:], strict=True))
        return optimiser.step(others[:count], weights, g, at._replace(**now))

    leaf = g.clone().requires_grad_()
    found = step(leaf, weights, *sums, *gates.values())[1]
    _require(found.requires_grad, f"the gradient of {name}.step is not that of its values: detach nothing")
    _check_gradients(optimiser, "step", step, g, weights, *sums, *gates.values())
    zeros = (0.0 * weights, *start)
    down = ((step(g, *zeros, *gates.values())[1] * g).sum((-2, -1)) > 0.0).all()
    _require(down, f"{name}.step must be along the gradient: it is subtracted from the memory")
    doubled = (2.0 * x if key in ("write", "apply", "plain") else x for key, x in gates.items())
    fixed = _same(step(g, weights, *sums, *doubled), made, 0.0)
    _require(not fixed, f"{name}.step does not use eta: multiply the step by at.apply, or g by at.write")
    s, length = zeros[1:], torch.zeros(())
    for _ in range(60 if optimiser.normalised else 0):
        s, last = step(0.01 * g, zeros[0], *s, *gates.values())
        length = last.norm(dim=(-2, -1)) / (0.01 * eta / (1.0 + theta) * g.norm(dim=(-2, -1)))
    too_long = f"{name}.step is {float(length.max()):.3g} times as long as s g where one gradient g comes often"
    remedy = "weigh gradients by 1 - theta, and make steps as long as gradients; or set normalised = False"
    _require(length.max() < 1.5, f"{too_long}: {remedy}")


def _check_ops(rule: Rule) -> None:
    own = [type(part).__name__ for axis, kinds in BUILT_IN.items() if type(part := getattr(rule, axis)) not in kinds]
    see = f"; see {', '.join(own)}" if own else ""
    every = rule.optimiser.every or 1
    rule = rule.vary(window={"size": min(rule.window.size, 3), "chunk": every * math.ceil(4 / every)})
    if rule.features.horizon is not None:
        rule = rule.vary(features={"horizon": 5})
    cut, params, tokens = rule.window.chunk + 1, *_problem(rule, 2 * rule.window.chunk + 3)
    truth = _everything(recurrent, rule, params, tokens)
    ops: list[Any] = [chunkwise, fused_recurrent, recurrent]
    for op in ops[:2]:
        for what, found in _everything(op, rule, params, tokens).items():
            gap = _gap(found, truth[what])
            _require(gap < 1e-8, f"{op.__name__} differs from recurrent by {gap:.1e} in {what}{see}")
    with torch.no_grad():
        changed = {name: torch.cat([x[:, :, :cut], x[:, :, cut:].flip(2)], 2) for name, x in tokens.items()}
        y = recurrent(rule, params, *_cut(changed))[0]
        _require(_same(y[:, :, :cut], truth["y"][:, :, :cut]), f"y of a token changes with later tokens{see}")
        rest, lengths = slice(cut, None), (cut - 2, cut)
        for op in ops:
            y, state = op(rule, params, *_cut(tokens, slice(cut), length=torch.tensor(lengths)))
            before = state.map(torch.clone)
            more = op(rule, params, *_cut(tokens, rest), state)[0]
            _require(_same(before, state, 0.0), f"{op.__name__} changes the state that it is given{see}")
            for row, length in enumerate(lengths):
                one = slice(row, row + 1)
                first, state = ops[1](rule, params, *_cut(tokens, slice(length), one))
                after = ops[0](rule, params, *_cut(tokens, rest, one), state)[0]
                same = _same([y[one, :, :length], more[one]], [first, after], 1e-8)
                _require(same, f"{op.__name__} of a row changes with other rows, or with where calls are split{see}")
        _require(_same(torch.cat([y[1], more[1]], 1), truth["y"][1], 1e-8), f"two calls differ from one{see}")


def _problem(rule: Rule, time: int) -> tuple[Params, dict[str, Tensor]]:
    """Parameters and inputs of 2 sequences and 2 heads."""
    sizes: dict[str, Any] = {"eta": (), "alpha": (), "theta": (), "gamma": (rule.window.size,)}
    q, k, v = (_numbers(2, 2, time, DIM, frequency=f) for f in (1.0, 1.3, 1.9))
    tokens = {"q": l2_normalise(q), "k": l2_normalise(k), "v": v}
    for i, (name, size) in enumerate((sizes | ({"delta": ()} if rule.bias.has_delta else {})).items()):
        tokens[name] = 0.5 + 0.4 * _numbers(2, 2, time, *size, frequency=0.5 + 0.2 * i)
    initial = (_numbers(2, *s, frequency=0.8 + 0.1 * i) * s[1] ** -0.5 for i, s in enumerate(rule.shapes(DIM)))
    norm = (1.0 + 0.3 * _numbers(2, DIM), 0.3 * _numbers(2, DIM, frequency=0.7)) if rule.network.norm else None
    return Params(tuple(initial), rule.features.initial_sqrt_a(), norm), tokens


def _cut(tokens: dict[str, Tensor], when: slice = slice(None), rows: slice = slice(None), **length: Tensor) -> Any:
    """q, k, v and gates of some tokens of some rows."""
    part = {name: x[rows, :, when] for name, x in tokens.items()}
    return part.pop("q"), part.pop("k"), part.pop("v"), Gates(**part, **length)


def _everything(form: Any, rule: Rule, params: Params, tokens: dict[str, Tensor]) -> dict[str, Tensor]:
    """y, the state, and the gradients of one function of both, by name."""
    leaves = {name: x.clone().requires_grad_() for name, x in tokens.items()}

    def leaf(t: Tensor) -> Tensor:
        return leaves.setdefault(f"parameter {len(leaves) - len(tokens)}", t.clone().requires_grad_())

    tokens = dict(leaves)
    y, state = form(rule, params.map(leaf), *_cut(tokens))
    found = {"y": y, **{f"the state's {name}": t for name, t in state.named_tensors() if t.is_floating_point()}}
    loss = torch.stack([(t * _numbers(*t.shape, frequency=0.9)).sum() for t in found.values()]).sum()
    slopes = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return found | {f"the gradient of {name}": t for name, t in zip(leaves, slopes, strict=True)}


def _check_mixer(mixer: Any, name: str, x: Tensor) -> None:
    def read(x: Tensor, state: Any = None, mask: Tensor | None = None) -> tuple[Tensor, Any]:
        return forward_packed(mixer, x, state, mask, None)  # which checks what a mixer returns

    (whole, end), time = read(x), x.shape[1]
    _require(_same(read(x)[0], whole), f"{name} answers otherwise when it is called again: draw and keep nothing")
    changed = torch.cat([x[:, :-2], -x[:, -2:]], 1)
    _require(_same(read(changed)[0][:, :-2], whole[:, :-2]), f"{name} sees the future: y changes with later tokens")
    for n in range(time + 1):
        first, state = read(x[:, :n])
        before, last = state.map(torch.clone), read(x[:, n:], state)[0]
        _require(_same(before, state, 0.0), f"{name} changes the state that it is given: make new tensors")
        how = "continue from the given state (None: the start), return the last one, keep nothing in the module"
        same = _same([torch.cat([first, last], 1), read(x[:, n:], state)[0]], [whole, last])
        _require(same, f"{name} answers otherwise in calls of {n} and {time - n} tokens than in one: {how}")
    alone = [read(x[1:])[0], read(x[1:], end.map(lambda t: t[1:]))[0]]
    more = read(x, end)[0]
    _require(_same(alone, [whole[1:], more[1:]]), f"{name} answers a row otherwise when other rows are beside it")
    mask = torch.ones_like(x[..., 0])
    mask[0, :2] = mask[1, 3:5] = 0
    y, state = read(x, None, mask)
    more = read(x, state)[0]
    for row, real in enumerate(mask.bool()):
        one = slice(row, row + 1)
        first, after = read(x[one, real])
        same = _same([y[one, real], more[one]], [first, read(x[one], after)[0]]) and not y[row][~real].any()
        how = "where mask [batch, time] is 0, y is zero and the state stays (see Stateful.forward_masked)"
        _require(same, f"{name} answers otherwise beside padding: {how}")
    gradient = read(x.clone().requires_grad_())[0].requires_grad
    _require(gradient, f"{name} lets no gradient through from y to x: detach nothing")
    _require(_same(mixer.train()(x)[0], whole), f"{name} answers otherwise in training than in eval mode")
