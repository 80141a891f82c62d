"""`generate` with a memory as its cache, against reading everything again at each token."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StoppingCriteria

from atlas_memory.data import byte_tokenizer
from atlas_memory.models import AtlasCache, AtlasForCausalLM

Make = Callable[..., AtlasForCausalLM]
# Never stop early: then lengths are known and every step is compared.
LONG: dict[str, Any] = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False}
SHORT: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}


def prompt(batch: int = 2, time: int = 7, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 29, (batch, time), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def is_greedy(model: AtlasForCausalLM, written: torch.Tensor, ids: torch.Tensor, steps: int = 7) -> bool:
    """Whether ``ids`` are gone on from by so many tokens, each the likeliest after those before it but for the end
    token: by one pass over all without a cache, in which no token sees those after it (test_modeling.py)."""
    start = ids.shape[1]
    logits = model(written[:, :-1], use_cache=False).logits[:, start - 1 :]
    logits[..., model.config.eos_token_id] = -torch.inf
    assert written.shape[1] == start + steps and torch.equal(written[:, :start], ids)
    return torch.equal(logits.argmax(-1), written[:, start:])


def test_greedy_with_cache_equals_without(model: AtlasForCausalLM) -> None:
    """Also in the logits of each step."""
    ids = prompt()
    out = model.generate(ids, output_logits=True, return_dict_in_generate=True, **LONG)
    assert is_greedy(model, out.sequences, ids)
    with torch.no_grad():
        logits = model(out.sequences[:, :-1]).logits[:, ids.shape[1] - 1 :]
    torch.testing.assert_close(torch.stack(out.logits, 1), logits, rtol=0, atol=1e-4)
    assert torch.equal(out.sequences[:, :-3], model.generate(ids, use_cache=False, **SHORT))


@pytest.mark.parametrize("rule", ["titans", "deltanet", "omeganet", "atlas++"])
def test_greedy_with_cache_equals_without_for_rules(make: Make, rule: str) -> None:
    model = make(rule=rule)
    ids = prompt(1, 5)
    assert is_greedy(model, model.generate(ids, **LONG), ids)


def test_left_padded_batch_equals_rows_alone(model: AtlasForCausalLM) -> None:
    ids = prompt(3, 8)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 3, 6)):
        ids[row, :padding], mask[row, :padding] = model.config.pad_token_id, 0
    together = model.generate(ids, attention_mask=mask, **SHORT)
    for row, padding in enumerate((0, 3, 6)):
        alone = model.generate(ids[row : row + 1, padding:], **SHORT)
        assert torch.equal(together[row, 8:], alone[0, 8 - padding :])
    # A padded batch of one row must not skip its mask.
    alone = model.generate(ids[2:], attention_mask=mask[2:], **SHORT)
    assert torch.equal(alone[0, 8:], together[2, 8:])


def test_beam_search_with_cache_equals_without(model: AtlasForCausalLM) -> None:
    beams = dict(SHORT, num_beams=3, num_return_sequences=2)
    assert torch.equal(model.generate(prompt(), **beams), model.generate(prompt(), use_cache=False, **beams))


def test_sampling_repeats_with_its_seed_and_returns_several(model: AtlasForCausalLM) -> None:
    outputs = []
    for use_cache in (True, True, False):
        torch.manual_seed(3)
        outputs.append(
            model.generate(
                prompt(),
                do_sample=True,
                num_return_sequences=3,
                max_new_tokens=5,
                min_new_tokens=5,
                use_cache=use_cache,
            )
        )
    assert outputs[0].shape == (6, 12)
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    assert len({tuple(row.tolist()) for row in outputs[0][:3]}) > 1, "samples of one prompt differ"


def test_chunked_prefill(model: AtlasForCausalLM) -> None:
    ids = prompt(2, 11)
    assert torch.equal(model.generate(ids, prefill_chunk_size=4, **SHORT), model.generate(ids, **SHORT))


def test_nothing_to_begin_with(make: Make) -> None:
    model = make(rule="titans")
    for nothing in ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, {"inputs_embeds": torch.zeros(1, 0, 16)}):
        with pytest.raises(ValueError, match="generate was given no token to begin with"):
            model.generate(**nothing, max_new_tokens=2)


def test_long_prompts_are_read_in_pieces(model: AtlasForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also padded ones, in beams, and where a cache has read their beginning."""
    ids, mask, lengths = prompt(time=23), torch.ones(2, 23, dtype=torch.long), []
    padded = mask.clone()
    padded[1, :9] = 0

    def written() -> list[torch.Tensor]:
        cache = AtlasCache(model.config.num_hidden_layers)
        model(input_ids=ids[:, :5], past_key_values=cache)
        lengths.clear()
        return [
            model.generate(ids, attention_mask=padded, **SHORT),
            model.generate(ids, attention_mask=mask, num_beams=3, **SHORT),
            model.generate(ids, attention_mask=mask, past_key_values=cache, **SHORT),
        ]

    whole = written()
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    monkeypatch.setattr("atlas_memory.models.generation.PREFILL", 6)
    assert all(torch.equal(a, b) for a, b in zip(written(), whole, strict=True))
    assert max(lengths) == 6 and sum(lengths) == 23 + 23 + 18 + 3 * 3


