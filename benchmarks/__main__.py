"""`python -m benchmarks`."""

import os
import sys

os.environ |= {"TRITON_INTERPRET": "1"} if "--quick" in sys.argv else {}  # before anything imports Triton

from benchmarks.cli import main

if __name__ == "__main__":
    sys.exit(main())
