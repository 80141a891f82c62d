"""`python -m atlas_memory` is `atlas`."""

import sys


def main() -> int:
    """Run the command, if what it needs is installed."""
    try:
        from atlas_memory.cli import main as command

        return command()
    except ModuleNotFoundError as error:
        extras = "dashboard" if error.name == "streamlit" else "train,report"
        print(f"atlas: {error.name} is not installed: pip install 'atlas-memory[{extras}]'", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before the command began
        print("atlas: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the folder in which `python -m` was called, whose files are not to be taken for modules
    sys.exit(main())
