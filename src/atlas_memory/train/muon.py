"""PyTorch's Muon for the matrices of linear layers, and AdamW for everything else, as one optimiser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from atlas_memory.train.optimisers import m3_groups


class MuonAndAdamW(Optimizer):
    """`torch.optim.Muon` for the groups with `muon=True`, whose parameters have two dimensions; `torch.optim.AdamW` for
    all others.

    A step of Muon is scaled to move entries as far as one of AdamW does (0.2 lr, root mean square), so that both kinds
    share one learning rate (Liu et al. 2025, arXiv 2502.16982).

    >>> optimizer = MuonAndAdamW(muon_groups(model, weight_decay=0.1), lr=3e-3)

    Args:
        groups: Parameter groups, with `muon` unless it is False, and `weight_decay` unless it is 0.
        lr: Learning rate of both kinds.

    Raises:
        ValueError: There is no group of one of the kinds; a group for Muon has a parameter that is no matrix; a group
            is added later.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "muon": False})
        matrices, others = ([g for g in self.param_groups if g["muon"] is kind] for kind in (True, False))
        if not matrices or not others:
            raise ValueError("MuonAndAdamW needs groups with muon=True and groups with muon=False")
        # Both add their settings to the groups, which stay the dictionaries that a schedule changes.
        self._muon = torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw")
        self._adamw = torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), fused=True)
        self._share()

    def _share(self) -> None:
        for optimizer, kind in ((self._muon, True), (self._adamw, False)):
            optimizer.param_groups = [g for g in self.param_groups if g["muon"] is kind]
            optimizer.state = self.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while it is made."""
        if hasattr(self, "_muon"):
            raise ValueError("MuonAndAdamW takes no more groups once it is made: give all of them when making it")
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every parameter that has a gradient. `closure` computes the loss and its gradients, once."""
        loss = self._muon.step(closure)
        self._adamw.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        super().load_state_dict(state_dict)
        self._share()


def muon_groups(model: nn.Module, weight_decay: float = 0.1) -> list[dict[str, Any]]:
    """The parameter groups of `model` for `MuonAndAdamW`.

    Muon takes the weights of linear layers, but not the output head. AdamW takes embeddings, the head, norms, biases,
    gates, convolutions and the memories' M_0, which are batches of matrices. Weights of linear layers decay, others do
    not.
    """
    groups = []
    for group in m3_groups(model, weight_decay):
        for muon in (True, False):
            parameters = [p for p in group["params"] if (group["m3"] and p.dim() == 2) is muon]
            if parameters:
                groups.append({"params": parameters, "muon": muon, "weight_decay": group["weight_decay"]})
    return groups
