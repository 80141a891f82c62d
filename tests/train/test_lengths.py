"""Segments that grow during a run: rows go on with what they remember, wherever the run is cut."""

import shutil

import pytest
import torch

from atlas_memory.train import run_model, trainer
from atlas_memory.train.tbptt import TBPTTStates
from atlas_memory.train.trainer import train
from tests.train.small import settings
from tests.train.test_orders import losses, near, same, together, weights

LENGTHS = ("data.seq_len_schedule={3: 32, 5: 64}", "data.interleave=2", "train.batch_size=4", "train.steps=12")


@pytest.mark.parametrize("order", ["stream", "packed"])
def test_a_resumed_run_is_bitwise_the_same(tmp_path, order: str) -> None:
    """From where segments grow (3), and from a lane in the middle (6)."""
    config = settings(tmp_path, *LENGTHS, f"data.order={order}", "train.keep_checkpoints=4")
    run, kept = tmp_path / "run", tmp_path / "kept"
    train(config)
    shutil.copytree(run, kept)
    for step in (3, 6):
        shutil.rmtree(run)
        shutil.copytree(kept, run)
        for checkpoint in run.glob("checkpoint-*"):
            if int(checkpoint.name.partition("-")[2]) > step:
                shutil.rmtree(checkpoint)
        assert train(config, resume=True).steps == 12
        assert losses(run) == losses(kept) and same(run, kept)


def test_states_are_carried_as_one_long_reading(tmp_path, monkeypatch) -> None:
    """Two rows of 16 tokens twice, then one row of 32 tokens after the other, at fixed weights."""
    read: list[torch.Tensor] = []
    kept: list[TBPTTStates] = []
    forward = trainer.AtlasForCausalLM.forward

    def keep(self, input_ids, **kwargs):
        read.append(input_ids.clone())
        return forward(self, input_ids, **kwargs)

    def keep_states(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        kept.append(self)

    begin = TBPTTStates.__init__
    (tmp_path / "corpus").mkdir()
    for i in range(4):
        (tmp_path / "corpus" / f"{i}.txt").write_text(f"{i} " * 500)
    still = ("train.learning_rate=1e-30", "train.weight_decay=0", "train.evaluate_every=0")
    with monkeypatch.context() as patch:
        patch.setattr(trainer.AtlasForCausalLM, "forward", keep)
        patch.setattr(TBPTTStates, "__init__", keep_states)
        train(settings(tmp_path, *still, "train.steps=4", "data.seq_len_schedule={2: 32}"))
    assert [list(ids.shape) for ids in read] == [[2, 16], [2, 16], [1, 32], [1, 32]]
    model = run_model.first_model(settings(tmp_path), run_model.saved_config(tmp_path / "run"))
    model.load_state_dict(weights(tmp_path / "run"), strict=False)
    model.tie_weights()
    for row in range(2):
        whole = torch.cat([read[0][row], read[1][row], read[2 + row][0]])[None]
        cache = model.eval()(input_ids=whole, use_cache=True).past_key_values
        for block, held in zip(cache.blocks, kept[0].next_cache().blocks, strict=True):
            for one, two in zip(block.state.tensors(), held.state.tensors(), strict=True):
                torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_two_processes_are_one_that_accumulates(tmp_path) -> None:
    common = ("data.seq_len_schedule={2: 32}", "data.interleave=2", "train.steps=6", "train.learning_rate=0.001")
    one, two = tmp_path / "one", tmp_path / "two"
    train(settings(one, *common, "train.gradient_accumulation_steps=2"))
    together(settings(two, *common))
    assert losses(one / "run") == pytest.approx(losses(two / "run"), rel=1e-5)
    assert near(one / "run", two / "run", 1e-5)
    shutil.rmtree(two / "run" / "checkpoint-6")  # what two processes remember, in one
    train(settings(two, *common, "train.batch_size=4"), resume=True)
    assert losses(one / "run") == pytest.approx(losses(two / "run"), rel=1e-5)
