"""`python -m atlas_memory` is `atlas`."""

import sys


def main() -> int:
    try:
        from atlas_memory.cli import main as command

        return command()
    except ModuleNotFoundError as error:
        extras = {"streamlit": "dashboard", "fastapi": "serve", "openai": "serve", "uvicorn": "serve"}
        extra = extras.get(error.name or "", "train,report")
        print(f"atlas: {error.name} is not installed: pip install 'atlas-memory[{extra}]'", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before the command began
        print("atlas: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the current folder, whose files are not modules
    sys.exit(main())
