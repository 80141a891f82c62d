"""Named memories in a folder, of which the last used ones stay loaded."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

from atlas_memory.models import Memory

ENDING = ".memory"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class MemoryFolder:
    """The files `NAME.memory` of a folder, all of one model.

    What is saved lies on the disk before `save` returns, so leaving the loaded ones loses nothing. A file that another
    process has replaced is read again.

    Args:
        folder: Made, if it does not exist.
        model: Whose memories they are.
        max_loaded: How many stay loaded at most; the least recently used is dropped.
    """

    def __init__(self, folder: Path, model: Any, max_loaded: int = 64) -> None:
        self.folder, self.model, self.max_loaded = folder, model, max_loaded
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{str(folder)!r} is a file: name the folder of the memories")
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f".*{ENDING}.*.partial"):  # by a process that was killed
            left.unlink(missing_ok=True)
        self._loaded: OrderedDict[str, tuple[tuple[int, int, int], Memory]] = OrderedDict()
        self._lock = threading.Lock()

    def path(self, name: Any) -> Path:
        """The file of a name. ValueError unless it is letters, digits, dots, dashes and underscores alone."""
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name.endswith(ENDING):
            raise ValueError(
                f"{str(name)[:100]!r} cannot name a memory: a name has up to 100 letters, digits, dots, dashes and "
                f"underscores, of which the first is a letter or digit, and no ending {ENDING}"
            )
        return self.folder / f"{name}{ENDING}"

    def names(self) -> list[str]:
        """Of all memories, sorted."""
        found = (path.name.removesuffix(ENDING) for path in self.folder.glob(f"*{ENDING}"))
        return sorted(name for name in found if _NAME.fullmatch(name))

    def load(self, name: Any) -> Memory:
        """The memory of a name. FileNotFoundError if there is none; ValueError if it is damaged or of another model."""
        path = self.path(name)
        if not path.is_file():
            raise FileNotFoundError(f"there is no memory {name!r}: GET /v1/memories lists them")
        with self._lock:
            now = _stamp(path)
            stamp, memory = self._loaded.get(name, (None, None))
            if memory is None or stamp != now:
                memory = Memory.load(path, self.model)
            self._keep(name, now, memory)
            return memory

    def save(self, name: str, memory: Memory) -> None:
        """Write a memory, whole or not at all. OSError where that is not possible."""
        path = self.path(name)
        with self._lock:
            memory.save(path)
            self._keep(name, _stamp(path), memory)

    def _keep(self, name: str, stamp: tuple[int, int, int], memory: Memory) -> None:
        self._loaded[name] = stamp, memory
        self._loaded.move_to_end(name)
        while len(self._loaded) > self.max_loaded:
            self._loaded.popitem(last=False)


def _stamp(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size
