"""The Triton kernels run in Triton's interpreter, which must be chosen before anything imports triton."""

import os

os.environ["TRITON_INTERPRET"] = "1"
