"""What holds for the kernels in Triton's interpreter."""

from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _names_put_in_place_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a kernel begins, the interpreter puts its own functions in the place of those of ``triton.language``. It
    does so again at every call of a function within the kernel, which takes most of the time: here at the first call of
    one of each module."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    begin, modules = interpreter.GridExecutor.__call__, set()

    def kernel(executor: Any, *args: Any, **kwargs: Any) -> None:
        modules.clear()
        begin(executor, *args, **kwargs)

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if function.fn.__module__ not in modules:
            modules.add(function.fn.__module__)
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", kernel)
    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)
