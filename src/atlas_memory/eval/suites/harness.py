"""Tasks of lm-evaluation-harness, through its own interface."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from .evaluation import check_causal
from .suite_result import begin_result, write_result

HARNESS = "lm-eval:"
"""Before the name of one of its tasks."""
BATCH = 8


def evaluate_harness(
    model: Any,
    tokenizer: Any,
    task: str,
    path: Path,
    count: int | None = None,
    seed: int = 42,
    tasks: Path | None = None,
    about: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The result of a task, or a group of tasks, written to `path`: the harness's metrics, and its record of each
    sample.

    Args:
        task: Its name in the harness.
        count: Samples of each task; None: all.
        seed: Of few-shot examples.
        tasks: A folder with tasks of your own, as YAML files.

    Raises:
        ValueError: lm-eval is not installed, it has no such task, the model is not causal, or `path` has another
            result.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ValueError(f"{HARNESS}{task} needs lm-evaluation-harness: pip install lm-eval") from error
    check_causal(model)
    manager = None if tasks is None else TaskManager(include_path=str(tasks), include_defaults=False)
    if manager is None or task not in manager.all_tasks:
        manager = TaskManager()  # which reads thousands of files
    if task not in manager.all_tasks:
        raise ValueError(f"lm-eval has no task {task!r}: `lm-eval ls tasks` names them; your own: --tasks FOLDER")
    files = [] if tasks is None else [(str(f), f.read_bytes()) for f in sorted(tasks.rglob("*")) if f.is_file()]
    data = hashlib.sha256(repr((task, files)).encode()).hexdigest()
    settings = {"strict": False, "seed": seed, "count": count, "data": data}
    result = begin_result(path, HARNESS + task, 1, "lm-evaluation-harness", model, settings, about)
    if result["items"]:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    # The prefix stands where a task has nothing before what is scored.
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=BATCH, prefix_token_id=tokenizer.eos_token_id)
    found = simple_evaluate(
        lm,
        tasks=[task],
        limit=count,
        task_manager=manager,
        bootstrap_iters=100,
        random_seed=seed,
        numpy_random_seed=seed,
        torch_random_seed=seed,
        fewshot_random_seed=seed,
    )
    samples, result["lengths"] = found["samples"], []
    result["items"] = [
        {"length": None, "name": f"{name} {row['doc_id']}", "answer": row["filtered_resps"], "target": row["target"]}
        for name, rows in samples.items()
        for row in rows
    ]
    result["asked"] = hashlib.sha256(json.dumps(samples, default=str, sort_keys=True).encode()).hexdigest()
    result["versions"] = found["versions"]
    result["summary"] = [
        {"length": None, "task": name, "items": found["n-samples"][name]["effective"], **_metrics(metrics)}
        for name, metrics in found["results"].items()
        if name in found["n-samples"]
    ]
    write_result(path, result)
    return result


def _metrics(metrics: dict[str, Any]) -> dict[str, float]:
    """The numbers of a task in their order, each with its standard error; a filter other than none in brackets."""
    found = {}
    for name, value in metrics.items():
        metric, _, how = name.partition(",")
        if isinstance(value, int | float) and metric != "sample_len":
            plain = metric.removesuffix("_stderr")
            shown = plain + (f" ({how})" if how not in ("none", "") else "")
            found[shown + " error" * (plain != metric)] = float(value)
    return found
