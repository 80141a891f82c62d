"""M3 and update periods (Nested Learning, arXiv 2512.24695), Muon with AdamW, and their parameter groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from atlas_memory.layers.gate_projection import GateProjection
from atlas_memory.layers.mlp import ContinuumMLP
from atlas_memory.layers.omega_memory import OmegaMemory
from atlas_memory.memory import newton_schulz
from atlas_memory.rules.validation import UNBOUNDED, check_size


def make_optimizer(model: nn.Module, name: str, lr: float, weight_decay: float, gate_lr_scale: float) -> Optimizer:
    """The optimizer "adamw", "muon" or "m3" of a run, with update periods if the model has them.

    Only weights of linear layers decay: not embeddings, norms, biases, gates, nor a memory's M_0 and a_i.
    """
    groups = (muon_groups if name == "muon" else m3_groups)(model, weight_decay)
    groups = split_by_rate(model, split_by_period(model, groups), lr, gate_lr_scale)
    optimizer: Optimizer
    if name == "m3":
        optimizer = M3(groups, lr=lr)
    elif name == "muon":
        optimizer = MuonAndAdamW(groups, lr)
    else:
        optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
    return MultiPeriod(optimizer) if any(group["period"] > 1 for group in optimizer.param_groups) else optimizer


RMS = 0.2
"""Root mean square of a matrix's step in units of lr, as of AdamW (Liu et al. 2025, arXiv 2502.16982)."""


