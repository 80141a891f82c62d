"""Rotary positions (RoFormer, Eq. 15; base 10000)."""

import torch
from torch import Tensor

from ..rules.sizes import check_size


def rotary(positions: Tensor, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[..., width / 2]` of integer positions `[...]`, in like's dtype but at least float32."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    frequency = 10000.0 ** (-torch.arange(0, width, 2, device=like.device, dtype=dtype) / width)
    angle = positions[..., None].to(dtype) * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + width / 2) of x `[..., length, width]`; the dtype is kept."""
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


def check_heads(dim: int, heads: int) -> None:
    """Raise ValueError unless `dim` divides into `heads` heads of an even width, whose channels form pairs."""
    check_size("heads", heads)
    check_size("dim", dim)
    if dim % (2 * heads):
        raise ValueError(
            f"dim={dim} with heads={heads}: rotary attention needs heads of an even width; "
            f"choose dim as a multiple of {2 * heads}"
        )
