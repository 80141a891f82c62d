"""Language: bits per byte by position over whole texts, each byte scored before it is learned from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from atlas_memory.data.sources import Document
from atlas_memory.eval.perplexity import bits_per_byte

from .evaluation import check_causal
from .suite_result import begin_result, write_result

LANGUAGE = "language"
SCORE = "bits per byte"


def evaluate_language(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    path: Path,
    length: int,
    count: int = 100,
    about: dict[str, Any] | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> dict[str, Any]:
    """Read up to `count` streams of `length` tokens of the texts, with carried state. The result is written to `path`;
    its lengths are the ends of ranges of positions, and items are streams.

    Raises:
        ValueError: The model is not causal, there is no text, or `path` has a result of another model or text.
    """
    check_causal(model)
    data = hashlib.sha256(repr(list(texts)).encode()).hexdigest()
    settings = {"strict": False, "seed": 0, "count": count, "length": length, "data": data}
    result = begin_result(path, LANGUAGE, 1, "score first, learn after", model, settings, about)
    if result["items"]:
        return dict(json.loads(path.read_text(encoding="utf-8")))

    def shown(share: float) -> None:
        if progress is not None:
            progress(f"{LANGUAGE}, {length:,} tokens", share)

    documents = [Document(str(n), text) for n, text in enumerate(texts)]
    score = bits_per_byte(model, tokenizer, documents, length, streams=count, progress=shown).checked()
    starts, ends = score.edges[:-1], score.edges[1:]
    for stream, (bits, sizes) in enumerate(zip(score.bits, score.bytes, strict=True)):
        for end, b, size in zip(ends, bits, sizes, strict=True):
            if size:
                row = {"length": end, "name": str(stream), "bits": float(b), "bytes": float(size)}
                result["items"].append(row | {"scores": {SCORE: float(b / size)}})
    errors = score.standard_errors()
    result["summary"] = [
        {"length": end, "from": start, "items": int(n), SCORE: float(mean)}
        | ({f"{SCORE} error": float(error)} if n > 1 else {})
        for start, end, n, mean, error in zip(starts, ends, score.reached, score.by_position, errors, strict=True)
    ]
    result["lengths"] = [int(end) for end in ends]
    write_result(path, result)
    return result
