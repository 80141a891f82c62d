"""M3, multi-scale momentum Muon, as the optimiser of a model (Nested Learning, arXiv 2512.24695, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from atlas_memory.layers.omega_memory import OmegaMemory
from atlas_memory.memory import newton_schulz
from atlas_memory.rules.validation import check_size

RMS = 0.2
"""Root mean square of a matrix's step in units of lr, about that of AdamW (Liu et al. 2025, arXiv 2502.16982)."""


class M3(Optimizer):
    """Muon with a fast and a slow momentum, for matrices; AdamW for everything else.

    For a matrix with gradient g_t, NS being Newton-Schulz:

        M1_t = b1 M1_{t-1} + g_t                                    O1 = NS(M1_t)          at every step
        M2_k = b3 M2_{k-1} + sum of the last f gradients            O2 = NS(M2_k)          before steps f+1, 2f+1, ...
        V_t  = b2 V_{t-1} + (1 - b2) g_t^2
        W_t  = (1 - lr weight_decay) W_{t-1} - lr scale D,          D = (O1 + alpha O2) / (sqrt(V_t / mean V_t) + eps)

    The first f steps have no slow momentum yet. ``scale`` gives D the Frobenius norm of O1 + alpha O2, times
    0.2 sqrt(max(rows, columns)): V decides which entries move more, not how far the matrix moves, and a full-rank O1
    alone moves its entries by 0.2 lr (root mean square), as AdamW does: both kinds of groups can share one rate.

    **Where this is not Algorithm 1.** As printed, M1, M2 and V are running sums that never forget (M1 += b1 g_t, and so
    on; Eq. 75 has another sign and b2 for b3). The step then shrinks for good as V grows, and a gradient twice as large
    halves it. Here they are decayed averages, and V counts relative to its mean over the matrix. ``printed=True`` is
    Algorithm 1 to the letter: W_t = W_{t-1} - lr (O1 + alpha O2) / (sqrt(V_t) + eps), in which b1 has no effect, since
    NS ignores scale. The default values, weight decay and ``scale`` are ours; the last two follow Muon's practice.

    A parameter of more than two dimensions is a batch of matrices, such as M_0 ``[heads, rows, columns]``. Without a
    gradient (None) a parameter stays as it is. State: four tensors a matrix (M1, M2, O2, V), two for the rest.

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
        printed: see above.

    Raises:
        ValueError: a hyperparameter out of range, or a vector in a group without ``m3=False``.
        RuntimeError: in ``step``, a sparse gradient.
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
        for name, value in (("lr", lr), ("alpha", alpha), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"M3 {name} must be at least 0, got {value!r}")
        for name, value in (("eps", eps), ("adamw_eps", adamw_eps)):
            if not value > 0:
                raise ValueError(f"M3 {name} must be above 0, got {value!r}")
        for name, given, count in (("betas", betas, 3), ("adamw_betas", adamw_betas, 2)):
            if len(given) != count or not all(0 <= b < 1 for b in given):
                raise ValueError(f"M3 {name} must be {count} numbers from 0 to below 1, got {given!r}")
        for name, value in (("every", every), ("steps", steps)):
            check_size(f"M3 {name}", value)
        defaults = {
            "lr": lr,
            "betas": betas,
            "alpha": alpha,
            "every": every,
            "eps": eps,
            "weight_decay": weight_decay,
            "steps": steps,
            "adamw_betas": adamw_betas,
            "adamw_eps": adamw_eps,
            "printed": printed,
            "m3": True,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As every optimiser's; ValueError for a vector where M3 needs matrices."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in group["params"] if group["m3"] else ():
            if parameter.dim() < 2:
                self.param_groups.pop()
                raise ValueError(
                    f"M3 moves matrices, got a parameter of shape {list(parameter.shape)}: put it into a group with "
                    "m3=False, as m3_groups(model) does"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every parameter that has a gradient. ``closure`` computes the loss and its gradients, once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any(p.grad is not None and p.grad.is_sparse for group in self.param_groups for p in group["params"]):
            raise RuntimeError("M3 takes no sparse gradients: give parameters with them to torch.optim.SparseAdam")
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
        for name in ("fast", "slow", "slow_direction", "square"):
            state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    fast, slow, square = state["fast"], state["slow"], state["square"]
    if state["step"] % group["every"] == 0:
        # From here to its next use, M2 takes the gradients in one by one: their sum needs no buffer of its own.
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
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    adamw(
        parameters,
        [p.grad for p in parameters if p.grad is not None],
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
        amsgrad=False,
        beta1=group["adamw_betas"][0],
        beta2=group["adamw_betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["adamw_eps"],
        maximize=False,
    )


def m3_groups(
    model: nn.Module, weight_decay: float = 0.1, adamw_modules: Collection[nn.Module] = ()
) -> list[dict[str, Any]]:
    """The parameter groups of ``model`` for ``M3``, empty ones left out.

    M3 takes the weights of linear layers and the memories' M_0. AdamW takes embeddings, the output head, norms, biases,
    gates, convolutions and whatever else there is. Weights of linear layers decay, all others do not. Parameters that
    need no gradient are in no group.

    Args:
        model: a transformers model tells its output head itself (``get_output_embeddings``).
        weight_decay: of the weights of linear layers, the head among them unless it is tied to an embedding.
        adamw_modules: modules whose weights AdamW is to take too, such as the output head of a plain module.
    """
    modules = list(model.modules())
    embeddings = {m.weight for m in modules if isinstance(m, nn.Embedding)}
    linear = {m.weight for m in modules if isinstance(m, nn.Linear)} - embeddings
    initial = {p for m in modules if isinstance(m, OmegaMemory) for p in m.initial}
    told: Any = getattr(model, "get_output_embeddings", None)
    head = told() if told else None
    kept = {p for m in (head, *adamw_modules) if m is not None for p in m.parameters()}
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for p in model.parameters():
        if p.requires_grad:
            key = ((p in linear or p in initial) and p not in kept, p in linear)
            groups.setdefault(key, []).append(p)
    return [
        {"params": parameters, "m3": m3, "weight_decay": weight_decay if decays else 0.0}
        for (m3, decays), parameters in sorted(groups.items(), reverse=True)
    ]