def test_a_conversation_continues_from_its_cache(model: AtlasForCausalLM) -> None:
    out = model.generate(prompt(), return_dict_in_generate=True, **LONG)
    second = torch.cat([out.sequences, prompt(2, 4)], 1)
    # Without a mask, generate would take a pad token that the model happened to write for padding.
    real = torch.ones_like(second)
    continued = model.generate(second, attention_mask=real, past_key_values=out.past_key_values, **LONG)
    assert is_greedy(model, continued, second)


@pytest.mark.parametrize("block", ["lmm", "mac", "attention"])
def test_rows_that_have_ended_read_no_padding(make: Make, block: str) -> None:
    model = make(block)
    n = model.config.num_hidden_layers
    for seed in range(1, 20):  # until one row goes on when the other has ended; no prompt has a 30
        ids, cache = prompt(seed=seed), AtlasCache(n)
        end = int(model.generate(ids, max_new_tokens=1, do_sample=False)[0, -1])
        text = model.generate(
            ids, past_key_values=cache, max_new_tokens=6, do_sample=False, eos_token_id=end, pad_token_id=30
        )
        if text.shape[1] > ids.shape[1] + 2:
            break
    assert text.shape[1] > ids.shape[1] + 2, "both rows ended at once"
    mask = torch.ones_like(text)
    mask[0, ids.shape[1] + 1 :] = 0  # behind its end
    more = torch.cat([text, prompt(2, 3)], 1)
    mask = torch.nn.functional.pad(mask, (0, 3), value=1)
    new = more[:, cache.get_seq_length() :]
    after = model(new, attention_mask=mask, past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(after, model(more, attention_mask=mask).logits[:, -1], rtol=1e-4, atol=1e-5)


class _FirstRowIsDone(StoppingCriteria):
    """The first row has ended when it has nine tokens, by its text; the others go on."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor([input_ids.shape[1] >= 9] + [False] * (len(input_ids) - 1))


def test_rows_that_have_ended_without_an_end_token_are_written_on(make: Make) -> None:
    """As transformers has it, which pads behind them only where a criterion knows an end-of-text token; the cache has
    then read what was written."""
    model = make("lmm", "titans", eos_token_id=None, pad_token_id=None)  # any token may be written
    done: dict[str, Any] = {"stopping_criteria": [_FirstRowIsDone()], "max_new_tokens": 7, "do_sample": False}
    out = model.generate(prompt(), return_dict_in_generate=True, **done)
    assert torch.equal(out.sequences, model.generate(prompt(), use_cache=False, **done))
    text = torch.cat([out.sequences, prompt(2, 3)], 1)
    on = model.generate(text, past_key_values=out.past_key_values, max_new_tokens=4, do_sample=False)
    assert torch.equal(on, model.generate(text, max_new_tokens=4, do_sample=False))


@pytest.mark.parametrize("block", ["lmm", "mac", "attention"])
def test_a_cache_of_beams_is_refused(make: Make, block: str) -> None:
    model = make(block)
    cache = AtlasCache(model.config.num_hidden_layers)
    text = model.generate(prompt(1), past_key_values=cache, max_new_tokens=3, num_beams=2, do_sample=False)
    for use in (
        lambda: model.generate(torch.cat([text, prompt(1)], 1), past_key_values=cache, max_new_tokens=1),
        lambda: model(prompt(1), past_key_values=cache),
    ):
        with pytest.raises(ValueError, match="left by beam search"):
            use()
    cache.reset()
    model(prompt(1), past_key_values=cache)


@pytest.mark.parametrize("block", ["lmm", "mac", "attention"])
def test_embeddings_beside_a_cache(make: Make, block: str) -> None:
    model = make(block)
    new, n = prompt(1, 3) + 1, 7
    embedded = model.get_input_embeddings()(new)
    options = {"max_new_tokens": 3, "do_sample": False}
    expected = model.generate(torch.cat([prompt(1), new], 1), **options)[:, n + 3 :]
    cache = model(prompt(1), use_cache=True).past_key_values
    given = {"past_key_values": cache, "attention_mask": torch.ones(1, n + 3)}
    assert torch.equal(model.generate(inputs_embeds=embedded, **given, **options), expected)
    alone = model.generate(inputs_embeds=embedded, past_key_values=_copy(model, prompt(1)), **options)
    assert torch.equal(alone, expected), "fewer than were read are new"
    with pytest.raises(ValueError, match="the 3 embeddings given to generate are as many as past_key_values has read"):
        model.generate(inputs_embeds=embedded, past_key_values=_copy(model, new), **options)


def test_ids_that_do_not_say_what_is_new_are_refused(model: AtlasForCausalLM) -> None:
    """As many ids as were read; with a longer mask they are new."""
    read, other = prompt(2, 7), prompt(2, 11)
    with pytest.raises(ValueError, match=r"7 ids given to generate are as many as .* an attention_mask of 7 \+ 7 ent"):
        model.generate(read, past_key_values=_copy(model, read), **SHORT)
    for new in (other, read):
        both = torch.cat([read, new], 1)
        mask = torch.ones_like(both)
        continued = model.generate(new, attention_mask=mask, past_key_values=_copy(model, read), **SHORT)
        assert torch.equal(continued, model.generate(both, attention_mask=mask, **SHORT)[:, 7:])


def test_one_cache_for_several_texts(model: AtlasForCausalLM) -> None:
    """Beams and samples of one prompt go on from its one row; without use_cache a state is read and left as it was."""
    read, new = prompt(1, 11), prompt(1, 4)
    for several in ({"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}):
        alone = model.generate(new, past_key_values=_copy(model, read), **several, **SHORT)
        both = model.generate(torch.cat([read, new], 1), **several, **SHORT)
        assert torch.equal(alone, both[:, 11:])
    cache = _copy(model, read)
    once = model(new, past_key_values=cache, use_cache=False)
    again = model(new, past_key_values=cache, use_cache=True)
    assert once.past_key_values is None and torch.equal(once.logits, again.logits)
    assert cache.get_seq_length() == 15
    with pytest.raises(ValueError, match=r"use_cache=False reads everything again .* leave one out"):
        model.generate(new, past_key_values=cache, use_cache=False, **SHORT)


@pytest.mark.parametrize("ids", [torch.tensor([3, 4]), [[3, 4]], torch.tensor([[3.0]]), torch.tensor([[3, 31]])])
def test_ids_that_are_none_are_refused(make: Make, ids: Any) -> None:
    model = make(rule="gated-deltanet")
    for given in ({"inputs": ids}, {"input_ids": ids}):
        with pytest.raises(ValueError, match="the ids given to generate must be "):
            model.generate(max_new_tokens=1, **given)


def test_a_cache_in_a_file(make: Make, tmp_path: Path) -> None:
    """It is read without running any code of the file, and goes on as the one that was written."""
    model, new = make(rule="titans"), prompt(1, 4)
    cache = _copy(model, prompt(1, 20))
    torch.save(cache, tmp_path / "read.pt")
    again = torch.load(tmp_path / "read.pt", weights_only=True)
    expected = model.generate(new, past_key_values=cache, **SHORT)
    assert torch.equal(model.generate(new, past_key_values=again, **SHORT), expected)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda cache: setattr(cache.layers[1], "seen", -1), "layer 1 of the cache has seen=-1, which counts tokens"),
        (lambda cache: setattr(cache.layers[1], "seen", True), "layer 1 of the cache has seen=True, which counts"),
        (lambda cache: setattr(cache.layers[1], "seen", 2**70), "layer 1 of the cache has seen=1180591620717411303424"),
        (lambda cache: setattr(cache.layers[0], "state", [1]), r"layer 0 of the cache has no state, but \[1\]"),
        (lambda cache: cache.layers[0].state.past.fill_(torch.nan), "layer 0 of the cache has numbers in past that"),
        (lambda cache: cache.layers[0].state.memory.seen.fill_(-3), r"has memory.seen=-3, and it counts tokens"),
        (lambda cache: setattr(cache, "layers", [1]), "past_key_values is a AtlasCache, but an Atlas model keeps"),
    ],
)
def test_a_cache_in_a_file_that_is_none(make: Make, tmp_path: Path, change: Any, says: str) -> None:
    cache = _copy(make(rule="titans"), prompt(1, 5))
    with torch.inference_mode():
        change(cache)
    torch.save(cache, tmp_path / "read.pt")
    with pytest.raises(ValueError, match=says):
        torch.load(tmp_path / "read.pt", weights_only=True)


def test_stop_strings(model: AtlasForCausalLM) -> None:
    tokenizer = byte_tokenizer()
    ids = prompt(1)
    new = model.generate(ids, **LONG)[0, 7:].tolist()
    stopped = model.generate(ids, stop_strings=[tokenizer.decode(new[3])], tokenizer=tokenizer, **LONG)
    assert stopped[0, 7:].tolist() == new[: new.index(new[3]) + 1]


@pytest.mark.parametrize("masked", [False, True])
def test_new_ids_alone_after_a_long_read(model: AtlasForCausalLM, masked: bool) -> None:
    """Neither what was read nor a mask of its length is needed again; a mask of the new ids may have padding."""
    first, second = prompt(2, 11), prompt(2, 5)
    real = torch.ones_like(second)
    if masked:
        real[0, :2] = 0
    mask = torch.cat([torch.ones_like(first), real], 1)
    both = model.generate(torch.cat([first, second], 1), attention_mask=mask, **SHORT)
    cache = _copy(model, first)
    alone = model.generate(second, past_key_values=cache, **({"attention_mask": real} if masked else {}), **SHORT)
    assert torch.equal(alone, both[:, 11:])


def test_a_cache_of_the_users_is_filled_and_can_be_reset(model: AtlasForCausalLM) -> None:
    cache = AtlasCache(model.config.num_hidden_layers)
    first = model.generate(prompt(), past_key_values=cache, **SHORT)
    assert cache.get_seq_length() == first.shape[1] - 1
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(model.generate(prompt(), past_key_values=cache, **SHORT), first)


def test_cache_rows_can_be_repeated_and_selected(model: AtlasForCausalLM) -> None:
    cache = model(prompt(), use_cache=True).past_key_values
    following = prompt(2, 3)
    expected = model(following, past_key_values=_copy(model, prompt())).logits
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([2, 1]))
    swapped = model(following[[1, 0]], past_key_values=cache).logits
    torch.testing.assert_close(swapped, expected[[1, 0]], rtol=0, atol=1e-5)


@torch.no_grad()
def _copy(model: AtlasForCausalLM, ids: torch.Tensor) -> AtlasCache:
    return model(ids, use_cache=True).past_key_values


def test_generation_from_embeddings(model: AtlasForCausalLM) -> None:
    ids = prompt()
    new = model.generate(inputs_embeds=model.get_input_embeddings()(ids), **SHORT)
    assert torch.equal(new[:, -4:], model.generate(ids, **SHORT)[:, -4:])


def test_what_a_memory_cannot_do_is_refused(model: AtlasForCausalLM) -> None:
    with pytest.raises(ValueError, match=r"[Aa]ssisted|stateful"):
        model.generate(prompt(1), assistant_model=model, **SHORT)
    with pytest.raises(ValueError, match="cache_implementation='static'"):
        model.generate(prompt(), cache_implementation="static", **SHORT)
    with pytest.raises(ValueError, match="cropping an Atlas cache is impossible"):
        _copy(model, prompt()).crop(2)


def test_a_cache_for_keys_and_values_is_refused(model: AtlasForCausalLM) -> None:
    for cache in (DynamicCache(), DynamicCache(config=model.config)):
        with pytest.raises(ValueError, match="an Atlas model keeps states of its own"):
            model(prompt(), past_key_values=cache)
    with pytest.raises(ValueError, match="has 5 layers but the model has 2"):
        model(prompt(), past_key_values=AtlasCache(5))
