"""The studies of `atlas bench`: their runs, files and command."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from atlas_memory import OmegaMemory
from atlas_memory.bench import capacity, referee
from atlas_memory.bench.grid import Study, means, run_study
from atlas_memory.bench.referee import SWITCHES, Switch, SwitchedMemory, switch_memories
from atlas_memory.bench.task_training import task_model
from atlas_memory.cli import main
from atlas_memory.memory import RULES, Gates, l2_normalise
from tests.test_cli import refused


def measured(cell: dict, settings: dict) -> dict[str, float]:
    """Half of the seed; no seed 3."""
    if cell["seed"] == 3:
        raise ValueError("no run of 3")
    return {"half": cell["seed"] / 2, "rate": cell.get("learning_rate", 0.0)}


STUDY = Study("halves", "Half.", "nowhere", measured, ("model",), {"steps": 1})
CELLS = [{"model": "a", "seed": seed} for seed in range(4)]


def test_a_study_goes_on_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "halves.json"
    said: list[float] = []
    result = run_study(STUDY, CELLS[:2], path, "a command", progress=lambda _, share: said.append(share))
    assert said == [0.5, 1.0] and [run["numbers"]["half"] for run in result["runs"]] == [0.0, 0.5]
    assert json.loads(path.read_text()) == result and result["runs"][0]["command"] == "a command"
    result = run_study(STUDY, CELLS, path)
    assert [run["cell"]["seed"] for run in result["runs"]] == [0, 1, 2, 3]
    assert result["runs"][3]["error"] == "no run of 3" and result["runs"][3]["numbers"] == {}
    (row,) = means(result)
    assert (row["seeds"], row["failed"]) == (3, 1) and row["numbers"]["half"] == pytest.approx((0.5, 0.5 / 3**0.5))
    mended = replace(STUDY, run=lambda cell, settings: {"half": 9.0, "rate": 0.0})
    assert [run["numbers"]["half"] for run in run_study(mended, CELLS, path)["runs"]] == [0.0, 0.5, 1.0, 9.0]


@pytest.mark.extended
def test_processes_of_a_study(tmp_path: Path) -> None:
    """Two find what one finds, in the order of the cells; one that fails leaves the others alone."""
    one, two = (run_study(STUDY, CELLS, tmp_path / f"{n}.json", workers=n)["runs"] for n in (1, 2))
    assert [(run["cell"], run["numbers"]) for run in one] == [(run["cell"], run["numbers"]) for run in two]


def test_a_file_of_another_study_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "halves.json"
    run_study(STUDY, CELLS[:1], path)
    before = path.read_text()
    for other, message in (
        (replace(STUDY, settings={"steps": 2}), "steps 1, not 2"),
        (replace(STUDY, name="thirds"), "suite halves, not thirds"),
        (replace(STUDY, version=2), "version 1, not 2"),
    ):
        with pytest.raises(ValueError, match=message):
            run_study(other, CELLS, path)
    assert path.read_text() == before
    path.write_text("[]")
    with pytest.raises(ValueError, match="no result of a study"):
        run_study(STUDY, CELLS, path)
    with pytest.raises(IsADirectoryError, match="is a folder"):
        run_study(STUDY, CELLS, tmp_path)


def test_of_several_learning_rates_the_best_counts(tmp_path: Path) -> None:
    cells = [
        {"model": name, "learning_rate": rate, "seed": seed} for name in "ab" for rate in (0.1, 0.4) for seed in (0, 1)
    ]
    rows = means(run_study(STUDY, cells, tmp_path / "x.json"))
    assert [(row["model"], row["learning_rate"], row["seeds"]) for row in rows] == [("a", 0.4, 2), ("b", 0.4, 2)]


def test_cases_of_a_run_are_rows_of_their_own(tmp_path: Path) -> None:
    twice = replace(STUDY, run=lambda cell, settings: {"half": 1.0, "half | when read": 2.0})
    rows = means(run_study(twice, CELLS[:2], tmp_path / "x.json"))
    assert [(row["model"], row["numbers"]["half"][0]) for row in rows] == [("a", 1.0), ("when read", 2.0)]


def test_a_matrix_holds_as_many_pairs_as_it_has_columns() -> None:
    """Proposition 1: d_k. Proposition 2: with features of degree 2, their number; Hebbian writes hold a fraction."""
    held = {
        name: capacity.stored(capacity.fresh(capacity.MEMORIES[name], 8), 0, 32)
        for name in ("Hebbian", "online", "degree 2")
    }
    assert held["Hebbian"] <= 2 and 7 <= held["online"] <= 9 and 38 <= held["degree 2"] <= 46


def test_a_slope() -> None:
    assert capacity.slope([2, 4, 8], [12.0, 48.0, 192.0]) == pytest.approx(2)
    assert capacity.slope([2, 4, 8], [0.0, 4.0, 8.0]) == pytest.approx(1) and math.isnan(capacity.slope([2, 4], [0, 1]))


@pytest.mark.parametrize("rule", ["titans", "omeganet", "atlas", "ttt-mlp", "lact"])
def test_switches(rule: str) -> None:
    """None changes nothing; each of them changes what is said, and no token sees a later one."""
    model = task_model(rule, 32, 32, 16).double().eval()
    ids = torch.randint(32, (2, 40))
    other = ids.clone()
    other[:, 25:] = 3

    def said(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=x, use_cache=False).logits

    plain = said(ids)
    for name, switch in SWITCHES.items():
        switch_memories(model, switch)
        assert (said(ids) - plain).abs().max() < 1e-12 if name == "as it is" else (said(ids) - plain).abs().max() > 1e-4
        assert torch.allclose(said(ids)[:, :25], said(other)[:, :25], atol=1e-10)
    switch_memories(model, Switch())
    assert torch.allclose(said(ids), plain)
    with pytest.raises(ValueError, match="no memories to switch"):
        switch_memories(task_model("attention", 32, 32, 16), Switch())


@pytest.mark.parametrize("ascent", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_inner_steps_are_those_of_the_letter(steps: int, ascent: bool) -> None:
    """W <- W -+ eta sum_i gamma_i grad l_i, `steps` times a token, after W <- alpha W."""
    torch.manual_seed(0)
    window, dim, time = 3, 5, 11
    parts = {"network": {"kind": "Linear"}, "features": {"kind": "Identity"}, "window": {"size": window, "chunk": 4}}
    rule = RULES["omeganet"].vary(**parts).printed().vary(optimiser={"online": True})
    memory = SwitchedMemory(OmegaMemory(dim, 1, rule, gates=False), Switch(ascent=ascent, steps=steps)).double()
    q, k, v = torch.randn(3, 1, 1, time, dim).double()
    k = l2_normalise(k)
    eta, alpha = 0.2 * torch.rand(2, 1, 1, time).double()
    gamma = torch.rand(1, 1, time, window).double()
    y, _ = memory(q, k, v, Gates(eta, alpha, gamma=gamma))
    w = torch.zeros(dim, dim).double()
    for t in range(time):
        w = alpha[0, 0, t] * w
        for _ in range(steps):
            grad = torch.zeros_like(w)
            before = w / alpha[0, 0, t] if _ == 0 else w  # the first gradient is taken before the decay
            for j in range(min(window, t + 1)):
                error = before @ k[0, 0, t - j] - v[0, 0, t - j]
                grad += 2 * gamma[0, 0, t, j] * torch.outer(error, k[0, 0, t - j])
            w = w - (-1 if ascent else 1) * eta[0, 0, t] * grad
        assert torch.allclose(y[0, 0, t], w @ q[0, 0, t], atol=1e-10)


def test_only_the_last_matrix_is_written() -> None:
    rule = RULES["titans"].vary(network={"expansion": 2})
    memory = SwitchedMemory(OmegaMemory(4, 1, rule, gates=False), Switch(last_matrix=True))
    q, k, v = torch.randn(3, 1, 1, 9, 4)
    _, state = memory(q, k, v, Gates(torch.full((1, 1, 9), 0.5)))
    first, last = ((w - start).abs().max() for w, start in zip(state.weights, memory.initial, strict=True))
    assert first < 1e-6 < 1e-2 < last and not memory.rule.optimiser.has_momentum


def test_a_run_of_the_referee(monkeypatch) -> None:
    for name, value in {"ASKED": 4, "STREAMS": 2, "READ": 160, "WIDTH": 16, "TEXT_WIDTH": 16}.items():
        monkeypatch.setattr(referee, name, value)
    settings = {"steps": dict.fromkeys(referee.TASKS, 1), "tokens": 128}
    settings["learning_rate"] = dict.fromkeys(referee.TASKS, 1e-3)
    for task, names in (("mqar", {"8/64", "16/64", "32/128"}), ("noisy-recall", {"noisy-recall"}), ("bytes", {"bits"})):
        cell = {"rule": "deltanet", "switch": "as it is", "task": task, "seed": 0}
        found = referee.run(cell, settings)
        assert {name.partition(" | ")[0] for name in found} == names and len(found) == 3 * len(names)
        assert all(map(math.isfinite, found.values()))


def test_the_command(tmp_path: Path, capsys, monkeypatch) -> None:
    bench = ["bench", "capacity", "--memories", "online;degree 2", "--dims", "2,4", "--seeds", "0,1", "--workers", "1"]
    assert main([*bench, "--out", str(tmp_path / "capacity.json")]) == 0
    assert "degree 2" in capsys.readouterr().out
    short = ["--models", "deltanet", "--steps", "1", "--seeds", "0", "--workers", "1", "--learning-rates", "0.001"]
    monkeypatch.setattr("atlas_memory.bench.studies.ASKED", 8)
    mad = ["bench", "mad", *short, "--rows", "2", "--tasks", "compression,memorisation"]
    assert main([*mad, "--out", str(tmp_path / "mad.json")]) == 0
    capsys.readouterr()
    assert main(["results", str(tmp_path), "--markdown"]) == 0
    said = capsys.readouterr().out
    assert "| memory | dim 2 | dim 4 | slope |" in said and "| deltanet |" in said


def test_mistakes(capsys, tmp_path: Path) -> None:
    for message, *command in (
        ("did you mean titans", "mqar", "--models", "titan"),
        ("do not divide", "mqar", "--widths", "40"),
        ("numbers with commas", "mqar", "--seeds", "a"),
        ("at least 0", "mqar", "--seeds", "-1"),
        ("at least 1", "mqar", "--widths", "0"),
        ("above 0", "mqar", "--learning-rates", "nan"),
        ("an empty name", "mqar", "--models", ""),
        ("at least 2", "capacity", "--dims", "1"),
        ("at most 16", "capacity", "--memories", "degree 3", "--dims", "64"),
        ("did you mean recall", "mad", "--tasks", "recal"),
        ("did you mean titans", "referee", "--rules", "titan"),
        ("there are as it is; ascent", "referee", "--switches", "descent"),
        ("there are Hebbian", "capacity", "--memories", "nothing"),
    ):
        code, said = refused(capsys, "bench", *command, "--out", tmp_path / "x.json")
        assert code in (1, 2) and message in said, said
    assert not (tmp_path / "x.json").exists()
