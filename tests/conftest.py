"""What holds for every test. The Triton kernels run in Triton's interpreter, chosen before anything imports
triton; and memory that was asked for and not filled is not a number, so that whoever reads it is found."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

torch.use_deterministic_algorithms(True, warn_only=True)
torch.utils.deterministic.fill_uninitialized_memory = True
