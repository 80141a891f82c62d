"""Studies of texts: models that are trained on suites, and on language."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from atlas_memory.bench.language_training import sized_model
from atlas_memory.bench.suite_training import strict_share, suite_task, suite_tokenizer
from atlas_memory.bench.task import IGNORED
from atlas_memory.bench.task_training import accuracy, share_of_rows, task_model, train_on
from atlas_memory.cli import main
from atlas_memory.data import byte_tokenizer
from atlas_memory.eval.suites import SUITES
from atlas_memory.eval.suites.evaluation import answers
from atlas_memory.eval.suites.suite import Item, Sources, Suite
from tests.test_cli import refused

TRAIN = "1 Mary moved to the garden.\n2 Where is Mary?\tgarden\t1\n"
TEST = "1 John went to the office.\n2 Where is John?\toffice\t1\n"
BOOK = " ".join(f"It was {n} days since anybody in the town had seen the old boat." for n in range(300))


@pytest.fixture
def babi(tmp_path: Path) -> Path:
    for split, story in (("train", TRAIN), ("test", TEST)):
        (tmp_path / f"qa1_one_{split}.txt").write_text(story * 50)
    return tmp_path


def test_the_answer_is_asked_and_its_end() -> None:
    """Nothing else is; what is read before it is the prompt of the suite."""
    suite = SUITES["s-niah-1"]
    tokenizer = suite_tokenizer(suite, 200, 1000, Sources())
    ids, labels = suite_task(suite, tokenizer, 200, Sources()).rows(6, 0, asked=True)
    assert ids.shape == (6, 200)
    for row, wanted in zip(ids, labels, strict=True):
        at = (wanted != IGNORED).nonzero().flatten()
        said = tokenizer.decode(wanted[at[:-1]])
        assert wanted[at[-1]] == tokenizer.eos_token_id == row[0]
        assert torch.equal(row[at[1:]], wanted[at[:-1]])
        prompt = tokenizer.decode(row[1 : at[0] + 1])
        assert prompt.endswith("mentioned in the provided text is") and f"is:{said}." in prompt
        assert said[0] == " " and int(said) >= 1_000_000 and len(at) == 9  # a space, seven digits, the end
    again = suite_task(suite, tokenizer, 200, Sources()).rows(6, 0, asked=False)[0]
    assert not torch.equal(ids, again)


def test_questions_of_the_test_are_not_trained_on(babi: Path) -> None:
    make, out = SUITES["babilong-qa1"].make, babi / "x.jsonl"
    for split, name in (("train", "Mary"), ("test", "John")):
        (item,) = make(len, 400, 1, random.Random(0), Sources(BOOK, babi, split))
        assert name in item.context and name in item.question
    assert len(list(make(len, 400, 7, random.Random(0), Sources(BOOK, babi, "train")))) == 7  # again and again
    (babi / "book.txt").write_text(BOOK)
    sizes = ["--count", "2", "--length", "400", "--haystack", str(babi / "book.txt"), "--out", str(out)]
    assert main(["data", "suite", "babilong-qa1", "--babi", str(babi), *sizes]) == 0
    assert all("Mary" in json.loads(line)["text"] for line in out.read_text().splitlines())


def test_an_answer_counts_as_a_whole() -> None:
    """As a suite counts what the model writes, the likeliest token each time."""

    def make(size, length, count, drawn, sources):
        for n in range(count):
            letters = "".join(drawn.choice("abcd") for _ in range(2))
            yield Item(str(n), letters * 3, ":", (letters,))

    suite = Suite("echo", "here", make, {}, max_new_tokens=4)
    tokenizer, task = byte_tokenizer(), suite_task(suite, byte_tokenizer(), 16, Sources())
    torch.manual_seed(0)
    model = task_model("gated-deltanet", 258, 32, 16)
    model.generation_config.eos_token_id = 256
    train_on(model, [task], 8, 512, 1e-2, 0)
    drawn = np.random.default_rng([5, 1]).integers(2**32)
    items = list(make(len, 12, 64, random.Random(int(drawn)), None))
    wrote = answers(model, tokenizer, items, 4)
    right = sum(said == f" {item.answers[0]}" for item, said in zip(items, wrote, strict=True)) / 64
    assert 0.05 < right < 0.95 and share_of_rows(model, task, 64, 5) == right < accuracy(model, task, 64, 5)
    assert strict_share(model, tokenizer, items, 4) == right  # the memory holds all of the text
    window = task_model("swa", 258, 32, 16, window=16)
    train_on(window, [task], 8, 512, 1e-2, 0)
    assert strict_share(window, tokenizer, items, 4) < 0.2


@pytest.mark.parametrize("name", ["attention", "swa", "titans", "mag:titans", "hope"])
def test_models_of_equal_size(name: str) -> None:
    settings = {"width": 64, "layers": 2, "length": 128}
    one, other = (sized_model(kind, 512, settings) for kind in (name, "attention"))
    assert abs(one.num_parameters() / other.num_parameters() - 1) < 0.02
    assert one.config.attention_window in (None, 128)


def test_language(tmp_path: Path, capsys) -> None:
    """The columns end at the training length and its doubles, and bits are those of a model that has learned."""
    (tmp_path / "book.txt").write_text(BOOK)
    out = tmp_path / "language.json"
    command = ["bench", "language", "--text", str(tmp_path / "book.txt"), "--models", "swa,gated-deltanet"]
    sizes = ["--width", "32", "--layers", "1", "--length", "64", "--steps", "30", "--learning-rates", "0.01"]
    assert main([*command, *sizes, "--workers", "1", "--out", str(out)]) == 0
    runs = json.loads(out.read_text())["runs"]
    for run in runs:
        assert list(run["numbers"]) == ["to 64", "to 128", "to 256", "to 512", "to 535", "parameters", "tokens/s"]
        assert 0 < run["numbers"]["to 512"] < 2 and run["numbers"]["tokens/s"] > 0
    capsys.readouterr()
    more = ["--models", "swa", "--length", "600", "--workers", "1", "--out", str(tmp_path / "long.json")]
    assert main([*command, *sizes, *more]) == 1 and "535 tokens held out in a piece" in capsys.readouterr().err
    (tmp_path / "book.txt").write_text(BOOK[:-1])
    code, said = refused(capsys, *command, *sizes, "--out", out)
    assert code == 1 and "is a result with data " in said


def test_a_suite(babi: Path, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(BOOK)
    out = tmp_path / "suite.json"
    command = ["bench", "suite", "babilong-qa1", "--babi", str(babi), "--haystack", str(tmp_path / "book.txt")]
    sizes = ["--trained", "64,96", "--lengths", "64,200", "--width", "32", "--steps", "2", "--models", "swa+conv"]
    more = ["--strict", "--seeds", "0", "--workers", "1", "--out", str(out)]
    assert main([*command, *sizes, *more]) == 0
    (run,) = json.loads(out.read_text())["runs"]
    shares = ["64 tokens", "200 tokens", "64 tokens, strict", "200 tokens, strict"]
    assert list(run["numbers"]) == [*shares, "parameters"]


def test_stories_that_are_too_long_are_left_out(babi: Path) -> None:
    (babi / "qa1_one_train.txt").write_text(f"1 {'Mary went on. ' * 99}\n2 Where?\tgarden\n{TRAIN}")
    suite, tokenizer = SUITES["babilong-qa1"], byte_tokenizer()
    sources = Sources(BOOK, babi, "train")
    ids, _ = suite_task(suite, tokenizer, 120, sources).rows(9, 0, asked=False)
    assert all("moved to the garden" in tokenizer.decode(row) for row in ids)
    with pytest.raises(ValueError, match="fits into 40 tokens: its facts alone take more"):
        suite_task(suite, tokenizer, 40, sources).rows(1, 0, asked=False)


def test_mistakes(tmp_path: Path, capsys) -> None:
    for message, *command in (
        ("did you mean s-niah-1", "suite", "s-niah1"),
        ("needs", "suite", "s-niah-1", "--trained", "60"),
        ("--haystack FILE", "suite", "s-niah-2"),
        ("--babi FOLDER", "suite", "babilong-qa1", "--haystack", __file__),
        ("heads of 32 do not divide", "suite", "passkey", "--width", "48"),
        ("did you mean titans", "language", "--models", "titan"),
        ("does not exist", "language", "--text", str(tmp_path / "none")),
    ):
        code, said = refused(capsys, "bench", *command, "--out", tmp_path / "x.json")
        assert code in (1, 2) and message in said, said
