"""Which files under a folder are text to be read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

PREPARED = "prepared.json"  # in a folder of `atlas data prepare`, written last: without it the folder is not finished
# Folders of the standard library that hold tests, other people's code or generated tables.
_LEFT_OUT = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "ensurepip", "pydoc_data", "encodings"}
)


def shown(name: str) -> str:
    """The name of a file as text that can be written and drawn, whether it is UTF-8 or not."""
    return name.encode("utf-8", "replace").decode()


def files_under(root: Path, unreadable: Callable[[OSError], None]) -> list[str]:
    """Relative paths of the files under `root`, sorted within each folder; without hidden ones, prepared folders and
    runs. Links to folders are followed, and each folder is entered once. `unreadable` is told of those that cannot be,
    which are left out."""
    return list(_walk(root, frozenset(), unreadable))


def library_files(root: Path) -> list[str]:
    """Relative paths of the Python standard library's own source, where `root` is its folder."""
    return [name for name in _walk(root, _LEFT_OUT) if _is_library_source(name)]


def _walk(root: Path, left_out: frozenset[str], unreadable: Callable[[OSError], None] | None = None) -> Iterator[str]:
    been = {os.path.realpath(root)}

    def enters(path: Path) -> bool:
        if path.name.startswith((".", "__pycache__")) or path.name in left_out or _is_ours(path):
            return False
        real = os.path.realpath(path)
        new = real not in been
        been.add(real)
        return new

    for folder, subfolders, files in os.walk(root, onerror=unreadable, followlinks=True):
        subfolders[:] = [name for name in sorted(subfolders) if enters(Path(folder) / name)]
        for path in (Path(folder) / name for name in sorted(files) if not name.startswith(".")):
            if os.path.isfile(path) or not os.path.exists(path):  # no pipe and no device, which may never end
                yield path.relative_to(root).as_posix()


def _is_ours(folder: Path) -> bool:
    """Whether it is a prepared text, or the folder of a run, whose logs would be read as tables of text."""
    has = {name for name in (PREPARED, "run.yaml", "data.json") if os.path.isfile(folder / name)}
    return PREPARED in has or len(has) == 2


def _is_library_source(name: str) -> bool:
    return name.endswith(".py") and not name.rpartition("/")[2].startswith("_sysconfigdata")
