"""Packed rows are marked in the forms of other libraries too; what is not known is refused by name."""

import copy
import inspect

import pytest
import torch
from transformers import DataCollatorWithFlattening

from atlas_memory.models import AtlasForCausalLM

IDS = torch.randint(0, 29, (2, 11), generator=torch.Generator().manual_seed(2))
LENGTHS = (4, 1, 6)
TEXTS = [torch.arange(n) + 3 * n for n in LENGTHS]


def assert_near(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-8 * b.abs().max().item())


def packed(**options: bool) -> dict[str, torch.Tensor]:
    """What transformers makes of the texts, one row."""
    collate = DataCollatorWithFlattening(return_tensors="pt", **options)
    return dict(collate([{"input_ids": text.tolist()} for text in TEXTS]))


FORMS = {
    "position_ids": packed(),
    "cu_seq_lens_q": packed(return_position_ids=False, return_flash_attn_kwargs=True),
    "both": packed(return_flash_attn_kwargs=True),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_document_starts_and_each_document_alone(make, form: str) -> None:
    model = make(block="mag").double()
    ids = torch.cat(TEXTS)[None]
    starts = torch.zeros(1, 11)
    starts[0, [0, 4, 5]] = 1
    given = {"input_ids": ids} | FORMS[form]
    labels = packed()["labels"]
    wanted = model(input_ids=ids, document_starts=starts, labels=labels)
    found = model(**given | {"labels": labels})
    assert torch.equal(found.logits, wanted.logits) and found.loss == wanted.loss
    assert_near(found.logits, torch.cat([model(text[None]).logits for text in TEXTS], 1))
    assert not torch.allclose(found.logits, model(ids).logits)
    alone = model.model(**{name: value for name, value in given.items() if name != "labels"})
    assert torch.equal(alone.last_hidden_state, model.model(ids, document_starts=starts).last_hidden_state)


def test_positions_that_go_on_change_nothing(make) -> None:
    """Also behind padding, whose positions are all 0, and in what is read later; a 0 later on begins a document."""
    model, ids = make().double(), IDS
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, :3] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    plain = model(ids, attention_mask=mask)
    assert torch.equal(model(ids, attention_mask=mask, position_ids=positions).logits, plain.logits)
    first = model(ids[:, :5], attention_mask=mask[:, :5], position_ids=positions[:, :5])
    more = {"attention_mask": mask, "past_key_values": first.past_key_values}
    assert_near(model(ids[:, 5:], position_ids=positions[:, 5:], **more).logits, plain.logits[:, 5:])
    cache = model(ids[:, :5]).past_key_values
    again = torch.arange(6).expand(2, -1)
    assert_near(model(ids[:, 5:], past_key_values=cache, position_ids=again).logits, model(ids[:, 5:]).logits)


def test_generation_is_the_same_with_positions(make) -> None:
    model, ids = make(), IDS[:1]
    options = {"max_new_tokens": 5, "do_sample": False}
    seen = []
    model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs.get("position_ids")), with_kwargs=True)
    plain = model.generate(ids, **options)
    assert seen and all(positions is None for positions in seen)
    assert torch.equal(model.generate(ids, position_ids=torch.arange(11)[None], **options), plain)


def test_what_is_not_known_is_refused_by_name(make) -> None:
    model, ids = make(), IDS[:1]
    names = ("cu_seqlens", "seq_idx", "document_ids", "segment_ids", "packed_sequence_lengths", "block_mask")
    for name in (*names, "attention_masks", "past_key_value"):
        for net in (model, model.model):
            with pytest.raises(ValueError, match=f"{name!r}: leave it out"):
                net(ids, **{name: torch.tensor([0, 4, 11])})
    model(ids, labels=ids, num_items_in_batch=10, output_attentions=False, cache_position=torch.arange(11))
    model(ids, what_the_next_version_passes=True, mm_token_type_ids=torch.zeros(1, 11))  # passed over
    for wrong, message in (
        ({"cu_seq_lens_q": torch.tensor([0, 4, 10])}, "cu_seq_lens_q of shape .* does not cut"),
        ({"position_ids": torch.arange(10)[None]}, r"position_ids has shape \[1, 10\] but the tokens are"),
        ({"position_ids": [[0] * 11]}, r"position_ids must be a tensor \[batch, time\], got a list"),
        ({"cu_seq_lens_q": [0, 4, 11]}, r"cu_seq_lens_q must be a tensor \[documents \+ 1\], got a list"),
        ({"cu_seq_lens_q": torch.tensor([0, 11]), "past_key_values": model(ids).past_key_values}, "not tell whether"),
    ):
        with pytest.raises(ValueError, match=message):
            model(ids, **wrong)
    none = ids[:, :0]
    assert model(none, position_ids=none).logits.shape[:2] == (1, 0)


