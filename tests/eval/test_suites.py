"""Suites of long context: their items, their scores, and models that take them."""

import json
import random
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from atlas_memory.cli import main
from atlas_memory.data import Document, byte_tokenizer
from atlas_memory.eval import bits_per_byte
from atlas_memory.eval.suites import SUITES
from atlas_memory.eval.suites.babilong import official, stories, substring
from atlas_memory.eval.suites.evaluation import answers, check_causal, evaluate_suite
from atlas_memory.eval.suites.harness import evaluate_harness
from atlas_memory.eval.suites.language import evaluate_language
from atlas_memory.eval.suites.suite import Item, Sources, cached_items
from atlas_memory.models import AtlasConfig, AtlasForCausalLM
from tests.test_cli import refused

TOKENIZER = byte_tokenizer()
STORY = """1 Mary moved to the bathroom.
2 John went to the hallway.
3 Where is Mary? \tbathroom\t1
4 Mary travelled to the office.
5 Where is Mary? \toffice\t4
1 Bill went to the kitchen.
2 Where is Bill? \tkitchen\t1
"""
GIFTS = """1 Fred gave the football to Jeff.
2 Bill went to the kitchen.
3 Who gave the football? \tFred\t1
4 Bill gave the milk to Mary.
5 Who received the milk? \tMary\t4
6 What did Bill give to Mary? \tmilk\t4
"""
BOOK = " ".join(f"It was {n} days since anybody in the town had seen the old boat. Yes! " for n in range(300))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch) -> None:
    """Items are kept there."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    for task in range(1, 6):
        (tmp_path / f"qa{task}_a-task_test.txt").write_text(GIFTS if task == 5 else STORY)
    return Sources(BOOK, tmp_path)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    special = {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 257}
    return LlamaForCausalLM(LlamaConfig(vocab_size=258, max_position_embeddings=2048, **sizes, **special)).eval()


def atlas(**changes: object) -> AtlasForCausalLM:
    torch.manual_seed(0)
    special = {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 257}
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    return AtlasForCausalLM(AtlasConfig.preset("nano", vocab_size=258, **sizes, **special, **changes)).eval()


@pytest.mark.parametrize("name", SUITES)
def test_items(name: str, sources: Sources) -> None:
    """They fit into their length and use it, hold their answers once, and another seed draws others."""
    suite = SUITES[name]
    items = suite.items(TOKENIZER, 1024, 3, 0, sources)
    assert len(items) == 3 and items == suite.items(TOKENIZER, 1024, 3, 0, sources)
    assert items != suite.items(TOKENIZER, 1024, 3, 1, sources)
    for item in items:
        size = len((item.context + item.question).encode()) + suite.max_new_tokens
        assert 1024 - 150 < size <= 1024
        (answer,) = item.answers
        assert answer in item.context.lower() and answer not in item.question.lower()
        assert all(score(item, f" {answer}.") == 1 for score in suite.scores.values())
        assert not any(score(item, " nothing") for score in suite.scores.values())


def test_the_needle_stands_anywhere(sources: Sources) -> None:
    items = SUITES["s-niah-1"].items(TOKENIZER, 4096, 60, 0, sources)
    depths = [item.context.index(item.answers[0]) / len(item.context) for item in items]
    assert min(depths) < 0.15 and max(depths) > 0.9 and 0.4 < sum(depths) / 60 < 0.65


def test_a_story_has_its_facts_so_far(sources: Sources, tmp_path: Path) -> None:
    found = list(stories(tmp_path / "qa1_a-task_test.txt"))
    assert [len(facts) for facts, _, _ in found] == [2, 3, 1]
    assert found[1] == (
        ["Mary moved to the bathroom.", "John went to the hallway.", "Mary travelled to the office."],
        "Where is Mary?",
        "office",
    )
    context = SUITES["babilong-qa1"].items(TOKENIZER, 2048, 3, 0, sources)[0].context
    places = [context.index(fact) for fact in found[0][0] if fact in context]
    assert places == sorted(places)


def test_the_two_scores_of_babilong() -> None:
    """The official one takes the first sentence, without the labels of the question, and no second label."""
    item = Item("", "", "What is north of the kitchen?", ("office",))
    for answer, strict, loose in (
        (" The office.", 1, 1),
        (" The office or the garden.", 0, 1),
        (" The office is north of the kitchen.", 1, 1),
        (" I know. It is the office.", 0, 1),
        (" The garden.", 0, 0),
    ):
        assert (official(4, item, answer), substring(item, answer)) == (strict, loose)


GOLDEN = Path(__file__).parent / "babilong_golden.json"


def test_the_scores_of_published_answers() -> None:
    """A sample of a published model's answers, with the official scorer's word on each."""
    for row in json.loads(GOLDEN.read_text(encoding="utf-8")):
        item = Item("", "", row["question"], (row["target"],))
        assert (official(row["task"], item, row["output"]), substring(item, row["output"])) == tuple(row["scores"])


class SeesAhead(torch.nn.Module):
    """Logits that depend on the tokens after each."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(9, 9)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embedding

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> object:
        logits = self.embedding(input_ids)
        return type("Output", (), {"logits": logits + logits.mean(1, keepdim=True)})


