"""What an import costs, and that the Auto classes know the models whatever is imported first."""

import subprocess
import sys

import pytest


def run(code: str) -> str:
    whole = f"import gc\ngc.disable()\n{code}\ngc.freeze()"  # a third of the time would go into collecting garbage
    return subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, check=True).stdout.strip()


def test_a_memory_needs_neither_transformers_nor_a_compiler() -> None:
    loaded = "import sys; print([name for name in ('transformers', 'torch._dynamo', 'triton') if name in sys.modules])"
    assert run(f"import atlas_memory.memory; from atlas_memory import NeuralMemory, RULES; {loaded}") == "[]"


def test_help_needs_no_torch() -> None:
    code = "import sys; from atlas_memory.__main__ import main; sys.argv = ['atlas', '--help']; main()"
    assert run(f"{code}; print('torch' in sys.modules)").endswith("False")


@pytest.mark.parametrize(
    "imports",
    [
        "import atlas_memory; from transformers import AutoConfig, AutoModelForCausalLM",
        "from transformers import AutoConfig, AutoModelForCausalLM; import atlas_memory",
        "import atlas_memory; from transformers import GenerationMixin, Trainer, AutoConfig, AutoModelForCausalLM",
        "from atlas_memory import AtlasForCausalLM; from transformers import AutoConfig, AutoModelForCausalLM",
    ],
)
def test_the_auto_classes_know_the_models(imports: str) -> None:
    made = "AutoModelForCausalLM.from_config(AutoConfig.for_model('atlas_memory'))"
    assert run(f"{imports}; print(type({made}).__name__)") == "AtlasForCausalLM"


def test_missing_packages_are_named_with_what_installs_them() -> None:
    hidden = "import sys; sys.modules['transformers'] = sys.modules['typer'] = None"
    code = "import atlas_memory\ntry: atlas_memory.AtlasConfig\nexcept ModuleNotFoundError as error: print(error)"
    assert "pip install 'atlas-memory[train]'" in run(f"{hidden}\n{code}")
    code = "from atlas_memory.__main__ import main; sys.stderr = sys.stdout; print(main())"
    assert "typer is not installed: pip install 'atlas-memory[train,report]'" in run(f"{hidden}\n{code}")


def test_layers_go_without_the_models_where_transformers_is_too_old() -> None:
    old = "import sys; sys.modules['atlas_memory.models.configuration'] = None"
    old += "\nimport warnings; warnings.simplefilter('error', UserWarning)"
    code = "import atlas_memory\ntry: from transformers import AutoModel\nexcept UserWarning as error: print(error)"
    assert "the models of atlas_memory need transformers 5.4 or newer" in run(f"{old}\n{code}")
