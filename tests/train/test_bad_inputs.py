"""What a user may get wrong: each mistake is one line that names it, and no folder is left behind."""

import gzip
import json
from pathlib import Path

import pytest

from atlas_memory.cli import main
from atlas_memory.data import byte_tokenizer
from tests.train.small import SMALL


@pytest.fixture
def wrong(tmp_path) -> Path:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").touch()
    (tmp_path / "blank.txt").write_text(" \n\n")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "text.txt.gz").write_bytes(gzip.compress(b"a text " * 100))
    (tmp_path / "halved").mkdir()
    for name in ("tokens.bin", "starts.npy"):
        (tmp_path / "halved" / name).write_bytes(b"words" * 100)
    (tmp_path / "binary.bin").write_bytes(bytes(range(256)) * 10)
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1") * 100)
    (tmp_path / "wide.txt").write_text("café", encoding="utf-16")
    (tmp_path / "short.txt").write_text("a few words")
    (tmp_path / "line.txt").write_text("x" * 200_000)
    (tmp_path / "other.jsonl").write_text(json.dumps({"body": "text"}) + "\n")
    (tmp_path / "broken.jsonl").write_text('{"text": "fine"}\nnot json\n')
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "file").write_text("a file")
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "endless")
    return tmp_path


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.path={}/empty", "no text in"),
        ("data.path={}/empty.txt", "is empty"),
        ("data.path={}/blank.txt", "is empty"),
        ("data.path={}/binary.bin", "is not UTF-8 text"),
        ("data.path={}/latin.txt", "latin.txt' > NEW, or from the encoding it has"),
        ("data.path={}/wide.txt", "is not UTF-8 text: convert it first: iconv -f utf-16 -t utf-8 '"),
        ("data.path=[{0}/line.txt, {0}/latin.txt]", "latin.txt' is not UTF-8 text: convert it"),
        ("data.path={}/text.txt.gz", "is not UTF-8 text: unpack it first"),
        ("data.path=[{0}/empty.txt, {0}/blank.txt]", "no text in"),
        ("data.path={}/empty.jsonl", "empty.jsonl' is empty"),
        ("data.path={}/halved", "is a prepared folder without its prepared.json: prepare it again"),
        ("data.path={}/short.txt", "lower data.seq_len"),
        ("data.path={}/none.txt", "does not exist"),
        ("data.path={}/*.md", "no file fits this pattern"),
        ("data.path=[]", "is an empty list"),
        ("data.path={}/other.jsonl", "has no column 'text': set data.column to one of body"),
        ("data.path={}/broken.jsonl", "is damaged or no table of text"),
        ("data.path={}/broken.parquet", "broken.parquet'"),
        ("data.tokenizer={}/tokenizer", "could not be loaded"),
        ("data.tokenizer={}/endless", "name one of its tokens as eos_token in its tokenizer_config.json"),
        ("data.tokenizer={}/nowhere", "does not exist"),
        ("data.reset_every=100000", "lower data.seq_len, data.reset_every, data.interleave or train.batch_size"),
        ("train.steps=2026-13-45", "override 'train.steps=2026-13-45': the value is not YAML (month must be in 1..12)"),
        ("data.order=streams", "input should be 'stream', 'packed' or 'crops'"),
        ("data.held_out=1", "data.held_out=1: input should be less than 1"),
        ("data.pass_states=2", "data.pass_states=2: input should be less than or equal to 1"),
        ("data.interleave=0", "data.interleave=0: input should be greater than or equal to 1"),
        ("data.seq_len_schedule={{3: 24}}", "data.seq_len_schedule: 24 from step 3 on is no multiple of 16 before it"),
        (
            "data.seq_len_schedule={{3: 32, 5: 32}}",
            "data.seq_len_schedule: 32 from step 5 on is no multiple of 32 before it",
        ),
        ("data.seq_len_schedule={{0: 32}}", "data.seq_len_schedule: 0 is no step after the first: set data.seq_len=32"),
        ("data.seq_len_schedule={{3: 64}}", "make train.batch_size a multiple of 4"),
        ("data.seq_len_schedule={{half: 32}}", "data.seq_len_schedule='half': input should be a valid integer"),
        ("model=nano", "model is a section, not 'nano': set its keys, such as model.preset"),
        ("output_dir={}/file", "Not a directory"),
        ("output_dir={}/file/run", "file"),
    ],
)
def test_each_mistake_is_one_line(wrong, capsys, override: str, says: str) -> None:
    arguments = [*SMALL, f"data.path={wrong}/line.txt", f"output_dir={wrong}/run", override.format(wrong)]
    code = main(["train", *arguments])
    said = capsys.readouterr().err.strip().splitlines()
    assert code in (1, 2) and said[-1].startswith("atlas: ") and says in said[-1]
    assert not [line for line in said[:-1] if "Error" in line or "Traceback" in line]
    assert not (wrong / "run").exists()


def test_lengths_of_crops(wrong, capsys) -> None:
    arguments = [*SMALL, f"data.path={wrong}/line.txt", f"output_dir={wrong}/run", "data.seq_len_schedule={3: 32}"]
    assert main(["train", *arguments, "data.order=crops"]) == 2
    assert "data.seq_len_schedule needs rows that read on: take data.order=stream or packed" in capsys.readouterr().err


def test_one_giant_line_is_text(wrong) -> None:
    assert main(["train", *SMALL, f"data.path={wrong}/line.txt", f"output_dir={wrong}/run", "train.steps=1"]) == 0


def test_a_folder_that_cannot_be_made_is_said_before_the_text_is_read(wrong, capsys) -> None:
    for folder in (wrong / "file" / "run", Path("/proc/run")):
        assert main(["train", *SMALL, f"data.path={wrong}/none.txt", f"output_dir={folder}"]) == 2
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert f"output_dir={str(folder)!r} cannot be written to (" in said and said.endswith("choose another")


def test_programs_that_are_not_installed_leave_no_folder(wrong, capsys, monkeypatch) -> None:
    monkeypatch.setattr("transformers.integrations.integration_utils.is_wandb_available", lambda: False)
    arguments = [*SMALL, f"data.path={wrong}/line.txt", f"output_dir={wrong}/run"]
    assert main(["train", *arguments, "train.report_to=wandb"]) == 2
    assert "train.report_to=['wandb']: " in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (wrong / "run").exists()


def test_tokens_beyond_the_vocabulary(wrong, capsys) -> None:
    (wrong / "text.txt").write_text("some words and more " * 200)
    assert main(["data", "prepare", f"{wrong}/text.txt", "--out", f"{wrong}/prepared"]) == 0
    tokens = wrong / "prepared" / "tokens.bin"
    data = bytearray(tokens.read_bytes())
    data[100:102] = (60000).to_bytes(2, "little")
    tokens.write_bytes(data)
    assert main(["train", *SMALL, f"data.path={wrong}/prepared", f"output_dir={wrong}/run"]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "the text has the token 60,000, and the model's vocabulary has 258" in said
    assert not (wrong / "run").exists()
