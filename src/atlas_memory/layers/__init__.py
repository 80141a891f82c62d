"""Layers: the memory, the attention beside it, and the blocks made of them."""
