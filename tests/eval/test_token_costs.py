"""A text token by token: what it costs, what is saved, and what is read again."""

import math
from functools import cache

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Metaspace as Decoder
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Metaspace
from transformers import PreTrainedTokenizerFast

from atlas_memory.data import byte_tokenizer
from atlas_memory.data.tokenization import encode
from atlas_memory.eval.token_costs import TokenCosts, find_repeats, token_costs, token_texts
from atlas_memory.models import AtlasConfig, AtlasForCausalLM
from atlas_memory.viz.token_page import token_page

BYTES = byte_tokenizer()


def test_passages_that_stand_a_second_time_are_found() -> None:
    text = np.random.default_rng(0).integers(0, 200, 90)
    ids = np.concatenate([text, [250, 251], text[20:60], [252], text[:10]])
    found = find_repeats(ids, shortest=16)
    assert found[92:132].tolist() == list(range(20, 60))
    assert (found[:92] == -1).all() and (found[132:] == -1).all()  # ten tokens are too few
    assert (find_repeats(np.zeros(20, dtype=int), shortest=16) == -1).all()  # would overlap with itself
    assert find_repeats(text[:5]).tolist() == [-1] * 5


@pytest.mark.parametrize("length", [5, 31, 60, 61])
def test_figures_are_those_of_the_model(length: int) -> None:
    torch.manual_seed(0)
    config = AtlasConfig.preset("nano", hidden_size=16, num_attention_heads=2, rule="titans")
    model = AtlasForCausalLM(config).eval()
    ids = np.random.default_rng(1).integers(0, 256, length)
    found = token_costs(model, BYTES, ids, recent=20)
    assert found.saved is not None and found.older is not None

    @cache
    @torch.no_grad()
    def logits(start: int) -> torch.Tensor:
        """Of all tokens from one on, each read without those after it: tests/models hold the model to that bitwise."""
        return model(input_ids=torch.from_numpy(ids[start:])[None]).logits[0]

    def bits(start: int, t: int) -> float:
        return -float(logits(start)[t - 1 - start].log_softmax(-1)[ids[t]]) / math.log(2)

    assert math.isnan(found.cost[0]) and math.isnan(found.older[0])
    for t in range(1, length):
        assert found.cost[t] == pytest.approx(bits(0, t), abs=1e-4)
        begin = max(0, (t - 1) // 10 * 10 - 10)
        assert found.older[t] == pytest.approx(bits(begin, t) - bits(0, t), abs=2e-4)


def test_what_is_read_again_is_counted() -> None:
    cost = np.array([np.nan, 4.0, 4.0, 2.0, 1.0])
    found = TokenCosts(list("abcbc"), cost, None, None, None, np.array([-1, -1, -1, 1, 2]))
    assert found.of_repeats() == (2, 4.0, 1.5)
    page = token_page("a < b", found)
    assert "2 tokens in passages" in page and "a &lt; b" in page and page.count('class="c1 again"') == 1
    assert "8 bits per token" in page and "tap it" in page and 'class="about"' not in page
    assert "run &amp; rule" in token_page("a", found, about="run & rule")
    assert TokenCosts(list("ab"), cost[:2], None, None, None, np.array([-1, -1])).of_repeats() is None


def test_a_character_of_several_tokens_stands_with_the_last() -> None:
    assert token_texts(BYTES, encode(BYTES, "aé€").tolist()) == ["a", "", "é", "", "", "€"]


def test_spaces_stay_where_a_tokenizer_has_them_before_words() -> None:
    """Such a tokenizer leaves out the space before the first token that it is given to decode."""
    words = Tokenizer(WordLevel({"\u2581one": 0, "\u2581two": 1, "\u2581three": 2}))
    words.pre_tokenizer, words.decoder = Metaspace(), Decoder()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    ids = tokenizer("one two three two" + " one" * 20)["input_ids"]
    assert "".join(token_texts(tokenizer, ids)) == "one two three two" + " one" * 20
