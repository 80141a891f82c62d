"""What a run's folder says to whoever finds it: a model card, README.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from atlas_memory import __version__
from atlas_memory.layers.blocks import BLOCKS

CARD = """---
library_name: transformers
tags: [{tags}]
---

# {name}

A language model of {parameters:,} parameters of the library atlas-memory (version {version}): {what}. Trained by
`atlas train`, {steps:,} steps, on: {text}.

It is read with `pip install "atlas-memory[train]"`.

```python
import atlas_memory  # or trust_remote_code=True below
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

    atlas generate {name} --prompt "It was"
    atlas evaluate {name}
    atlas report {name}

`run.yaml` has every option of the run, `log.jsonl` a line for every step{held_out}.
"""


_FOLDERS = re.compile(r"(?<![\w./\\:])(?:[A-Za-z]:)?[/\\](?:[^/\\\n,:']*[/\\])*")
"""The folders in front of a file's name, from the root of a machine."""


def write_card(folder: Path, model: Any, text: str, steps: int, bits: float | None) -> None:
    """Write the card of the model in a run's folder; `bits` is what a byte of held-out text costs, if any was read."""
    about = model.config
    memory = BLOCKS[about.block].memory
    card = CARD.format(
        tags=", ".join(["atlas-memory", about.block] + [about.rule] * memory),
        name=folder.resolve().name,
        parameters=model.num_parameters(),
        version=__version__,
        what=f"blocks {about.block!r}" + f" with the memory {about.rule!r}" * memory,
        steps=steps,
        text=_FOLDERS.sub("", text),
        held_out="" if bits is None else f"; at the end {bits:.4f} bits a byte of held-out text",
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
