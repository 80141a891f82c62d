"""Text that a model writes."""

from __future__ import annotations

from typing import Any

import torch

from atlas_memory.data.tokens import encode


@torch.inference_mode()
def sample(
    model: Any,
    tokenizer: Any,
    prompt: str,
    tokens: int,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
    greedy: bool = False,
) -> str:
    """`prompt` and up to `tokens` tokens that the model writes after it.

    Before the prompt stands the end-of-text token, with which documents begin.
    """
    ids = [tokenizer.eos_token_id, *encode(tokenizer, prompt).tolist()]
    torch.manual_seed(seed)
    choice = {"do_sample": False} if greedy else {"do_sample": True, "temperature": temperature, "top_k": top_k}
    out = model.generate(
        torch.tensor([ids], device=model.device),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=model.device),
        max_new_tokens=tokens,
        pad_token_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **choice,
    )
    return tokenizer.decode(out[0], skip_special_tokens=True)
