"""What the progress bar says fits into the terminal, the most important first; elsewhere it is lines."""

import io
import re
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from atlas_memory.train.callbacks import Clock, ProgressBar

LAST = {"step": 123_456, "loss": 2.345, "learning_rate": 1e-3, "held_out_bits_per_byte": 1.234}
STATE: Any = SimpleNamespace(global_step=123_456)
NOTHING: Any = None


class StandingClock(Clock):
    """One whose time does not pass by itself."""

    elapsed = 3600.0


def shown(width: int, terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, color_system=None)
    clock = StandingClock(200_000, None)
    bar = ProgressBar(clock, SimpleNamespace(last=LAST), console, 4096)
    bar.on_train_begin(NOTHING, SimpleNamespace(global_step=123_000), NOTHING)
    clock.elapsed = 3660.0
    bar.on_log(NOTHING, STATE, NOTHING)
    bar._bar.refresh()
    bar.close()
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 100, 160])
def test_the_important_is_readable(width: int) -> None:
    said = shown(width, True)
    for part in ("62%", "step 123,456 of 200,000", "loss 2.345", "31,130 tokens/s", "2:47:52 left"):
        assert part in said, part
    assert ("held out 1.234 bits/byte" in said, "rate 1.0e-03" in said) == (width > 80, width > 100)
    assert max(len(line) for line in re.split(r"[\r\n]", said)) <= width + len("\x1b[2K\x1b[?25l")


def test_lines_elsewhere() -> None:
    assert shown(80, False).strip() == (
        "training  62%  step 123,456 of 200,000  loss 2.345 nats/token  held out 1.234 bits/byte  31,130 tokens/s  "
        "rate 1.0e-03  1:01:00 passed, 2:47:52 left"
    )
