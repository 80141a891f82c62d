"""What the steps of one matrix over one chunk take in multiply-adds: a count beside each fast counterpart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..mathematics.rules import Rule
from .fast_newton_schulz import gram_cost, saturated_cost, schulz_cost
from .grid import tokens_before
from .spaces import TOGETHER, Spaces, muon_of, step_groups


class Count(NamedTuple):
    """Whether the kernel among the window tokens is needed, and that of the queries with them; the multiply-adds of
    reading, and those of making the matrix once at a token of the chunk."""

    keys: bool
    queries: bool
    reading: int
    making: int


@dataclass(frozen=True)
class Work:
    """One matrix: its rule and sizes; the multiply-adds of applying it to a token, of adding a token to it and of one
    entry of the kernel; whether its updates solve a triangular system; and the multiply-adds of applying what it fades
    to, 0 for zero."""

    rule: Rule
    rows: int
    columns: int
    apply: int
    write: int
    inner: int
    solves: bool
    home: int
    spaces: Spaces

    @property
    def chunk(self) -> int:
        """Tokens."""
        return self.rule.window.chunk

    @property
    def window(self) -> int:
        """Window tokens."""
        return self.rule.window.chunk + tokens_before(self.rule.window)

    @property
    def taken(self) -> int:
        """Steps."""
        return self.chunk // self.rule.every

    @property
    def reads(self) -> bool:
        """Whether the queries see steps of the chunk."""
        return self.rule.window.read != "frozen"

    @property
    def made(self) -> int:
        """How often the matrix is made at a token: W_b, and of a retention that settles A_b; W_1 and A_1 of a lag
        token."""
        retention = self.rule.retention
        return (4 if retention.lag else 2) if retention.settles else 1

    @property
    def updates(self) -> int:
        """Tokens, or pairs."""
        return self.chunk * self.rule.window.size if self.rule.live else self.window


def plain_work(work: Work) -> Count:
    """Of gradient descent, the delta step and momentum."""
    rule, b, n, m, reads = work.rule, work.chunk, work.window, work.rows, work.reads
    total = b * work.updates * m if reads else 0
    if not rule.live and (rule.optimiser.has_momentum or rule.window.size > 1):  # else R is at hand
        total += (b + work.made if reads else work.made) * work.taken * n
    if rule.optimiser.has_momentum and reads:
        total += b * work.taken + b * work.apply
    if work.solves:
        total += work.updates**2 * m // 2 + n * work.home  # the system
        total += b * work.taken + n * work.apply if rule.optimiser.has_momentum else 0
        total += 2 * n * work.write + n * work.apply if rule.retention.lag else 0
    return Count(work.solves, reads, total, n * work.write)


def muon_work(work: Work) -> Count:
    """Of Muon, in the space that ``chunkwise`` takes."""
    rule, n, m, f = work.rule, work.window, work.rows, work.columns
    count = (_in_outputs if work.spaces.of(rule, m, f, work.taken, n) == "outputs" else _in_features)(work)
    if rule.optimiser.shows and work.reads:  # what waits: of the chunk's updates, and of S before it
        count = count._replace(queries=True, reading=count.reading + work.chunk * (work.updates * m + work.apply))
    if not work.solves:
        return count
    system = work.updates**2 * m // 2 + n * work.apply  # and what plain steps changed before
    return count._replace(keys=True, reading=count.reading + system)


def _in_outputs(work: Work) -> Count:
    b, n, m, f, steps = work.chunk, work.window, work.rows, work.columns, muon_of(work.rule).steps
    total = n * work.apply + m * m * f + (b * work.apply if work.reads else 0)
    making = n * work.write + m * m * f
    for group in step_groups(work.taken, n, b, work.rule.every, work.spaces.together or TOGETHER):
        total += group.taken * (group.seen * m * (group.seen + m) + gram_cost(m, steps))
        total += group.taken * (b - group.first) * m * (group.seen + m) if work.reads else 0
        making += group.taken * group.seen * m * m
    return Count(True, work.reads, total, making)


def _in_features(work: Work) -> Count:
    b, m, f, muon = work.chunk, work.rows, work.columns, muon_of(work.rule)
    of_matrix = (saturated_cost if muon.bounded else schulz_cost)(m, f, muon.steps)
    total = 0
    for group in step_groups(work.taken, work.window, b, work.rule.every, work.spaces.together or TOGETHER):
        reading = (b - group.first) * m * f if work.reads else 0
        total += group.taken * (group.seen * m * f + of_matrix + reading)
    return Count(work.solves, False, total, 0)
