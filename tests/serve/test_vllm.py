"""The models in vLLM, where it is installed: greedy texts are those of `generate`."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

from atlas_memory.models import AtlasConfig, AtlasForCausalLM
from atlas_memory.serve.vllm_model import StatePages

LENGTHS = (1, 2, 17, 64, 100, 1, 48)
ENGINE = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    folder, prompts = sys.argv[1], json.loads(sys.argv[2])
    llm = LLM(folder, skip_tokenizer_init=True, dtype="float32", max_model_len=256, max_num_seqs=4,
              max_num_batched_tokens=32, gpu_memory_utilization=0.1)
    how = SamplingParams(temperature=0, max_tokens=20, detokenize=False, ignore_eos=True)
    found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], how, use_tqdm=False)
    print("FOUND", json.dumps([list(one.outputs[0].token_ids) for one in found]))
"""


def small(rule: str) -> AtlasForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 258, "initializer_range": 0.3, "bos_token_id": 256, "eos_token_id": 256}
    return AtlasForCausalLM(AtlasConfig.preset("nano", rule=rule, **sizes)).eval()


@pytest.mark.parametrize("rule", ["gated-deltanet", "titans", "atlas"])
def test_pages_hold_a_state(rule: str) -> None:
    mixer = small(rule).model.layers[0].mixer
    with torch.no_grad():
        pages = StatePages(mixer.initial_state(1))
        states = mixer(torch.randn(3, 21, mixer.dim))[1]
    pages.bind_kv_cache(torch.zeros(5, 1, 1, pages.nbytes, dtype=torch.int8))
    pages.write(torch.tensor([4, 0, 2]), states)
    for read, state in zip(pages.read(torch.tensor([2, 4])).tensors(), states.tensors(), strict=True):
        assert torch.equal(read, state[[2, 0]])


@pytest.mark.parametrize("rule", ["gated-deltanet", "titans"])
def test_texts_are_those_of_generate(rule: str, tmp_path: Path) -> None:
    """Of more prompts than are read at once, in pieces of 32 tokens."""
    model, random = small(rule), torch.Generator().manual_seed(1)
    model.save_pretrained(tmp_path / "model")
    prompts = [torch.randint(0, 255, (1, n), generator=random) for n in LENGTHS]
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 257}
    expected = [model.generate(ids, **options)[0, ids.shape[1] :].tolist() for ids in prompts]
    (tmp_path / "engine.py").write_text(ENGINE)
    given = str([ids[0].tolist() for ids in prompts])
    command = [sys.executable, str(tmp_path / "engine.py"), str(tmp_path / "model"), given]
    said = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert f"FOUND {expected}" in said.stdout, said.stderr[-2000:]
