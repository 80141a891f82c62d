"""transformers' own Trainer, as it stands: it trains, evaluates, predicts and goes back to its best model."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import Trainer, TrainingArguments

from atlas_memory.models import AtlasForCausalLM


def test_trainer_evaluates_and_loads_the_best_model(make: Callable[..., AtlasForCausalLM], tmp_path: Path) -> None:
    ids = torch.randint(0, 29, (6, 12), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=2,
        learning_rate=1.0,  # so that it gets worse, and the best model is not the last one
        lr_scheduler_type="constant",
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(make(), arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert trainer.evaluate()["eval_loss"] == min(losses) < losses[-1]
    predicted = trainer.predict(rows)
    assert predicted.predictions.shape == (6, 12, 31)
    assert (predicted.label_ids == ids.numpy()).all()
    assert predicted.metrics["test_loss"] == min(losses)


def test_a_smoothed_loss_is_of_the_next_token(make: Callable[..., AtlasForCausalLM], tmp_path: Path) -> None:
    """Trainer smooths labels itself, and shifts them for the models that transformers knows to be causal."""
    ids = torch.randint(0, 29, (4, 12), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    model = make(rule="gated-deltanet")
    arguments = TrainingArguments(
        str(tmp_path), label_smoothing_factor=0.1, use_cpu=True, report_to=[], disable_tqdm=True
    )
    with torch.no_grad():
        logits = model(ids).logits[:, :-1].flatten(0, 1)
    expected = F.cross_entropy(logits, ids[:, 1:].flatten(), label_smoothing=0.1).item()
    found = Trainer(model, arguments, eval_dataset=rows).evaluate()["eval_loss"]
    assert found == pytest.approx(expected, rel=1e-5)
