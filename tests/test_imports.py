"""What an import costs, and that the Auto classes know the models whatever is imported first."""

import subprocess
import sys
from pathlib import Path

import atlas_memory

EACH = """
import gc, os, sys
gc.disable()  # a third of the time would go into it
exec(sys.argv[1])
for number, code in enumerate(sys.argv[2:]):
    if os.fork() == 0:
        sys.stdout = sys.stderr = open(f"{number}.txt", "w")
        exec(code)
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""


def run(folder: Path, *codes: str, first: str = "import torch") -> list[str]:
    """What each code prints in a process of its own, which has run ``first`` and nothing else."""
    subprocess.run([sys.executable, "-c", EACH, first, *codes], check=True, cwd=folder)
    return [(folder / f"{number}.txt").read_text().strip() for number in range(len(codes))]


def test_a_memory_needs_neither_transformers_nor_a_compiler(tmp_path: Path) -> None:
    code = "import atlas_memory.memory; from atlas_memory import NeuralMemory, RULES;"
    code += " print([name for name in ('transformers', 'torch._dynamo', 'triton') if sys.modules.get(name)])"
    without, beside = run(tmp_path, f"import sys; sys.modules['transformers'] = None; {code}", f"import sys; {code}")
    assert without == "[]" and beside == "['transformers']"


def test_the_command_and_logs_need_no_torch(tmp_path: Path) -> None:
    code = "import sys; sys.argv = ['atlas', '--help']; import atlas_memory.viz.watched_runs, atlas_memory.viz.charts;"
    code += " import atlas_memory.models.presets; from atlas_memory.__main__ import main; main();"
    code += " print('torch' in sys.modules)"
    (said,) = run(tmp_path, code, first="")
    assert "Usage: atlas" in said and said.endswith("False")
    command = [sys.executable, "-X", "importtime", "-m", "atlas_memory", "--version"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout == f"atlas-memory {atlas_memory.__version__}\n" and "transformers" not in found.stderr


def test_the_auto_classes_know_the_models(tmp_path: Path) -> None:
    imports = [
        "import atlas_memory; from transformers import AutoConfig, AutoModelForCausalLM",
        "from transformers import AutoConfig, AutoModelForCausalLM; import atlas_memory",
        "import atlas_memory; from transformers import GenerationMixin, Trainer, AutoConfig, AutoModelForCausalLM",
        "from atlas_memory import AtlasForCausalLM; from transformers import AutoConfig, AutoModelForCausalLM",
    ]
    made = "AutoModelForCausalLM.from_config(AutoConfig.for_model('atlas_memory'))"
    said = run(tmp_path, *(f"{code}; print(type({made}).__name__)" for code in imports))
    assert said == ["AtlasForCausalLM"] * 4


def test_missing_packages_are_named_with_what_installs_them(tmp_path: Path) -> None:
    hidden = "import sys; sys.modules['transformers'] = sys.modules['typer'] = None"
    model = "import atlas_memory\ntry: atlas_memory.AtlasConfig\nexcept ModuleNotFoundError as error: print(error)"
    command = "from atlas_memory.__main__ import main; sys.stderr = sys.stdout; print(main())"
    of_model, of_command = run(tmp_path, f"{hidden}\n{model}", f"{hidden}\n{command}")
    assert "pip install 'atlas-memory[train]'" in of_model
    assert "typer is not installed: pip install 'atlas-memory[train,report]'" in of_command


def test_layers_go_without_the_models_where_transformers_is_too_old(tmp_path: Path) -> None:
    old = "import sys; sys.modules['atlas_memory.models.configuration'] = None"
    old += "\nimport warnings; warnings.simplefilter('error', UserWarning)"
    code = "try: import atlas_memory\nexcept UserWarning as error: print(error)"
    (said,) = run(tmp_path, f"{old}\n{code}")
    assert "the models of atlas_memory need transformers 5.17 or newer" in said
