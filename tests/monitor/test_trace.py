"""``trace`` sees what memories do: at every token, however the text is cut, without changing anything."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from atlas_memory.layers.neural_memory import NeuralMemory
from atlas_memory.memory import RULES, Gates, retrieve
from atlas_memory.models import AtlasConfig, AtlasForCausalLM
from atlas_memory.monitor import effective_remembrance, summarise, trace
from atlas_memory.monitor.tracing import angle, effective_rank, half_life, traces

SMALL: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2}
BY_TOKEN = (
    "alpha",
    "eta",
    "theta",
    "gamma",
    "delta",
    "error_before_write",
    "recall_error",
    "readout_change",
    "memory_contribution",
    "branch_ratio",
)


def model_of(**options: Any) -> AtlasForCausalLM:
    torch.manual_seed(0)
    return AtlasForCausalLM(AtlasConfig.preset("nano", **SMALL, **options)).double().eval()


def ids_of(time: int = 50, batch: int = 2) -> torch.Tensor:
    return torch.randint(0, 256, (batch, time), generator=torch.Generator().manual_seed(1))


CASES = {
    "lmm": {"rule": "omeganet", "window": 3},
    "mag": {"rule": "titans", "block": "mag", "attention_window": 8},
    "mal": {"rule": "deltanet", "block": "mal", "attention_window": 8, "persistent_tokens": 3},
    "mac": {"rule": "titans", "block": "mac", "attention_window": 8, "persistent_tokens": 3},
    "hope": {"rule": "hope", "block": "hope", "persistent_tokens": 3},
    "tnt": {"rule": "tnt", "hierarchy": {"global_chunk": 32, "local_chunks": [4, 8], "shard": 16}},
    "atlas": {"rule": "atlas"},
    "swdt": {"rule": "swdt"},
    "channels": {"rule": "yaad", "gate_rank": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_the_cut_of_the_text_changes_nothing(case: str) -> None:
    model, ids = model_of(**CASES[case]), ids_of()
    whole, cut = (trace(model, ids, lags=(3, 20), piece=piece) for piece in (50, 7))
    assert whole.nats is not None and cut.nats is not None
    torch.testing.assert_close(whole.nats, cut.nats, equal_nan=True)
    assert cut.positions == (7, 14, 21, 28, 35, 42, 49, 50)
    for a, b in zip(whole.memories, cut.memories, strict=True):
        for name in BY_TOKEN:
            assert (getattr(a, name) is None) == (getattr(b, name) is None)
            if getattr(a, name) is not None:
                torch.testing.assert_close(getattr(a, name), getattr(b, name), equal_nan=True, msg=f"{a.name} {name}")
        for name in ("norm", "distance_from_init", "effective_rank"):
            torch.testing.assert_close(getattr(a, name)[..., -1], getattr(b, name)[..., -1])


@pytest.mark.parametrize("rule", ["omeganet", "gated-deltanet", "titans", "atlas", "hope", "yaad", "dot"])
def test_errors_are_those_of_the_memory_read_token_by_token(rule: str) -> None:
    model, ids = model_of(rule=rule), ids_of(30, 1)
    layer = next(m for m in model.modules() if isinstance(m, NeuralMemory))
    seen: list[torch.Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    with torch.inference_mode():
        model(input_ids=ids)
    hook.remove()
    found = trace(model, ids, lags=(1, 5), piece=11).memories[0]

    plain = layer.rule.vary(window={"read": "after"})
    with torch.inference_mode():
        state = layer.initial_state()
        k, v, gates = layer.write_inputs(seen[0], state)
        memory = state.memory

        def error(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            answer = retrieve(plain, layer.memory.params, key, memory)
            return (answer - value).square().sum(-1) / (answer.square() + value.square()).sum(-1), answer

        answers = []
        for t in range(30):
            now = slice(t, t + 1)
            surprise, before = error(k[:, :, now], v[:, :, now])
            answers.append(before)
            torch.testing.assert_close(found.error_before_write[:, :, now].double(), surprise, rtol=1e-5, atol=1e-6)
            token = Gates(*(None if g is None else g[:, :, now] for g in vars(gates).values()))
            _, memory = layer.memory(k[:, :, now], k[:, :, now], v[:, :, now], token, memory)
            for i, lag in enumerate((1, 5)):
                if t >= lag:
                    of = slice(t - lag, t - lag + 1)
                    wrong, answer = error(k[:, :, of], v[:, :, of])
                    torch.testing.assert_close(found.recall_error[:, :, i, now].double(), wrong, rtol=1e-5, atol=1e-6)
                    if i == 0:
                        old = answers[t - lag]
                        moved = (answer - old).norm(dim=-1) / (old.norm(dim=-1) + v[:, :, of].norm(dim=-1))
                        torch.testing.assert_close(
                            found.readout_change[:, :, now].double(), moved, rtol=1e-5, atol=1e-6
                        )
                else:
                    assert found.recall_error[:, :, i, now].isnan().all()
        torch.testing.assert_close(found.eta.double(), gates.eta, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_seen(rule: str) -> None:
    model = model_of(rule=rule, block="hope" if rule == "hope" else "lmm")
    memories = summarise(trace(model, ids_of(40), lags=(16, 256)))
    assert len(memories) == (10 if rule == "hope" else 2)
    for memory in memories:
        assert memory.eta and len(memory.eta.mean) == 2 and memory.memory_contribution > 0.01
        assert memory.recall_error[1] == [None, None]  # the text is too short
        assert all(1 <= rank <= 8 for rank in memory.effective_rank)


def test_nothing_is_changed_by_looking() -> None:
    model, ids = model_of(rule="titans").train(), ids_of()
    model.lm_head.eval()
    with torch.inference_mode():
        before = model(input_ids=ids).logits
    found = trace(model, ids)
    with torch.inference_mode():
        assert torch.equal(model(input_ids=ids).logits, before)
        log_p = before.float().log_softmax(-1)
    assert model.training and not model.lm_head.training
    assert not model.model.layers[0].mixer._forward_hooks
    assert found.nats is not None and found.nats[:, 0].isnan().all()
    expected = -log_p[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(found.nats[:, 1:], expected, rtol=1e-4, atol=1e-4)


def test_a_model_without_memories_and_one_row_of_many() -> None:
    assert trace(model_of(block="swa", attention_window=8), ids_of()).memories == ()
    model = model_of(rule="omeganet")
    both, one = trace(model, ids_of()), trace(model, ids_of()[1:])
    torch.testing.assert_close(both.memories[1].error_before_write[1:], one.memories[1].error_before_write)
    torch.testing.assert_close(both.memories[1].memory_contribution[1:], one.memories[1].memory_contribution)


def test_pieces_come_as_they_are_read() -> None:
    parts = traces(model_of(rule="deltanet"), ids_of(), piece=20)
    assert [part.memories[0].memory_contribution.shape[1] for part in parts] == [20, 20, 10]


@pytest.mark.parametrize(
    ("ids", "options", "match"),
    [
        (torch.zeros(5, dtype=torch.long), {}, r"token ids \[batch, time\].*\[5\]"),
        (torch.zeros(1, 0, dtype=torch.long), {}, "at least one token"),
        (torch.zeros(1, 5), {}, "token ids"),
        (torch.zeros(1, 5, dtype=torch.long), {"lags": ()}, "lags"),
        (torch.zeros(1, 5, dtype=torch.long), {"lags": (4, 2)}, "lags must be .* that grow"),
        (torch.zeros(1, 5, dtype=torch.long), {"piece": 0}, "piece must be an integer >= 1, got 0"),
    ],
)
def test_bad_input(ids: torch.Tensor, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        trace(model_of(rule="deltanet"), ids, **options)


def test_effective_remembrance() -> None:
    ids = ids_of(70)
    local = model_of(block="swa", attention_window=4)
    assert effective_remembrance(local, ids, recent=16) < 1e-6  # two layers see 6 tokens back
    model = model_of(rule="gated-deltanet")
    far = effective_remembrance(model, ids, recent=8)
    assert 1e-6 < effective_remembrance(model, ids, recent=24) < far < 1
    assert effective_remembrance(model, ids, recent=8, piece=7) == pytest.approx(far, rel=1e-4)
    with pytest.raises(ValueError, match=r"longer than 2 recent, got .* recent=40"):
        effective_remembrance(model, ids, recent=40)


@pytest.mark.parametrize("rule", ["titans", "gated-deltanet", "dot"])
def test_the_bend_of_a_path(rule: str) -> None:
    model, ids = model_of(rule=rule), ids_of(24, 1)
    layer = next(m for m in model.modules() if isinstance(m, NeuralMemory))
    at = []
    with torch.inference_mode():
        for end in (0, 8, 16, 24):
            cache = model(input_ids=ids[:, :end], use_cache=True).past_key_values if end else None
            state = layer.initial_state() if cache is None else cache.layers[0].state
            at.append(state.memory.weights[-1])
    widths = [F.pad(w, (0, at[-1].shape[-1] - w.shape[-1])) for w in at]
    first, second, third = (b - a for a, b in pairwise(widths))
    found = trace(model, ids, piece=8).memories[0].update_angle
    assert found[..., 0].isnan().all()
    for n, (a, b) in enumerate(((first, second), (second, third)), 1):
        expected = torch.cosine_similarity(a.flatten(2), b.flatten(2), dim=-1).acos().rad2deg()
        torch.testing.assert_close(found[..., n], expected.float(), atol=0.1, rtol=1e-3)


def test_half_life_and_rank() -> None:
    alpha = torch.full((2, 10), 0.5)
    alpha[1] = 0.5 ** (1 / 300)
    assert half_life(alpha).tolist() == pytest.approx([1.0, 300.0], rel=1e-4)
    assert half_life(torch.ones(4)) == pytest.approx(1e6)
    ahead, aside = torch.eye(2)[None, None], torch.tensor([[0.0, 1.0], [-1.0, 0.0]])[None, None]
    for other, degrees in ((ahead, 0.0), (aside, 90.0), (-ahead, 180.0)):
        assert angle((3 * ahead, 3 * ahead), (other, other)) == pytest.approx(degrees, abs=0.1)
    assert angle((ahead,), (0 * ahead,)).isnan()
    assert effective_rank(torch.eye(5)) == pytest.approx(5.0)
    assert effective_rank(torch.ones(7, 3)) == pytest.approx(1.0, abs=1e-3)
    assert effective_rank(torch.zeros(7, 3)) == 0
    q = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))[0]
    shares = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    expected = float((-(shares * shares.log()).sum()).exp())
    assert effective_rank(q[:, :3] * shares @ q[:3]) == pytest.approx(expected, rel=1e-5)


def test_a_model_of_ones_own() -> None:
    """A module that is called as language models are, with a layer of ours that stands alone."""

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.memory = torch.nn.Embedding(256, 16), NeuralMemory(16, 2, "deltanet")

        def forward(self, input_ids: torch.Tensor, past_key_values: Any = None, use_cache: bool = True) -> Any:
            _, state = self.memory(x=self.embed(input_ids), state=past_key_values)
            return SimpleNamespace(past_key_values=state)

    torch.manual_seed(0)
    found = trace(Own(), ids_of(40), lags=(4,), piece=15)
    assert found.nats is None and [memory.name for memory in found.memories] == ["memory"]
    assert found.memories[0].branch_ratio.isnan().all() and (found.memories[0].memory_contribution > 0.1).all()
    assert summarise(found)[0].branch_ratio is None
