"""transformers' own Trainer, as it stands: it trains, evaluates, predicts and goes back to its best model."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

from atlas_memory.data.tokenization import byte_tokenizer
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


TEXTS = [torch.arange(n) * 7 % 29 for n in (3, 4, 5, 12)]


def holes(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Rows with padding in front, behind and within, of which the labels are left to Trainer to count."""
    ids, mask = torch.full((len(rows), 16), 30), torch.zeros(len(rows), 16, dtype=torch.int64)
    for i, row in enumerate(rows):
        n = len(row["input_ids"])
        places = torch.arange(i, i + n) + (torch.arange(n) > 1)  # a hole behind two tokens
        ids[i, places], mask[i, places] = torch.tensor(row["input_ids"]), 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.mark.parametrize("padding", ["left", "right", "holes"])
@pytest.mark.parametrize("steps", [1, 2])
def test_the_loss_is_the_mean_over_the_labels_that_count(
    make: Callable[..., AtlasForCausalLM], tmp_path: Path, padding: str, steps: int
) -> None:
    """However rows are padded: nothing predicts what follows padding, and Trainer counts it. Of the other batches of a
    step no one can say how much of it they have: there a warning names the remedy, labels of -100."""
    model, tokenizer = make(rule="gated-deltanet"), byte_tokenizer()
    if padding != "holes":
        tokenizer.padding_side = padding
    collate = holes if padding == "holes" else DataCollatorForLanguageModeling(tokenizer, mlm=False)
    tokenizer.pad_token_id = 30

    def without(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        batch = collate(rows)
        behind = F.pad(batch["attention_mask"][:, :-1] == 0, (1, 0))
        return {**batch, "labels": batch["labels"].masked_fill(behind, -100)}

    total, count = torch.zeros(()), 0
    for text in TEXTS:
        nats = F.cross_entropy(model(text[None]).logits[0, :-1], text[1:], reduction="none")
        nats = nats[[0, *range(2, len(nats))]] if padding == "holes" else nats  # the third token is behind a hole
        total, count = total + nats.sum(), count + len(nats)
    wanted = torch.stack([g.norm() for g in torch.autograd.grad(total / count, [*model.parameters()])]).norm().item()
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=4 // steps,
        gradient_accumulation_steps=steps,
        learning_rate=0.0,
        max_grad_norm=1e9,
        logging_steps=1,
        train_sampling_strategy="sequential",
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    rows = [{"input_ids": text.tolist()} for text in TEXTS]
    exact = steps == 1 or padding == "right"
    for collator in [collate, without]:
        trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, data_collator=collator)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            trainer.train()
        told = any("counts labels behind padding" in str(w.message) for w in said)
        assert told == (collator is collate and not exact)
        log = next(entry for entry in trainer.state.log_history if "grad_norm" in entry)
        near = 1e-4 if exact or collator is without else 0.03
        assert log["loss"] == pytest.approx(total.item() / count, rel=near)
        assert log["grad_norm"] == pytest.approx(wanted, rel=near)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(total.item() / count, rel=1e-4)