class M3(Optimizer):
    """Muon with a fast and a slow momentum, for matrices; AdamW for everything else.

    For a matrix with gradient g_t, NS being Newton-Schulz:

        M1_t = b1 M1_{t-1} + g_t                                    O1 = NS(M1_t)          at every step
        M2_k = b3 M2_{k-1} + sum of the last f gradients            O2 = NS(M2_k)          before steps f+1, 2f+1, ...
        V_t  = b2 V_{t-1} + (1 - b2) g_t^2
        W_t  = (1 - lr weight_decay) W_{t-1} - lr scale D,          D = (O1 + alpha O2) / (sqrt(V_t / mean V_t) + eps)

    The first f steps have no slow momentum yet. ``scale`` gives D the Frobenius norm of O1 + alpha O2, times
    0.2 sqrt(max(rows, columns)): a full-rank O1 moves its entries by 0.2 lr (root mean square), as AdamW does, so both
    kinds of groups share one rate. A parameter of more than two dimensions is a batch of matrices.

    **Where this is not Algorithm 1.** As printed, M1, M2 and V are running sums, so that steps shrink for good as V
    grows. Here they are decayed averages, and V counts relative to its mean. ``printed=True`` is Algorithm 1 to the
    letter: W_t = W_{t-1} - lr (O1 + alpha O2) / (sqrt(V_t) + eps). Defaults, weight decay and ``scale`` are ours.

    Examples:
        >>> optimizer = M3(m3_groups(model, weight_decay=0.1), lr=3e-3)

    Args:
        params: parameters, or groups. Those of a group with ``m3=False`` take AdamW; all others must be matrices.
        lr: learning rate of both kinds.
        betas: b1, b2, b3.
        alpha: weight of the slow momentum.
        every: f, steps between refreshes of the slow momentum.
        eps: a floor of the denominator, in units of the root mean square of the matrix's gradient; absolute if
            ``printed``.
        weight_decay: decoupled, in both kinds.
        steps: of Newton-Schulz.
        adamw_betas, adamw_eps: of AdamW.

    Raises:
        ValueError: a hyperparameter out of range, or a vector in a group without ``m3=False``.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 3e-3,
        betas: tuple[float, float, float] = (0.95, 0.95, 0.9),
        alpha: float = 0.5,
        every: int = 8,
        eps: float = 0.1,
        weight_decay: float = 0.0,
        steps: int = 5,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        printed: bool = False,
    ) -> None:
        options: dict[str, Any] = {"lr": lr, "betas": betas, "alpha": alpha, "every": every, "eps": eps, "steps": steps}
        options |= {"weight_decay": weight_decay, "adamw_betas": adamw_betas, "adamw_eps": adamw_eps}
        for name in ("lr", "alpha", "weight_decay", "eps", "adamw_eps"):
            if not options[name] >= 0 or (name.endswith("eps") and not options[name]):
                raise ValueError(f"M3 {name}={options[name]!r} is out of range")
        for name, count in (("betas", 3), ("adamw_betas", 2)):
            if len(options[name]) != count or not all(0 <= b < 1 for b in options[name]):
                raise ValueError(f"M3 {name}={options[name]!r} must be {count} numbers from 0 to below 1")
        check_size("M3 every", every)
        check_size("M3 steps", steps)
        super().__init__(params, options | {"printed": printed, "m3": True})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in group["params"] if group["m3"] else ():
            if parameter.dim() < 2:
                self.param_groups.pop()
                raise ValueError(f"M3 moves matrices, got the shape {list(parameter.shape)}: use a group with m3=False")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every parameter that has a gradient. ``closure`` computes the loss and its gradients, once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if group["m3"]:
                for parameter in parameters:
                    _m3(parameter, parameter.grad, self.state[parameter], group)
            else:
                _adamw(parameters, [self.state[p] for p in parameters], group)
        return loss


def _m3(parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    b1, b2, b3 = group["betas"]
    printed = group["printed"]
    if not state:
        state["step"] = 0
        state |= {name: torch.zeros_like(parameter) for name in ("fast", "slow", "slow_direction", "square")}
    fast, slow, square = state["fast"], state["slow"], state["square"]
    if state["step"] % group["every"] == 0:
        # M2 sums the gradients until its next use, without a buffer of their own.
        state["slow_direction"].copy_(newton_schulz(slow, group["steps"]))
        slow.mul_(1.0 if printed else b3)
    state["step"] += 1
    slow.add_(gradient, alpha=b3 if printed else 1.0)
    fast.mul_(1.0 if printed else b1).add_(gradient, alpha=b1 if printed else 1.0)
    square.mul_(1.0 if printed else b2).addcmul_(gradient, gradient, value=b2 if printed else 1.0 - b2)

    direction = newton_schulz(fast, group["steps"]).add_(state["slow_direction"], alpha=group["alpha"])
    if printed:
        update = direction / (square.sqrt() + group["eps"])
    else:
        tiny = torch.finfo(square.dtype).tiny
        mean = square.mean((-2, -1), keepdim=True).clamp_min(tiny)
        update = direction / ((square / mean).sqrt() + group["eps"])
        length = torch.linalg.matrix_norm(direction, keepdim=True)
        scale = RMS * max(parameter.shape[-2:]) ** 0.5
        update *= scale * length / torch.linalg.matrix_norm(update, keepdim=True).clamp_min(tiny)
    parameter.mul_(1.0 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])


def _adamw(parameters: list[Tensor], states: list[dict[str, Any]], group: dict[str, Any]) -> None:
    for parameter, state in zip(parameters, states, strict=True):
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
    gradients = [p.grad for p in parameters if p.grad is not None]
    averages, squares, steps = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
    (beta1, beta2), options = group["adamw_betas"], {name: group[name] for name in ("lr", "weight_decay")}
    options |= {"beta1": beta1, "beta2": beta2, "eps": group["adamw_eps"], "amsgrad": False, "maximize": False}
    adamw(parameters, gradients, averages, squares, [], steps, **options)


def m3_groups(
    model: nn.Module, weight_decay: float = 0.1, adamw_modules: Collection[nn.Module] = ()
) -> list[dict[str, Any]]:
    """The parameter groups of ``model`` for ``M3``.

    M3 takes the weights of linear layers and the memories' M_0; AdamW everything else. Weights of linear layers decay.

    Args:
        model: of a transformers model, the output head (``get_output_embeddings``) goes to AdamW.
        weight_decay: of the weights of linear layers, the head among them unless it is tied to an embedding.
        adamw_modules: more modules for AdamW, such as the output head of a plain module.
    """
    modules = list(model.modules())
    embeddings = {m.weight for m in modules if isinstance(m, nn.Embedding)}
    linear = {m.weight for m in modules if isinstance(m, nn.Linear)} - embeddings
    initial = {p for m in modules if isinstance(m, OmegaMemory) for p in m.initial}
    get_head: Any = getattr(model, "get_output_embeddings", None)
    outside = {p for m in (get_head() if get_head else None, *adamw_modules) if m is not None for p in m.parameters()}
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for p in model.parameters():
        if p.requires_grad:
            key = ((p in linear or p in initial) and p not in outside, p in linear)
            groups.setdefault(key, []).append(p)
    return [
        {"params": parameters, "m3": m3, "weight_decay": weight_decay if decays else 0.0}
        for (m3, decays), parameters in sorted(groups.items(), reverse=True)
    ]


class MuonAndAdamW(Optimizer):
    """`torch.optim.Muon` for the groups with `muon=True`, which have matrices; `torch.optim.AdamW` for others.

    A step of Muon is scaled to move entries as far as one of AdamW does, so that both share one learning rate.

    Examples:
        >>> optimizer = MuonAndAdamW(muon_groups(model, weight_decay=0.1), lr=3e-3)

    Raises:
        ValueError: a kind has no group; a group for Muon has a parameter that is no matrix; a group is added later.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "muon": False})
        matrices, others = ([g for g in self.param_groups if g["muon"] is kind] for kind in (True, False))
        if not matrices or not others:
            raise ValueError("MuonAndAdamW needs groups with muon=True and groups with muon=False")
        # Both add their settings to the groups, the dictionaries that a schedule changes.
        self._muon = torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw")
        self._adamw = torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), fused=True)
        self._share()

    def _share(self) -> None:
        for optimizer, kind in ((self._muon, True), (self._adamw, False)):
            optimizer.param_groups = [g for g in self.param_groups if g["muon"] is kind]
            optimizer.state = self.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_muon"):
            raise ValueError("MuonAndAdamW takes no more groups once it is made: give all of them when making it")
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every parameter that has a gradient. `closure` computes the loss and its gradients, once."""
        loss = self._muon.step(closure)
        self._adamw.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()


def muon_groups(model: nn.Module, weight_decay: float = 0.1) -> list[dict[str, Any]]:
    """The parameter groups of `model` for `MuonAndAdamW`: as `m3_groups`, but AdamW also takes the memories' M_0."""
    groups = []
    for group in m3_groups(model, weight_decay):
        for muon in (True, False):
            parameters = [p for p in group["params"] if (group["m3"] and p.dim() == 2) is muon]
            if parameters:
                groups.append({"params": parameters, "muon": muon, "weight_decay": group["weight_decay"]})
    return groups


