"""A rule is a value: one choice on each axis of the inner problem. Named models are rows of the table ``RULES``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .bias import L2, AttentionalBias, Bias, DotProduct, Huber, Lp, RobustL2
from .features import Exponential, FeatureMap, Features, Identity, Polynomial
from .initialisation import FeatureLayout
from .networks import MLP, ForwardCache, GatedMLP, Linear, Network, NetworkBase, SpectralNorm, squared_spectral_norm
from .optimisers import DeltaGradientDescent, GradientDescent, Momentum, Muon, Optimiser
from .retention import (
    AnyRetention,
    Decay,
    ElasticNet,
    FDivergence,
    Keep,
    LqNorm,
    Retention,
    RowNorm,
    Sigmoid,
    Softmax,
    padded_to,
)
from .step import FLOOR, InnerOptimiser
from .validation import LONGEST, check_like, check_size, suggest


@dataclass(frozen=True)
class Window:
    """The Omega window and the chunks (ATLAS Eqs. 8-9 and 15-16).

    ``size`` = c: the inner loss at token t is a sum over the last c tokens, token i weighted by a gate gamma_i^(t).
    ``chunk`` = b: gradients of b tokens are taken at one *frozen* memory, that before their chunk (step.py); b = 1 is
    the exact recurrence. Chunks are counted from a sequence's first token, and windows reach over their starts.
    ``read``: which memory answers q_t: "after" the write of token t (ATLAS), "before" it (Hope), or the "frozen" one
    (TNT's global memory).
    """

    size: int = 1
    chunk: int = 16
    read: str = "after"

    def __post_init__(self) -> None:
        for name in ("size", "chunk"):
            check_size(f"Window {name}", getattr(self, name), LONGEST)
        if self.read not in ("after", "before", "frozen"):
            raise ValueError(f"Window read must be 'after', 'before' or 'frozen', got {self.read!r}")


KINDS: dict[str, tuple[type, ...]] = {
    "features": (Identity, Polynomial, Exponential),
    "network": (Linear, MLP, GatedMLP),
    "bias": (L2, DotProduct, Lp, Huber, RobustL2),
    "retention": (Decay, Keep, LqNorm, Softmax, Sigmoid, ElasticNet, FDivergence, RowNorm),
    "optimiser": (GradientDescent, DeltaGradientDescent, Momentum, Muon),
    "window": (Window,),
}
"""The classes that ``Rule.vary`` and configurations can name; yours are added by ``KINDS["optimiser"] += (Mine,)``."""

BUILT_IN = dict(KINDS)

BASES: dict[str, type] = {
    "features": Features,
    "network": NetworkBase,
    "bias": Bias,
    "retention": AnyRetention,
    "optimiser": InnerOptimiser,
    "window": Window,
}


def kinds_of(axis: str) -> dict[str, type]:
    """The classes of an axis by name; ValueError if one has the name of a class of the library."""
    kinds = {kind.__name__: kind for kind in KINDS[axis]}
    for kind in BUILT_IN[axis]:
        if kinds.get(kind.__name__, kind) is not kind:
            raise ValueError(f"KINDS[{axis!r}] has another {kind.__name__} than the library's: give it its own name")
    return kinds


def check_part(axis: str, part: Any) -> None:
    """Raise ValueError unless ``part`` is an instance of a frozen dataclass of this axis."""
    base = BASES[axis]
    if not isinstance(part, base) or not is_dataclass(part):
        raise ValueError(f"{axis} of a rule must be a dataclass that derives from {base.__name__}, got {part!r}")
    try:
        hash(part)
    except TypeError as error:
        raise ValueError(f"{axis} {type(part).__name__} must be a frozen dataclass: {error}") from error


def default_part(name: str, kind: type, options: Mapping[str, Any]) -> Any:
    """A part with the defaults of its class; fields that have none are those of ``options``."""
    needed = [f.name for f in fields(kind) if f.init and f.default is MISSING and f.default_factory is MISSING]
    if missing := [field for field in needed if field not in options]:
        raise ValueError(f"{name} {kind.__name__} has no default for {', '.join(missing)}: give {missing[0]!r} a value")
    return kind(**{field: options[field] for field in needed})


PRINTED: dict[str, dict[str, Any]] = {
    "features": {"constant": 1.0, "horizon": None},
    "bias": {"scale": 1.0, "corner": 0.0},
    "retention": {"to_initial": False, "scale": 1.0},
    "optimiser": {"normalised": False, "online": False, "read_pending": False},
}


ALIASES = {"bias": ("loss",), "optimiser": ("optimizer",)}


@dataclass(frozen=True)
class Rule:
    """How keys are mapped, what learns, what it minimises, what it keeps, how it steps, and over which window.

    Raises:
        ValueError: a part that is no instance of a dataclass of its axis, or parts that do not go together.
            ``atlas_memory.testing.check_rule`` checks what parts of your own compute.
    """

    features: FeatureMap = field(default_factory=Polynomial)
    network: Network = field(default_factory=MLP)
    bias: AttentionalBias = field(default_factory=L2)
    retention: Retention = field(default_factory=lambda: Decay(to_initial=True))
    optimiser: Optimiser = field(default_factory=Muon)
    window: Window = field(default_factory=lambda: Window(size=8, chunk=16))

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self)):
            check_part(name, getattr(self, name))
        self._check_steps()
        optimiser, retention = self.optimiser, self.retention
        name, of = type(optimiser).__name__, type(retention).__name__
        for part in (retention, optimiser):
            if self.features.infinite and not part.supports_infinite_features:
                raise ValueError(
                    f"{type(part).__name__} reads the entries of a matrix, which {type(self.features).__name__} "
                    "features do not give: take Polynomial features; a class of your own that reads none sets "
                    "supports_infinite_features = True"
                )
        if optimiser.erases and (self.window.size > 1 or retention.has_mirror_map):
            raise ValueError(
                f"{name} is for a window of one token, with Decay or Keep as retention, got {self.window.size} and {of}"
            )
        if retention.lag and optimiser.estimates_change:
            raise ValueError(f"a lag token is for gradient descent and momentum: with {name} take {of}(lag=False)")
        if self.window.read == "before" and retention.has_mirror_map:
            raise ValueError(f"{of} is not for read='before': take 'after', or 'frozen'")

    def _check_steps(self) -> None:
        name, every = type(self.optimiser).__name__, self.every
        if self.optimiser.every is not None:
            check_size(f"{name} every", self.optimiser.every)
        if every > 1 and not self.optimiser.has_momentum:
            raise ValueError(f"{name} every={every} needs a momentum that holds the pending update, and has none")
        if self.window.chunk % every:
            raise ValueError(
                f"{name} every={every} does not divide the chunk of {self.window.chunk} tokens: take a divisor, or None"
            )

    def vary(self, **parts: Mapping[str, Any]) -> Rule:
        """The rule with fields of its parts changed: ``rule.vary(optimiser={"every": 16}, window={"size": 4})``.

        The option ``kind`` names another part: ``rule.vary(bias={"kind": "Lp", "p": 3.0})``.

        Raises:
            ValueError: a part or field that does not exist, or a value that it refuses.
        """
        changed: dict[str, Any] = {}
        known = [f.name for f in fields(self)]
        for name, options in parts.items():
            if name not in known:
                raise ValueError(f"a rule has no part {name!r}; {suggest(name, known, ALIASES)}")
            if not isinstance(options, Mapping):
                raise ValueError(
                    f"options of {name!r} must map fields to values, got {options!r}; for an instance, use "
                    f"dataclasses.replace(rule, {name}=...)"
                )
            part, options = getattr(self, name), dict(options)
            if (kind := options.pop("kind", None)) is not None:
                kinds = kinds_of(name)
                if not isinstance(kind, str) or kind not in kinds:
                    raise ValueError(
                        f"{name} has no kind {kind!r}; {suggest(kind, kinds)} Your own: KINDS[{name!r}] += ({kind},)"
                    )
                part = part if type(part) is kinds[kind] else default_part(name, kinds[kind], options)
            allowed = [f.name for f in fields(part)]
            for option, value in options.items():
                if option not in allowed:
                    has = suggest(option, allowed) if allowed else "it has no fields"
                    raise ValueError(f"{name} {type(part).__name__} has no field {option!r}; {has}")
                check_like(f"{name} {type(part).__name__} {option}", value, getattr(part, option))
            changed[name] = replace(part, **options)
        return replace(self, **changed)

    def printed(self) -> Rule:
        """The rule as its paper prints it (the pages of reference/), without the library's own changes.

        Steps are eta, not normalised, and gradients those at the memory before the chunk; Muon takes eta_t NS(S_t)
        (ATLAS Eqs. 32-33). alpha takes the memory to zero. L2 has the scale 1, absolute values in Huber's loss have
        corners (Miras Eq. 26), and a softmax is scaled by the number of columns (Miras Eq. 21). sqrt(a_0) of polynomial
        features starts at 1, and phi* forgets no key. With one step a chunk, ``every=None``, a chunk is read before it
        is written (LaCT).

        Window, chunk, and features, bias and retention of your own stay. Parts that ``vary`` replaces afterwards are
        the library's again. Raw steps of a deep memory may diverge: lower eta where outputs grow.
        """
        changed: dict[str, dict[str, Any]] = {"window": {"read": "frozen"} if self.optimiser.every is None else {}}
        for axis, options in PRINTED.items():
            if type(part := getattr(self, axis)) in BUILT_IN[axis] or axis == "optimiser":
                known = {f.name for f in fields(part)}
                changed[axis] = {name: value for name, value in options.items() if name in known}
        return self.vary(**changed)

    @property
    def every(self) -> int:
        """A step of the memory is taken after every so many tokens."""
        return self.optimiser.every or self.window.chunk

    @property
    def online(self) -> bool:
        """Whether the errors of a chunk see its earlier writes; those of the dot product depend on no answer."""
        return self.optimiser.is_online and not self.bias.is_linear

    @property
    def accumulators(self) -> int:
        """Sums that the optimiser keeps of each matrix."""
        return self.optimiser.sums(self.online)

    def kernelised(self, i: int) -> bool:
        """Whether matrix i multiplies phi*, and so has a column for each key, after those of M_0."""
        return self.features.infinite and self.network.feature_mapped[i]

    def decay_target(self, initial: Tensor, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """What W and the accumulator A decay to, given M_0 (``initial``) and W (``like``); None for zero."""
        return self.retention.decay_target(padded_to(initial, like))

    def shapes(self, dim: int) -> tuple[tuple[int, int], ...]:
        """(rows, columns) of the memory's matrices for heads of ``dim``."""
        return self.network.shapes(self.features.size(dim), dim)

    def curvature_bound(self, cache: ForwardCache, v: Tensor, params: Params) -> Tensor:
        """r_t of step.py, ``[..., time]``, a bound on how fast the error at the pre-norm output grows with it."""
        bends = self.network.norm and self.bias.is_quadratic
        slope = self.bias.derivative(cache.prediction, v) if bends else None
        bound = self.network.curvature_bound(cache, self.bias.curvature(cache.prediction, v), slope, params.norm)
        return bound.clamp_min(1e-6)  # a layer norm may learn a gain of zero

    def step_normalisers(
        self,
        weights: Sequence[Tensor],
        cache: ForwardCache,
        curvature_bound: Tensor,
        params: Params,
        lengths: Tensor | None = None,
        spectral_norm: SpectralNorm = squared_spectral_norm,
    ) -> tuple[Tensor, ...]:
        """lambda_l,t / share_l of step.py for every matrix, ``[..., time]``; ``lengths``: |phi(x)|^2, if it is
        known; ``spectral_norm``: as in ``jacobian_bounds``."""
        network, found = self.network, []
        bounds = network.jacobian_bounds(weights, cache, spectral_norm)
        for mapped, u, bound, share in zip(network.feature_mapped, cache.inputs, bounds, network.shares, strict=True):
            if mapped and not self.retention.fixed_row_sums:
                length = self.features.squared_norm(u, params.sqrt_a) if lengths is None else lengths
            else:
                f = self.features.expand(u, params.sqrt_a) if mapped else u
                length = self.retention.tangent(f).square().sum(-1)
            found.append((curvature_bound * (bound + FLOOR) + self.optimiser.erases) * (length + FLOOR) / share)
        return tuple(found)

    def initial_weights(self, heads: int, dim: int) -> tuple[Tensor, ...]:
        """A fresh M_0, one ``[heads, rows, columns]`` a matrix (initialisation.py)."""
        features, own = self.features, self.features.own(dim)
        others = 0.0
        if own.stop < features.size(dim):
            with torch.device("cpu"):  # wherever the weights will lie
                others = float(features.squared_norm(torch.full((dim,), dim**-0.5)))
            # What is before x, and x, whose length is 1.
            others -= (own.start * features.constant**2 + 1.0) if own.start < own.stop else 0.0
        phi = FeatureLayout(features.size(dim), own, others, features.constant)
        return tuple(map(self.retention.start, self.network.start(heads, dim, phi)))


@dataclass(frozen=True)
class Params:
    """The outer parameters: ``initial``, the learned M_0, one ``[heads, rows, columns]`` a matrix; ``sqrt_a``, the
    feature map's coefficients ``[degree + 1]``, None for its default; ``norm``, gain and shift ``[heads, dim]`` of the
    network's layer norm, None for 1 and 0."""

    initial: tuple[Tensor, ...]
    sqrt_a: Tensor | None = None
    norm: tuple[Tensor, Tensor] | None = None

    def map(self, fn: Callable[[Tensor], Tensor]) -> Params:
        """The same with ``fn`` applied to every tensor."""
        return Params(
            tuple(map(fn, self.initial)),
            None if self.sqrt_a is None else fn(self.sqrt_a),
            None if self.norm is None else (fn(self.norm[0]), fn(self.norm[1])),
        )


ATLAS = Rule()
OMEGANET = replace(ATLAS, optimiser=GradientDescent())
DLA = replace(OMEGANET, bias=DotProduct(), window=Window(size=1, chunk=16))
DELTANET = Rule(
    features=Identity(),
    network=Linear(),
    bias=DotProduct(),
    retention=Keep(),
    optimiser=DeltaGradientDescent(normalised=False),
    window=Window(size=1, chunk=32),
)
MIRAS = Rule(features=Identity(), network=MLP(norm=True), optimiser=GradientDescent(), window=Window(size=1, chunk=16))
TTT = replace(MIRAS, features=Polynomial(degree=1), bias=L2(scale=0.5), retention=Keep())

RULES: dict[str, Rule] = {
    # ATLAS Eqs. 32-33 and 57-58; Eq. 43; Eq. 10, which is also the row "w/o Muon" of Table 6
    "atlas": ATLAS,
    "atlas++": replace(ATLAS, network=GatedMLP()),
    "omeganet": OMEGANET,
    # The other ablations of ATLAS Table 6, a line each
    "atlas-linear": replace(ATLAS, network=Linear()),
    "atlas-identity": replace(ATLAS, features=Identity()),
    "atlas-c1": ATLAS.vary(window={"size": 1}),
    # ATLAS Eqs. 19 and 20: Hebbian writes, deep and linear
    "dla": DLA,
    "swla": replace(
        OMEGANET,
        features=Polynomial(constant=0.1),
        bias=DotProduct(),
        network=Linear(),
        retention=Decay(),
        optimiser=GradientDescent(normalised=False),
    ),
    # ATLAS Eqs. 25 and 27: the exponential kernel; SWDT with a state that is bounded by a horizon
    "deeptransformer": replace(DLA, features=Exponential()),
    "swdt": replace(OMEGANET, features=Exponential(horizon=64), bias=DotProduct()),
    "dot": replace(OMEGANET, features=Exponential()),
    # ATLAS Eqs. 12-13; Titans Eqs. 12-14
    "titans": Rule(features=Identity(), optimiser=Momentum(), window=Window(size=1, chunk=16)),
    # TNT (arXiv 2511.07343) Eq. 3, App. D: what each memory of its hierarchy does
    "tnt": replace(MIRAS, retention=Keep()),
    # Miras Eqs. 24, 26 and 27
    "moneta": replace(MIRAS, bias=Lp(3.0), retention=LqNorm(4.0, to_initial=True)),
    "yaad": replace(MIRAS, bias=Huber("mixture", corner=1.0)),
    "memora": replace(MIRAS, retention=Softmax(scale=0.5, to_initial=True)),
    # Nested Learning Eqs. 88-89, the memory that answers the query; SelfModifyingMemory has the others
    "hope": Rule(features=Identity(), optimiser=DeltaGradientDescent(), window=Window(1, 16, read="before")),
    # The delta rule W_t = W_{t-1} (I - eta k k^T) + eta v k^T, to the letter at any chunk; and gated
    "deltanet": DELTANET,
    "gated-deltanet": DELTANET.vary(retention={"kind": "Decay"}, optimiser={"after_decay": True}),
    # TTT (arXiv 2407.04620): x + LN(W x + b) and its two-layer form, mini-batches of 16
    "ttt-linear": replace(TTT, network=Linear(residual=True, norm=True)),
    "ttt-mlp": replace(TTT, network=MLP(bias=True, norm=True)),
    # LaCT (arXiv 2505.23884): SwiGLU memory, one Muon step a large chunk, rows kept at their length
    "lact": Rule(
        features=Identity(),
        network=GatedMLP(expansion=1, activation="silu", residual=False),
        bias=DotProduct(),
        retention=RowNorm(),
        optimiser=Muon(every=None),
        window=Window(size=1, chunk=64),
    ),
}


def resolve_rule(rule: str | Rule, window: int | None = None, chunk_size: int | None = None) -> Rule:
    """A rule by name or value, with its window c and chunk b replaced where given.

    Raises:
        ValueError: a name that is not in ``RULES``, or a size below 1.
    """
    if isinstance(rule, str):
        if rule not in RULES:
            raise ValueError(
                f"unknown rule {rule!r}; {suggest(rule, RULES)} Your own: RULES[{rule!r}] = Rule(...), "
                "for the command in a file that ends in atlas_memory.cli.main()"
            )
        rule = RULES[rule]
    if not isinstance(rule, Rule):
        raise ValueError(f"rule must be a name in RULES or a Rule, got {rule!r}")
    sizes = {name: value for name, value in (("size", window), ("chunk", chunk_size)) if value is not None}
    return rule.vary(window=sizes) if sizes else rule
