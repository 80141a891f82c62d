"""How many multiply-adds the steps of one matrix take over one chunk: a count for each fast form of an optimiser
(dispatch.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..rules.rule import Rule
from .chunk_layout import tokens_before
from .muon_space import TOGETHER, MuonSpace, muon_of, step_groups
from .newton_schulz import gram_cost, saturated_cost, schulz_cost
from .triangular import WindowPairs


class Count(NamedTuple):
    """What the steps of one matrix need.

    Attributes:
        keys: whether the kernel of the window tokens with one another is needed.
        queries: whether the kernel of the queries with the window tokens is needed.
        reading: multiply-adds of answering all queries.
        making: multiply-adds of making the matrix itself once, at one token of the chunk.
    """

    keys: bool
    queries: bool
    group_state: int
    making: int


@dataclass(frozen=True)
class Work:
    """One matrix whose work is counted.

    Attributes:
        rule, rows, columns, spaces: its rule and sizes, and how Muon orthogonalises.
        apply: multiply-adds of applying it to a token.
        write: multiply-adds of adding a token to it.
        inner: multiply-adds of one entry of the kernel.
        back: multiply-adds of back-propagating the errors of one token to it, where errors are summed first and the
            sums back-propagated (``_summed_first`` in chunk.py); else 0.
        solves: whether its updates solve a triangular system (triangular.py).
        home: multiply-adds of applying its decay target; 0 if it decays to zero.
    """

    rule: Rule
    rows: int
    columns: int
    apply: int
    write: int
    inner: int
    back: int
    solves: bool
    decay_target: int
    muon_space: MuonSpace

    @property
    def chunk(self) -> int:
        """Tokens in a chunk, b."""
        return self.rule.window.chunk

    @property
    def window(self) -> int:
        """Window tokens of a chunk, N."""
        return self.rule.window.chunk + tokens_before(self.rule.window.chunk, self.rule.window.size)

    @property
    def taken(self) -> int:
        """Steps in a chunk."""
        return self.chunk // self.rule.every

    @property
    def reads(self) -> bool:
        """Whether the queries read a memory in which steps of their own chunk are."""
        return self.rule.window.read != "frozen"

    @property
    def made(self) -> int:
        """How many matrices are made in a chunk: W after the last token; of a retention with a mirror map also A; and
        with a lag token both after the first token, too."""
        retention = self.rule.retention
        return (4 if retention.lag else 2) if retention.has_mirror_map else 1

    @property
    def updates(self) -> int:
        """How many updates there are: one for each window token, or with online errors one for each pair
        (triangular.py)."""
        return self.chunk * self.rule.window.size if self.rule.online else self.window


def plain_work(work: Work) -> Count:
    """The count of gradient descent, the delta step and momentum. Letters as in fast_weight.py."""
    rule, b, n, m, reads = work.rule, work.chunk, work.window, work.rows, work.reads
    total = b * work.updates * m if reads else 0
    if not rule.online and (
        rule.optimiser.has_momentum or rule.window.size > 1
    ):  # R; under online errors it is cost.py's
        total += (b + work.made if reads else work.made) * work.taken * n
    if rule.optimiser.has_momentum and reads:
        total += b * work.taken + b * work.apply
    if work.solves:
        total += _system(work) + n * work.decay_target
        total += b * work.taken + n * work.apply if rule.optimiser.has_momentum else 0
        total += 2 * n * work.write + n * work.apply if rule.retention.lag else 0
    return Count(work.solves, reads, total, n * (work.write + work.back))


def _system(work: Work) -> int:
    """The triangular systems of the updates: one, or with pairs one a block, and what all blocks before it have written
    (triangular.py)."""
    size, m = work.rule.window.size, work.rows
    if not work.rule.online or size == 1:
        return work.updates**2 * m // 2
    pairs, total = WindowPairs(size, work.chunk), 0
    paths = 2 if work.rule.optimiser.has_momentum and not work.rule.optimiser.estimates_change else 1
    for start in range(0, work.chunk, pairs.block):
        tokens = min(pairs.block, work.chunk - start)
        total += (tokens * size) ** 2 * m // 2
        total += paths * (tokens + size - 1) * (start + size - 1) * m if start else 0
    return total


def muon_work(work: Work) -> Count:
    """The count of Muon, in the space that ``chunkwise`` takes."""
    rule, n, m, f = work.rule, work.window, work.rows, work.columns
    count = (_in_outputs if work.muon_space.of(rule, m, f, work.taken, n) == "outputs" else _in_features)(work)
    if rule.optimiser.read_pending and work.reads:  # the pending update S: the chunk's updates, and S before the chunk
        count = count._replace(
            queries=True, group_state=count.group_state + work.chunk * (work.updates * m + work.apply)
        )
    if not work.solves:
        return count
    of_carried = n * work.apply  # what D before the chunk (step.py) answers
    return count._replace(keys=True, group_state=count.group_state + _system(work) + of_carried)


def _in_outputs(work: Work) -> Count:
    """Muon's in output space (muon_steps.py)."""
    b, n, m, f, steps = work.chunk, work.window, work.rows, work.columns, muon_of(work.rule).steps
    total = n * work.apply + m * m * f + (b * work.apply if work.reads else 0)
    making = n * work.write + m * m * f
    for group in step_groups(work.taken, n, b, work.rule.every, work.muon_space.together or TOGETHER):
        total += group.taken * (group.seen * m * (group.seen + m) + gram_cost(m, steps))
        total += group.taken * (b - group.first) * m * (group.seen + m) if work.reads else 0
        making += group.taken * group.seen * m * m
    return Count(True, work.reads, total, making)


def _in_features(work: Work) -> Count:
    """Muon's in feature space (muon_steps.py)."""
    b, m, f, muon = work.chunk, work.rows, work.columns, muon_of(work.rule)
    of_matrix = (saturated_cost if muon.normalised else schulz_cost)(m, f, muon.steps)
    total = 0
    for group in step_groups(work.taken, work.window, b, work.rule.every, work.muon_space.together or TOGETHER):
        group_state = (b - group.first) * m * f if work.reads else 0
        total += group.taken * (group.seen * m * f + of_matrix + group_state)
    return Count(work.solves, False, total, 0)
