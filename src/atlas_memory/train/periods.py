"""Parameters that an optimiser moves only every so many steps (Nested Learning, arXiv 2512.24695, Eq. 71)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atlas_memory.layers.mlp import ContinuumMLP
from atlas_memory.rules.validation import UNBOUNDED, check_size


class MultiPeriod(Optimizer):
    """Any optimiser, with a period C for each of its parameter groups: ``group["period"]``, 1 where there is none.

    A group moves at the steps C, 2C, 3C, ..., each time by one step of the optimiser with the **sum** of the last C
    steps' gradients (Eq. 71). In between the optimiser does not see it: no momentum, no weight decay, no change of its
    state. A group of period 1 moves at every step as if nothing were around the optimiser.

    >>> groups = split_by_period(model, [{"params": list(model.parameters())}])
    >>> optimizer = MultiPeriod(torch.optim.AdamW(groups, lr=3e-3))

    ``param_groups`` and ``state`` are those of the optimiser inside, so that learning-rate schedules and transformers'
    Trainer work on it; a group moves at the rate of the step at which it moves. Clipping before ``step`` clips each
    gradient of the sum. The sums are kept here and in ``state_dict``, not in ``.grad``: call ``zero_grad`` every step,
    as usual. They cost one gradient's memory for the parameters with C > 1. The optimiser must skip parameters whose
    ``.grad`` is None, as those of torch.optim do (all but LBFGS, which works on one long vector).

    Args:
        optimizer: what moves the parameters. Use only the MultiPeriod from then on.

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
        """As every optimiser's. A late group keeps the common clock: its first sum may have fewer gradients."""
        period = param_group.get("period", 1)
        check_size("a group's period", period, UNBOUNDED)
        super().add_param_group(param_group)

    def _slow(self) -> Iterator[tuple[Tensor, int]]:
        for group in self.param_groups:
            if group.get("period", 1) > 1:
                yield from ((parameter, group["period"]) for parameter in group["params"])

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take every gradient in; move the groups whose time has come. Gradients are left as they were found.

        Args:
            closure: computes the loss and its gradients, once; its value is returned.
        """
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
        """The inner optimiser's, with ``steps`` and ``accumulated``: parameter's number to the sum of its gradients."""
        numbers = {parameter: i for i, parameter in enumerate(self._parameters())}
        accumulated = {numbers[parameter]: total for parameter, total in self.accumulated.items()}
        return {**self.optimizer.state_dict(), "steps": self.steps, "accumulated": accumulated}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from where ``state_dict`` was taken, in the middle of a period or not.

        Raises:
            ValueError: it is an optimiser's without periods, or of other parameter groups.
        """
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
    """Parameter groups split so that each has one period, read from the ``ContinuumMLP`` layers of ``model``.

    Every other entry of a group is kept. Parameters outside of a continuum get period 1.
    """
    continua = [module for module in model.modules() if isinstance(module, ContinuumMLP)]
    periods = dict(pair for continuum in continua for pair in continuum.parameter_periods())
    split = []
    for group in groups:
        parts: dict[int, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            parts.setdefault(periods.get(parameter, 1), []).append(parameter)
        split += [{**group, "params": parts[period], "period": period} for period in sorted(parts)]
    return split