class MultiPeriod(Optimizer):
    """Any optimizer, with a period C for each parameter group: ``group["period"]`` (Nested Learning, Eq. 71).

    A group moves at the steps C, 2C, 3C, ..., each time by one step of the optimizer with the **sum** of the last C
    gradients. In between the optimizer does not see it: no momentum, no weight decay, no change of its state.

    Examples:
        >>> groups = split_by_period(model, [{"params": list(model.parameters())}])
        >>> optimizer = MultiPeriod(torch.optim.AdamW(groups, lr=3e-3))

    ``param_groups`` and ``state`` are those of the optimizer inside, so that schedules and transformers' Trainer work;
    use only the MultiPeriod from then on. Clipping before ``step`` clips each gradient of the sum. The sums are kept in
    ``state_dict``, not in ``.grad``: call ``zero_grad`` every step. They cost one gradient's memory for the parameters
    with C > 1. The optimizer must skip parameters without ``.grad``, as those of torch.optim do (all but LBFGS).

    Raises:
        ValueError: a period that is no whole number >= 1.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.optimizer = optimizer
        self.steps = 0
        self.accumulated: dict[Tensor, Tensor] = {}
        self._share()

    def _share(self) -> None:
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """A late group keeps the common clock: its first sum may have fewer gradients."""
        check_size("a group's period", param_group.get("period", 1), UNBOUNDED)
        super().add_param_group(param_group)

    def _slow(self) -> Iterator[tuple[Tensor, int]]:
        for group in self.param_groups:
            if group.get("period", 1) > 1:
                yield from ((parameter, group["period"]) for parameter in group["params"])

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Add every gradient to its sum; move the groups whose period ends. ``.grad`` is left unchanged.
        ``closure`` computes the loss and its gradients, once; its value is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.steps += 1
        found = []
        for parameter, period in self._slow():
            found.append((parameter, parameter.grad))
            if parameter.grad is not None:
                if parameter in self.accumulated:
                    self.accumulated[parameter] += parameter.grad.detach()
                else:
                    self.accumulated[parameter] = parameter.grad.detach().clone()
            parameter.grad = self.accumulated.pop(parameter, None) if self.steps % period == 0 else None
        try:
            self.optimizer.step()
        finally:
            for parameter, gradient in found:
                parameter.grad = gradient
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, with ``steps`` and ``accumulated``: parameter's number to the sum of its gradients."""
        numbers = {parameter: i for i, parameter in enumerate(self._parameters())}
        accumulated = {numbers[parameter]: total for parameter, total in self.accumulated.items()}
        return {**self.optimizer.state_dict(), "steps": self.steps, "accumulated": accumulated}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from where ``state_dict`` was taken. ValueError if it was saved without periods or does not fit."""
        if "accumulated" not in state_dict:
            raise ValueError(
                "this state_dict was saved without MultiPeriod (it has no 'accumulated'): load it into .optimizer"
            )
        self.optimizer.load_state_dict(state_dict)
        self._share()
        parameters = list(self._parameters())
        self.steps = state_dict["steps"]
        self.accumulated = {
            parameters[i]: total.to(parameters[i].device, parameters[i].dtype)
            for i, total in state_dict["accumulated"].items()
        }

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from group["params"]


def split_by_period(model: nn.Module, groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups split by the periods of the ``ContinuumMLP`` layers of ``model``; other parameters get 1."""
    continua = [module for module in model.modules() if isinstance(module, ContinuumMLP)]
    periods = dict(pair for continuum in continua for pair in continuum.parameter_periods())
    split = []
    for group in groups:
        parts: dict[int, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            parts.setdefault(periods.get(parameter, 1), []).append(parameter)
        split += [{**group, "params": parts[period], "period": period} for period in sorted(parts)]
    return split


def split_by_rate(
    model: nn.Module, groups: list[dict[str, Any]], lr: float, gate_lr_scale: float
) -> list[dict[str, Any]]:
    """Parameter groups split so that the memories' gates learn at `gate_lr_scale` x `lr`: a gate's logit is a sum over
    the width of the model, so that one step of all its weights moves it far."""
    gates = {p for module in model.modules() if isinstance(module, GateProjection) for p in module.parameters()}
    split = []
    for group in groups:
        for rate, among in ((1.0, False), (gate_lr_scale, True)):
            if parameters := [p for p in group["params"] if (p in gates) is among]:
                split.append(group | {"params": parameters, "lr": rate * lr})
    return split
