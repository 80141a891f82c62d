"""What was meant by a name that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_ELSEWHERE = {
    "train.steps": ("epochs", "num_epochs", "num_train_epochs", "max_steps"),
    "data.path": ("dataset", "file"),
    "model.num_hidden_layers": ("layers", "num_layers", "n_layer", "depth"),
    "model.num_attention_heads": ("heads", "num_heads", "n_head"),
    "model.hidden_size": ("dim", "width", "d_model", "n_embd"),
    "output_dir": ("out", "output"),
}
"""What other programs call a key."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A remedy to append to "unknown name": the closest known name, or all of them.

    That is, what other programs call so; of the same section's names the closest, or the one of which it is the
    initials (`train.lr`); the same name, or the initials, in another section; and where there is no such section, the
    closest of all.
    """
    known = sorted(known)
    section, _, last = name.rpartition(".")
    within = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == section}
    close = [key for key, names in _ELSEWHERE.items() if last in names]
    close += [within[word] for word in difflib.get_close_matches(last, within, n=1)]
    others = [(k.rpartition(".")[2], k) for k in (*within.values(), *known)]
    close += [k for word, k in others if last in (word, "".join(part[:1] for part in word.split("_")))]
    if not section or not within:
        close += difflib.get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known: {', '.join(within.values() if section and within else known)}"