def test_a_prompt_of_several_documents(make) -> None:
    """What marks documents in a prompt is of the prompt, and not of what is written after it."""
    model, ids = make(), IDS
    starts = torch.zeros_like(ids)
    starts[:, 4] = 1
    for options in ({}, {"num_beams": 2}):
        options = {"max_new_tokens": 4, "do_sample": False, **options}
        expected = model.generate(ids[:, 4:], **options)[:, ids.shape[1] - 4 :]
        assert torch.equal(model.generate(ids, document_starts=starts, **options)[:, ids.shape[1] :], expected)
    with pytest.raises(ValueError, match=r"use_cache=False reads the prompt again .* document_starts out"):
        model.generate(ids, document_starts=starts, use_cache=False, max_new_tokens=2)


def test_marks_at_padding_are_those_of_the_next_token(make) -> None:
    """Padding has no document: a position or a piece of its own begins none, and cuts none in two. What is marked there
    begins with the next token, also of a later call."""
    model, ids = make().double(), IDS[:1]
    real = torch.tensor([[1] * 8 + [0] * 3])
    goes_on = model(IDS[:1, :3], past_key_values=model(ids[:, :8], use_cache=True).past_key_values).logits
    for marks, expected in (
        ({"position_ids": torch.tensor([[*range(8), 0, 0, 0]])}, goes_on),
        ({"cu_seq_lens_q": torch.tensor([0, 8, 11])}, goes_on),
        ({"document_starts": torch.tensor([[1] + [0] * 8 + [1, 0]])}, model(IDS[:1, :3]).logits),
    ):
        cache = model(ids, attention_mask=real, use_cache=True, **marks).past_key_values
        assert_near(model(IDS[:1, :3], past_key_values=cache).logits, expected)
    real = torch.tensor([[1] * 4 + [0] * 4 + [1] * 3])
    alone = model(torch.cat([ids[:, :4], ids[:, 8:]], 1)).logits[:, 4:]
    positions = torch.tensor([[0, 1, 2, 3, 0, 0, 0, 0, 4, 5, 6]])
    assert_near(model(ids, attention_mask=real, position_ids=positions).logits[:, 8:], alone)
    begins = model(ids[:, 8:]).logits
    starts = torch.tensor([[0] * 5 + [1] + [0] * 5])  # at padding: the next token begins a document
    assert_near(model(ids, attention_mask=real, document_starts=starts).logits[:, 8:], begins)


def test_a_prompt_that_is_marked_is_read_whole(make, monkeypatch) -> None:
    model, ids = make(), IDS[:1]
    starts = torch.zeros_like(ids)
    starts[:, 5] = 1
    expected = model.generate(ids, document_starts=starts, max_new_tokens=2, do_sample=False)
    monkeypatch.setattr("atlas_memory.models.generation.PREFILL", 6)
    assert torch.equal(model.generate(ids, document_starts=starts, max_new_tokens=2, do_sample=False), expected)
    cut = model.generate(ids, document_starts=starts, max_new_tokens=2, do_sample=False, prefill_chunk_size=7)
    assert torch.equal(cut, expected)


def test_arguments_that_do_not_go_together(make) -> None:
    model, ids = make(), IDS
    for wrong, message in (
        ({"labels": ids, "logits_to_keep": 1}, "labels need the logits of all tokens"),
        ({"attention_mask": torch.full(ids.shape, -1e9)}, "attention_mask has negative numbers or NaN"),
        ({"attention_mask": ids.tolist()}, r"attention_mask must be a tensor \[batch, time\], got a list"),
        ({"document_starts": ids.tolist()}, r"document_starts must be a tensor \[batch, time\], got a list"),
    ):
        with pytest.raises(ValueError, match=message):
            model(ids, **wrong)
    with pytest.raises(ValueError, match="continuous batching"):
        model.init_continuous_batching()


def test_a_cache_that_a_failed_call_has_left_is_refused(make, monkeypatch) -> None:
    model, ids = make(), IDS
    cache = model(ids[:, :5]).past_key_values
    before = copy.deepcopy(cache)

    def fail(*args, **kwargs):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(model.model.layers[1], "forward", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            model(ids[:, 5:], past_key_values=cache)
    with pytest.raises(ValueError, match=r"a call that failed: its layers have read \[5, 11\] tokens"):
        model(ids[:, 5:], past_key_values=cache)
    cache.reset()
    assert torch.equal(model(ids, past_key_values=cache).logits, model(ids).logits)
    assert model(ids[:, 5:], past_key_values=before).past_key_values.get_seq_length() == 11


def test_a_trainer_keeps_the_columns_that_mark_documents() -> None:
    taken = inspect.signature(AtlasForCausalLM.forward).parameters
    assert {"document_starts", "position_ids", "cu_seq_lens_q"} <= set(taken)
