"""Bits per byte: equal to a direct computation however the text is cut, padded and streamed."""

import copy
import math

import numpy as np
import pytest
import torch

from atlas_memory.data import Document, byte_tokenizer
from atlas_memory.data.tokenization import encode
from atlas_memory.eval import bits_per_byte, memory_writes, perplexity
from atlas_memory.layers.neural_memory import NeuralMemory
from atlas_memory.models import AtlasConfig, AtlasForCausalLM
from tests.data.test_tokenization import word_tokenizer

BYTES = byte_tokenizer()
DOCUMENTS = [Document("a", "abc déf " * 40), Document("b", "x" * 130), Document("c", "short")]


@pytest.fixture(scope="module")
def model() -> AtlasForCausalLM:
    torch.manual_seed(0)
    config = AtlasConfig.preset("nano", hidden_size=16, num_attention_heads=2, rule="titans")
    return AtlasForCausalLM(config).eval()


@torch.no_grad()
def directly(model, tokenizer, texts: list[np.ndarray]) -> float:
    """Total bits of each array of ids after an end-of-text token, one forward pass each."""
    total = 0.0
    for ids in texts:
        whole = torch.tensor([[tokenizer.eos_token_id, *ids.tolist()]])
        loss = model(input_ids=whole, labels=whole).loss
        total += float(loss) * len(ids) / math.log(2)
    return total


@pytest.mark.parametrize("writes", [True, False])
def test_equals_a_direct_computation(model, monkeypatch, writes: bool) -> None:
    monkeypatch.setattr(perplexity, "SEGMENT", 48)
    score = bits_per_byte(model, BYTES, DOCUMENTS, 100, writes)
    pieces = [ids[i : i + 100] for d in DOCUMENTS for ids in [encode(BYTES, d.text)] for i in range(0, len(ids), 100)]
    with memory_writes(model, writes):
        bits = directly(model, BYTES, pieces)
    size = sum(len(d.text.encode()) for d in DOCUMENTS)
    assert score.bytes.sum() == size
    assert score.overall == pytest.approx(bits / size, rel=1e-5)
    assert (score.by_position * score.bytes.sum(0)).sum() == pytest.approx(bits, rel=1e-5)


@pytest.mark.parametrize("segment", [16, 300])
def test_recent_reads_each_token_with_the_last_ones_only(model, monkeypatch, segment: int) -> None:
    monkeypatch.setattr(perplexity, "SEGMENT", segment)
    text = "".join(chr(97 + i % 26) for i in range(150))
    score = bits_per_byte(model, BYTES, [Document("a", text)], 150, recent=40)
    ids = [BYTES.eos_token_id, *text.encode()]
    bits = 0.0
    for begin in range(0, 150, 20):
        window = torch.tensor([ids[max(0, begin - 20) : begin + 21]])
        with torch.no_grad():
            logp = model(input_ids=window[:, :-1]).logits.log_softmax(-1)
        nats = -logp[0].gather(1, window[0, 1:, None])[:, 0]
        bits += nats[min(begin, 20) :].sum().item() / math.log(2)
    assert score.overall == pytest.approx(bits / 150, rel=1e-5)


def test_after(model) -> None:
    score = bits_per_byte(model, BYTES, [Document("a", "y" * 300)], 300)
    late = score.after(100)
    assert late is not None and late.edges == (128, 256, 300) and late.bytes.sum() == 172
    assert score.after(256) is not None and score.after(257) is None


def test_bytes_are_counted_for_any_tokenizer(model) -> None:
    tokenizer = word_tokenizer(eos_token="<e>")
    document = Document("a", "one deux ünknown  one\n")
    score = bits_per_byte(model, tokenizer, [document], 100)
    assert score.bytes.sum() == len(document.text.encode())
    assert score.overall == pytest.approx(
        directly(model, tokenizer, [encode(tokenizer, document.text)]) / score.bytes.sum(), rel=1e-5
    )


