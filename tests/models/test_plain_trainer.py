"""transformers' own Trainer, as it stands: it trains, evaluates, predicts and goes back to its best model."""

from collections.abc import Callable
from pathlib import Path

import torch
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
