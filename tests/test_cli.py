"""The command: what it prints, and one clear line for each mistake."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from atlas_memory.cli import main
from atlas_memory.cli.planning import si_format
from atlas_memory.data import byte_tokenizer
from atlas_memory.eval.sampling import TerminalStreamer
from atlas_memory.memory import RULES
from atlas_memory.ops.flops import state_bytes
from atlas_memory.train.trainer import train
from tests.train.small import overrides, settings


@pytest.fixture
def run(six_steps) -> Path:
    return six_steps


def refused(capsys, *arguments: object) -> tuple[int, str]:
    """The exit code and the one line on stderr of a command that fails."""
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("atlas: ")
    assert err.count("\n") == 1
    return code, err


@pytest.mark.parametrize("columns", ["80", "120"])
def test_rules(capsys, monkeypatch, columns) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["rules"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in RULES)
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= int(columns)


def test_rules_as_json(capsys) -> None:
    assert main(["rules", "--json", "--dim", "8", "--heads", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == list(RULES)
    assert found["titans"]["state_bytes"] == state_bytes(RULES["titans"], 4, 2)
    assert found["dot"]["multiply_adds"] is None
    # The parts of a rule are its `rule_options`: from any other rule they lead there.
    for name, rule in RULES.items():
        parts = {key: value for key, value in found[name].items() if isinstance(value, dict)}
        assert RULES["deltanet"].vary(**parts) == rule


def test_one_rule(capsys) -> None:
    assert main(["rules", "yaad"]) == 0
    out = capsys.readouterr().out
    assert "over='mixture'" in out
    assert "layer of width 256, 4 heads, float32: state 1.05M bytes" in out
    assert refused(capsys, "rules", "yada")[0] == 2
    assert refused(capsys, "rules", "--dim", "10")[0] == 2


def test_help(capsys) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in ("train", "generate", "evaluate", "report", "rules"))


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", None])
def test_text_goes_on_where_standard_output_lacks_a_character_or_is_closed(run, monkeypatch, encoding) -> None:
    out = encoding and io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["generate", str(run), "--prompt", "caf\u00e9 \U0001f600 is", "--max-new-tokens", "9"]) == 0
    if out:
        begins = {"ascii": b"caf? ? is", "cp1252": b"caf\xe9 ? is"}[encoding]
        assert out.buffer.getvalue().startswith(begins) and out.buffer.getvalue().endswith(os.linesep.encode())


def test_generate(run, capsys) -> None:
    texts = []
    for seed in (1, 1, 2):
        assert main(["generate", str(run), "--prompt", "aé", "--max-new-tokens", "20", "--seed", str(seed)]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("aé")
    assert main(["generate", str(run), "--greedy", "--max-new-tokens", "3"]) == 0
    likeliest = capsys.readouterr().out
    assert main(["generate", str(run), "--top-p", "1e-6", "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out == likeliest


def test_text_is_shown_as_it_is_written(capsys) -> None:
    text = "words and é🙂\nand 語 more\n"
    streamer, shown = TerminalStreamer(byte_tokenizer(), skip_special_tokens=True), ""
    for i, byte in enumerate(text.encode()):
        streamer.put(torch.tensor([byte]))
        shown += capsys.readouterr().out
        assert text.startswith(shown) and len(shown.encode()) > i - 16
    streamer.end()
    assert shown + capsys.readouterr().out == text + "\n"


def test_control_characters_are_shown_on_a_terminal_and_piped_as_they_are(capsys, monkeypatch) -> None:
    streamer, text = TerminalStreamer(byte_tokenizer()), "a\tb\nc\x1b[2J\r\x9bé"
    for shown in (text, "a\tb\nc\\x1b[2J\\x0d\\x9bé"):
        streamer.put(torch.tensor(list(text.encode())))
        streamer.end()
        assert capsys.readouterr().out == shown + "\n"
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)


def test_a_process_of_its_own_is_quiet(run) -> None:
    command = [sys.executable, "-m", "atlas_memory", "generate", str(run), "--max-new-tokens", "3"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")


def test_evaluate(run, capsys) -> None:
    assert main(["evaluate", str(run), "--json"]) == 0
    both = json.loads(capsys.readouterr().out)
    assert 0 < both["memory_on"]["bits_per_byte"] < 10
    assert both["margin"]["bits_per_byte"] == pytest.approx(
        both["writes_off"]["bits_per_byte"] - both["memory_on"]["bits_per_byte"]
    )
    assert main(["evaluate", str(run), "--writes", "off", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"writes_off": both["writes_off"]}
    text = run.parent / "corpus" / "3.txt"
    assert main(["evaluate", str(run), "--data", str(text), "--length", "50", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory_on"]["bytes"] == text.stat().st_size
    assert main(["evaluate", str(run), "--streams", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["margin"]["standard_error"] is None
    assert main(["evaluate", str(run), "--streams", "2"]) == 0
    assert "writes off" in capsys.readouterr().out


def test_report_and_resume(run, tmp_path, capsys) -> None:
    shutil.copytree(run, tmp_path / "run")
    assert main(["train", "--resume", "train.steps=7", f"output_dir={tmp_path / 'run'}"]) == 0
    assert "step 7" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "with its writes off" in capsys.readouterr().out


def test_wrong_command_lines(capsys) -> None:
    for arguments in (["fly"], ["train", "--fast"], ["generate"], ["generate", "x", "--top-k", "many"]):
        assert refused(capsys, *arguments)[0] == 2


def test_wrong_configs(tmp_path, capsys) -> None:
    for override, message in (
        ("train.stpes=3", "did you mean train.steps?"),
        ("model.rule=atlsa", "rule='atlsa' is unknown"),
        ("model.preset=huge", "preset 'huge' is unknown"),
        ("model.window=0", "window"),
    ):
        code, line = refused(capsys, "train", *overrides(tmp_path), override)
        assert code == 2
        assert message in line
    assert refused(capsys, "train", "--config", tmp_path / "nowhere.yaml")[0] == 2
    assert not (tmp_path / "run").exists()


def test_one_process_of_several_says_which_it_is(tmp_path, capsys, monkeypatch) -> None:
    report = tmp_path / "error.json"
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_ERROR_FILE": str(report)}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "train.stepz=3"]) == 2
    said = "unknown key train.stepz (=3); did you mean train.steps?"
    assert capsys.readouterr().err == f"atlas, process 1 of 2: {said}\n"
    assert json.loads(report.read_text())["message"]["message"] == said


def test_wrong_texts(run, tmp_path, capsys) -> None:
    (tmp_path / "empty.txt").touch()
    for name, message in (("nowhere", "does not exist"), ("empty.txt", "is empty")):
        code, line = refused(capsys, "train", *overrides(tmp_path), f"data.path={tmp_path / name}")
        assert (code, message in line) == (1, True)
        code, line = refused(capsys, "evaluate", run, "--data", tmp_path / name)
        assert (code, message in line) == (1, True)


def test_a_table_with_a_column_of_its_own(run, tmp_path, capsys) -> None:
    table = tmp_path / "table.jsonl"
    table.write_text("".join(json.dumps({"content": f"row {i} of a table"}) + "\n" for i in range(9)))
    for command in ("evaluate", "report"):
        code, line = refused(capsys, command, run, "--data", table)
        assert (code, "has no column 'text': set --column to one of content" in line) == (1, True)
        code, line = refused(capsys, command, run, "--column", "content")
        assert (code, "give --data too" in line) == (1, True)
    assert main(["evaluate", str(run), "--data", str(table), "--column", "content", "--writes", "on", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory_on"]["bytes"] == 9 * len("row 0 of a table")


def test_wrong_runs(run, tmp_path, capsys) -> None:
    code, line = refused(capsys, "train", *overrides(tmp_path), f"output_dir={run}")
    assert (code, "is not empty" in line) == (2, True)
    for command in ("generate", "evaluate", "report"):
        code, line = refused(capsys, command, tmp_path / "nowhere")
        assert (code, "the folder does not exist" in line) == (1, True)
    shutil.copytree(run, tmp_path / "broken")
    weights = tmp_path / "broken" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    code, line = refused(capsys, "generate", tmp_path / "broken")
    assert (code, "damaged or cut short" in line) == (1, True)


def test_a_prompt_that_is_no_text(run, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9")))
    for given in ("-", "caf\udce9"):
        code, line = refused(capsys, "generate", run, "--prompt", given)
        assert (code, "is not UTF-8 text: convert it first" in line) == (1, True)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("né".encode())))
    assert main(["generate", str(run), "--prompt", "-", "--max-new-tokens", "1"]) == 0
    assert capsys.readouterr().out.startswith("né")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "340m"], "'340m' is a configuration, which is given by: --config 340m"),
        (["train", "my.yaml"], "'my.yaml' is a configuration, which is given by: --config my.yaml"),
        (["train", "data.path=prepared"], "does not exist; prepared text is made by: atlas data prepare"),
        (["train", "data.path="], "data.path is empty: name a text, or leave it out"),
        (["train", "data.path=''"], "data.path is empty: name a text, or leave it out"),
        (["train", "data.path=123"], "data.path='123' does not exist"),
        (["train", "data.path=odd: name"], "data.path='odd: name' does not exist"),
        (["train", "data.path=*.none"], "data.path='*.none': no file fits this pattern"),
        (["generate", "x", "--temperature", "0"], "0"),
        (["generate", "x", "--top-p", "2"], "2"),
        (["generate", "x", "--top-k", "many"], "many"),
        (["generate", "x", "--seed", "99999999999999999999999"], "99999999999999999999999"),
        (["generate", "x", "--greedy", "--top-p", "0.9"], "--greedy draws nothing: leave out --temperature, --top-k"),
        (["train", "train.epochs=3"], "did you mean train.steps?"),
        (["train", "train.num_epochs=3"], "did you mean train.steps?"),
        (["train", "data.dataset=x"], "did you mean data.path?"),
        (["train", "model.layers=3"], "did you mean model.num_hidden_layers?"),
        (["train", "model.heads=3"], "did you mean model.num_attention_heads?"),
        (["train", "model.dim=3"], "did you mean model.hidden_size?"),
        (["train", "out=3"], "did you mean output_dir?"),
        (["rules", "titan"], "unknown rule 'titan'; did you mean titans?"),
        (["plan", "model.rule=titan"], "rule='titan' is unknown; did you mean titans?"),
        (["plan", "model.block=mags"], "block='mags' is unknown; did you mean mag?"),
        (["plan", "model.preset=tinny"], "preset 'tinny' is unknown; did you mean tiny?"),
        (["plan", "model.rule_options={bias: {kind: Hubert}}"], "bias has no kind 'Hubert'; did you mean Huber?"),
        (["plan", "model.rule_options={optimizer: {every: 2}}"], "no part 'optimizer'; did you mean optimiser?"),
    ],
)
def test_what_was_meant_is_said(capsys, tmp_path, monkeypatch, arguments, message) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, *arguments)[1]
    assert not list(tmp_path.iterdir())


def test_a_folder_of_digits(tmp_path, monkeypatch, capsys) -> None:
    given = overrides(tmp_path, "train.steps=1")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tmp_path / "corpus", "123")
    assert main(["train", *given, "data.path=123", "output_dir=2024"]) == 0
    assert capsys.readouterr().out.startswith("2024: step 1")


def test_ctrl_c_is_not_dropped_by_what_is_imported() -> None:
    """While a command loads, the process ends at once; later what Ctrl-C raises is raised."""
    program = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # what was started in the background ignores it
from atlas_memory.cli.startup import imports
with imports():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        pass
print("went on")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "atlas: interrupted\n")


def test_ctrl_c_in_a_command_is_said_once(run, monkeypatch, capsys) -> None:
    told = signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background ignores it
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("atlas_memory.eval.sampling.sample", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    code, err = refused(capsys, "generate", run)
    assert (code, err) == (130, "atlas: interrupted\n")
    assert signal.getsignal(signal.SIGINT) is before
    signal.signal(signal.SIGINT, told)


def test_numbers_have_the_unit_that_they_round_to() -> None:
    assert [si_format(n) for n in (999.6e18, 999.4e18, 1.5e24, 12, 0)] == ["1Z", "999E", "1.5Y", "12", "0"]


def test_traceback_on_request(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("ATLAS_TRACEBACK", "1")
    with pytest.raises(ValueError, match="does not exist"):
        main(["generate", str(tmp_path / "nowhere")])


def test_threads_wait_without_spinning_for_long(monkeypatch) -> None:
    """Unless the user has said how they wait."""
    for given, expected in (({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)):
        for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
            monkeypatch.delenv(name, raising=False)
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        assert main(["--version"]) == 0
        assert os.environ.get("GOMP_SPINCOUNT") == expected


def test_a_model_without_memory_is_read_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(settings(tmp_path, "model.block=swa", "model.rule=null", "model.attention_window=4", "train.steps=1"))
    run = str(tmp_path / "run")
    assert main(["evaluate", run, "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"memory_on"}
    assert main(["evaluate", run, "--writes", "off"]) != 0
    assert "the model has no memory whose writes could be off" in capsys.readouterr().err