def test_a_model_that_sees_ahead_is_refused() -> None:
    for model in (llama(), atlas(rule="titans"), atlas(block="mac", attention_window=8)):
        check_causal(model)
    with pytest.raises(ValueError, match="not causal"):
        check_causal(SeesAhead())


@pytest.mark.parametrize("model", ["llama", "atlas"])
def test_answers_are_those_of_generate(model: str, sources: Sources) -> None:
    """Of items of different lengths in one batch."""
    found = llama() if model == "llama" else atlas(rule="titans")
    items = [Item("", "a short text. " * n, "And then?", ("x",)) for n in (1, 5, 3)]
    for item, answer in zip(items, answers(found, TOKENIZER, items, 6), strict=True):
        ids = torch.tensor([[256, *(item.context + item.question).encode()]])
        alone = found.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=257)
        assert TOKENIZER.decode(alone[0, ids.shape[1] :], skip_special_tokens=True) == answer


def test_strict_answers_come_from_a_memory_alone() -> None:
    """The context changes what a memory answers, and nothing else."""
    items = [Item("", text, " And then?", ("x",)) for text in ("one two three. " * 30, "quite another text! " * 30)]
    for model, differs in (
        (llama(), False),
        (atlas(block="attention", rule=None), False),
        (atlas(block="swa", attention_window=8, rule=None), False),
        (atlas(rule="deltanet", initializer_range=0.5), True),
        (atlas(block="mag", attention_window=8, rule="deltanet", initializer_range=0.5), True),
    ):
        first, second = answers(model, TOKENIZER, items, 12, strict=True)
        assert (first != second) is differs, model.config


def test_a_run_that_was_interrupted_goes_on(sources: Sources, tmp_path: Path) -> None:
    model, suite, path = llama(), SUITES["passkey"], tmp_path / "passkey.json"
    options = {"lengths": [300, 400], "count": 3, "sources": sources}
    whole = evaluate_suite(model, TOKENIZER, suite, tmp_path / "whole.json", **options)
    assert [row["items"] for row in whole["summary"]] == [3, 3]

    def stop(what: str, share: float) -> None:
        if "400" in what:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate_suite(model, TOKENIZER, suite, path, progress=stop, **options)
    assert len(json.loads(path.read_text())["items"]) == 3
    asked: list[str] = []
    again = evaluate_suite(model, TOKENIZER, suite, path, progress=lambda what, _: asked.append(what), **options)
    assert again == whole and json.loads(path.read_text())["summary"] == whole["summary"]
    assert all("400" in what for what in asked)
    with pytest.raises(ValueError, match="a result with seed=42, not 7"):
        evaluate_suite(model, TOKENIZER, suite, path, seed=7, **options)
    path.write_text("{")
    with pytest.raises(ValueError, match="no result of a suite"):
        evaluate_suite(model, TOKENIZER, suite, path, **options)


