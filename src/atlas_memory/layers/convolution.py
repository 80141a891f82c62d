"""The short causal convolution after the q, k and v projections (size 4 in ATLAS, section 5.1)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..memory.windows import take


class ShortConvolution(nn.Module):
    """Depthwise causal convolution: each channel mixes its last ``size`` inputs; starts near the identity.

    Args:
        channels: number of channels.
        size: taps, >= 1; 1 leaves only a scale.
    """

    def __init__(self, channels: int, size: int = 4) -> None:
        super().__init__()
        if size < 1:
            raise ValueError(f"conv_size must be >= 1, got {size}")
        self.size = size
        self.weight = nn.Parameter(torch.empty(channels, size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Taps uniform in +-1/(2 size), plus one at the current token."""
        bound = 0.5 / self.size
        nn.init.uniform_(self.weight, -bound, bound)
        with torch.no_grad():
            self.weight[:, -1] += 1.0

    def forward(self, x: Tensor, past: Tensor | None = None, length: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Convolve along time.

        Args:
            x: ``[batch, time, channels]``.
            past: the last size - 1 inputs before x, ``[batch, size - 1, channels]``; None: zeros.
            length: real tokens of each row ``[batch]``, the rest being right padding; None: all.

        Returns:
            y ``[batch, time, channels]`` and the new ``past``.

        Raises:
            ValueError: ``past`` of another shape, as from a state of another batch or layer.
        """
        batch, time, channels = x.shape
        if past is None:
            past = x.new_zeros(batch, self.size - 1, channels)
        if past.shape != (batch, self.size - 1, channels):
            expected = [batch, self.size - 1, channels]
            raise ValueError(
                f"state must carry past inputs of shape {expected}, got {list(past.shape)}: another batch or layer"
            )
        inputs = torch.cat([past, x], 1)
        if time == 0:
            return x, past
        y = F.conv1d(inputs.mT, self.weight[:, None, :].to(x.dtype), groups=channels).mT
        if length is None:
            return y, inputs[:, time:]
        last = length[:, None] + torch.arange(self.size - 1, device=x.device)
        return y, take(inputs, last)
