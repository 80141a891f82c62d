"""`python -m atlas_memory` is `atlas`."""

import sys

from atlas_memory.cli import main

if __name__ == "__main__":
    sys.exit(main())