def test_the_command(six_steps: Path, sources: Sources, tmp_path: Path, capsys) -> None:
    """On a run, and on a model that is not ours."""
    book = tmp_path / "book.txt"
    book.write_text(BOOK)
    llama().save_pretrained(tmp_path / "llama")
    TOKENIZER.save_pretrained(tmp_path / "llama")
    for model in (six_steps, tmp_path / "llama"):
        command = ["evaluate", str(model), "--suite", "passkey,s-niah-1,language", "--lengths", "500", "--count", "2"]
        command += ["--haystack", str(book)]
        assert main([*command, "--out", str(tmp_path / "out" / model.name)]) == 0
        assert "s-niah-1" in capsys.readouterr().out
    assert main(["results", str(tmp_path / "out"), "--markdown"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 8 and table[0].startswith("| model | suite | score | 64 | 128 | 256 | 500 |")
    assert main(["results", str(tmp_path / "out")]) == 0


def test_items_are_kept_by_tokenizer_and_seed(sources: Sources, tmp_path: Path, monkeypatch) -> None:
    suite = SUITES["s-niah-2"]
    first = cached_items(suite, TOKENIZER, 600, 2, 0, sources)
    (kept,) = (tmp_path / "home").rglob("*.json")
    assert first == suite.items(TOKENIZER, 600, 2, 0, sources) == cached_items(suite, TOKENIZER, 600, 2, 0, sources)
    kept.write_text(kept.read_text().replace(first[0].answers[0], "1234567"))
    assert cached_items(suite, TOKENIZER, 600, 2, 0, sources)[0].answers == ("1234567",)  # it is read
    kept.write_text("{")
    assert cached_items(suite, TOKENIZER, 600, 2, 0, sources) == first
    for seed, text in ((1, BOOK), (0, BOOK[5:])):
        cached_items(suite, TOKENIZER, 600, 2, seed, Sources(text))
    assert len(list((tmp_path / "home").rglob("*.json"))) == 3
    monkeypatch.setenv("HF_HOME", str(kept))  # where nothing can be written
    assert cached_items(suite, TOKENIZER, 600, 2, 0, sources) == first


@pytest.mark.parametrize("model", ["llama", "atlas"])
def test_language_is_bits_per_byte(model: str, tmp_path: Path) -> None:
    """By position, as `bits_per_byte` has them; a result that is there is not made again."""
    found, path = (llama() if model == "llama" else atlas(rule="titans")), tmp_path / "language.json"
    result = evaluate_language(found, TOKENIZER, [BOOK[:3000]], path, 400, 5)
    score = bits_per_byte(found, TOKENIZER, [Document("", BOOK[:3000])], 400, streams=5)
    assert [row["length"] for row in result["summary"]] == result["lengths"] == list(score.edges[1:])
    assert [row["bits per byte"] for row in result["summary"]] == pytest.approx(score.by_position.tolist())
    assert all(row["items"] == 5 and row["bits per byte error"] > 0 for row in result["summary"])
    assert len(result["items"]) == 5 * len(result["lengths"])
    assert evaluate_language(found, TOKENIZER, [BOOK[:3000]], path, 400, 5) == result
    with pytest.raises(ValueError, match="a result with length=400, not 500"):
        evaluate_language(found, TOKENIZER, [BOOK[:3000]], path, 500, 5)


CAPITALS = (("Paris is in", 0), ("Rome is in", 1), ("Oslo is in", 2), ("Lyon is in", 0), ("Milan is in", 1))


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with a task of one's own."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = [{"text": text, "options": [" France", " Italy", " Norway"], "answer": n} for text, n in CAPITALS]
    (folder / "capitals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "capitals.yaml").write_text(
        f"""
task: capitals
dataset_path: json
dataset_kwargs: {{data_files: "{folder / "capitals.jsonl"}"}}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{options}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 1.0}}
"""
    )
    return folder


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed")
@pytest.mark.parametrize("model", ["llama", "atlas"])
def test_a_task_of_lm_eval(model: str, tasks: Path, tmp_path: Path, monkeypatch) -> None:
    """The likeliest option, by the logits of the whole text."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    found, path = (llama() if model == "llama" else atlas(rule="titans", initializer_range=0.5)), tmp_path / "r.json"
    result = evaluate_harness(found, TOKENIZER, "capitals", path, 4, tasks=tasks)
    right = []
    for text, answer in CAPITALS[:4]:
        costs = []
        for option in (" France", " Italy", " Norway"):
            ids = torch.tensor([[*text.encode(), *option.encode()]])
            with torch.no_grad():
                nats = torch.nn.functional.cross_entropy(
                    found(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="none"
                )
            costs.append(float(nats[len(text) - 1 :].sum()))
        right.append(costs.index(min(costs)) == answer)
    assert [row["acc"] for row in result["summary"]] == [sum(right) / 4]
    assert len(result["items"]) == 4 and json.loads(path.read_text())["summary"] == result["summary"]
    assert evaluate_harness(found, TOKENIZER, "capitals", path, 4, tasks=tasks) == json.loads(path.read_text())


def test_texts_to_train_on(tmp_path: Path, capsys) -> None:
    out = tmp_path / "texts.jsonl"
    assert main(["data", "suite", "passkey", "--length", "400", "--count", "4", "--out", str(out)]) == 0
    texts = [json.loads(line)["text"] for line in out.read_text().splitlines()]
    for text in texts:
        key = text.split()[-1]
        assert text.endswith(f"The pass key is {key}\n") and text.count(key) == 3
    assert len(texts) == 4 and max(map(len, texts)) <= 400


def test_mistakes(six_steps: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "nothing.txt").touch()
    evaluate = "evaluate", six_steps, "--out", tmp_path / "out", "--count", 2
    for message, *command in (
        ("did you mean", *evaluate, "--suite", "s-niah1"),
        ("needs", *evaluate, "--suite", "passkey", "--lengths", 20),
        ("whole numbers", *evaluate, "--suite", "passkey", "--lengths", "1k"),
        ("--haystack FILE", *evaluate, "--suite", "s-niah-2", "--lengths", 600),
        ("no text file", *evaluate, "--suite", "s-niah-2", "--haystack", tmp_path / "none"),
        ("--haystack FILE", *evaluate, "--suite", "language"),
        ("--strict is for", *evaluate, "--suite", "language", "--haystack", __file__, "--strict"),
        ("--babi FOLDER", *evaluate, "--suite", "babilong-qa1"),
        ("no file qa1_", *evaluate, "--suite", "babilong-qa1", "--babi", tmp_path / "empty"),
        ("no run", "evaluate", tmp_path / "none", "--suite", "passkey"),
        ("no results", "results", tmp_path / "empty"),
        ("no folder or file", "results", tmp_path / "none"),
        ("no folder", *evaluate, "--suite", "lm-eval:piqa", "--tasks", tmp_path / "none"),
        ("no text in", *evaluate, "--suite", "language", "--haystack", tmp_path / "nothing.txt"),
        ("is a file", "evaluate", six_steps, "--suite", "passkey", "--out", __file__),
        ("measure different things", *evaluate, "--suite", "passkey", "--data", __file__),
        ("measure different things", "evaluate", six_steps, "--count", 3),
    ):
        code, said = refused(capsys, *command)
        assert code in (1, 2) and message in said, said


def test_a_seed_is_the_same_everywhere() -> None:
    assert SUITES["passkey"].items(TOKENIZER, 400, 1, 42, Sources())[0].answers == (
        str(random.Random("passkey 400 42").randint(10_000, 99_999)),
    )