@pytest.mark.parametrize("last", [0, 1])
def test_a_last_bucket_without_bytes_is_of_the_one_before(model, monkeypatch, last: int) -> None:
    """As where a stream of 65 tokens ends with the second half of a character."""
    monkeypatch.setattr(perplexity, "bytes_per_token", lambda tokenizer, text: np.array([1] * 64 + [last]))
    score = bits_per_byte(model, BYTES, [Document("a", "y" * 65)], 65)
    assert score.edges == ((0, 64, 65) if last else (0, 65)) and score.bytes.sum() == 64 + last


def test_buckets(model) -> None:
    score = bits_per_byte(model, BYTES, [Document("a", "y" * 300)], 300)
    assert score.edges == (0, 64, 128, 256, 300)
    assert score.bytes.sum(0).tolist() == [64, 64, 128, 44]
    rows = score.to_dict()["by_position"]
    assert [(row["from"], row["to"]) for row in rows] == [(0, 64), (64, 128), (128, 256), (256, 300)]
    assert bits_per_byte(model, BYTES, [Document("a", "yy")], 300).edges == (0, 2)


def test_limited_streams_are_long_and_spread(model) -> None:
    documents = [Document("long", "q" * 500), Document("other", "r" * 120), Document("short", "s")]
    score = bits_per_byte(model, BYTES, documents, 100, streams=3)
    assert score.bytes.sum(1).tolist() == [100, 100, 100]
    first_two = bits_per_byte(model, BYTES, documents, 100, streams=2)
    alone = [bits_per_byte(model, BYTES, [d], 100, streams=1).overall for d in documents[:2]]
    assert first_two.overall == pytest.approx(sum(alone) / 2, rel=1e-5)


def test_margin(model) -> None:
    on, off = (bits_per_byte(model, BYTES, DOCUMENTS, 100, writes) for writes in (True, False))
    value, error = on.margin(off)
    assert value == pytest.approx(off.overall - on.overall)
    assert error >= 0
    assert on.margin(on) == (0, 0)


def test_writes_are_restored(model) -> None:
    memories = [m for m in model.modules() if isinstance(m, NeuralMemory)]
    memories[0].writes = False
    with memory_writes(model, True):
        assert all(m.writes for m in memories)
    assert [m.writes for m in memories] == [False, True]
    memories[0].writes = True
    with pytest.raises(RuntimeError), memory_writes(model, False):
        raise RuntimeError
    assert all(m.writes for m in memories)


def test_refusals(model) -> None:
    with pytest.raises(ValueError, match="length=0 must be at least 1"):
        bits_per_byte(model, BYTES, DOCUMENTS, 0)
    with pytest.raises(ValueError, match="streams=0 must be at least 1"):
        bits_per_byte(model, BYTES, DOCUMENTS, 10, streams=0)
    with pytest.raises(ValueError, match="no text to evaluate"):
        bits_per_byte(model, BYTES, [Document("a", "")], 10)


def test_standard_errors_are_of_the_streams_that_reach_a_place() -> None:
    edges, sizes = (0, 64, 128), np.array([[64.0, 64.0], [64.0, 10.0], [64.0, 0.0]])
    on, other = (perplexity.Score(edges, bits * (sizes > 0), sizes) for bits in (1.0, np.array([[2.0, 5.0]] * 3)))
    assert on.reached.tolist() == [3, 2]
    late = perplexity.Score(edges, on.bits[:2], sizes[:2])
    assert on.margin_by_position(other)[1] == pytest.approx(
        late.margin_by_position(perplexity.Score(edges, other.bits[:2], sizes[:2]))[1]
    )
    assert on.margin_by_position(other)[0, 1] == pytest.approx(0.0)


def test_text_is_read_without_dropout(model) -> None:
    dropped = copy.deepcopy(model)
    dropped.model.embed_tokens = torch.nn.Sequential(dropped.model.embed_tokens, torch.nn.Dropout(0.5)).train()
    before = torch.get_rng_state()
    assert bits_per_byte(dropped, BYTES, DOCUMENTS, 64).overall == bits_per_byte(model, BYTES, DOCUMENTS, 64).overall
    assert torch.equal(torch.get_rng_state(), before) and dropped.model.embed_tokens.training and not dropped.training
