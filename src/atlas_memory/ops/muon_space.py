"""In which of two spaces, features or outputs, the fast form does Newton-Schulz: that with the fewest multiply-adds.
Both are exact, and muon_steps.py says what they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, cast

from torch import Tensor

from ..rules.optimisers import Muon
from ..rules.rule import Rule
from ..rules.validation import UNBOUNDED, check_size
from .gram_eigenvalues import eigenvalues_cost, eigenvalues_pay
from .newton_schulz import CACHED, gram_cost, saturated_cost, schulz_cost

SPACES = ("features", "outputs")
TOGETHER = 8
"""How many steps of a chunk are computed together, unless more are cheaper."""


class StepGroup(NamedTuple):
    """Steps of a chunk that are computed together.

    Attributes:
        steps: which steps.
        seen: how many window tokens, from the earliest on, the steps are made of.
        first: the first query that reads what the steps leave.
    """

    steps: slice
    seen: int
    first: int

    @property
    def taken(self) -> int:
        """How many steps the group has."""
        return self.steps.stop - self.steps.start


@dataclass(frozen=True)
class MuonSpace:
    """How ``chunkwise`` orthogonalises; the numbers do not depend on it.

    Attributes:
        space: "features" or "outputs"; None: the one with the fewest multiply-adds.
        together: how many steps are computed at a time. An early step sees few tokens of its chunk, so that fewer at a
            time is less work. None: ``TOGETHER``, or more where matrices are so few and small that calls take longer
            than work.
        eigenvalues: whether symmetric matrices go by their eigenvalues; None: where that is faster.

    Raises:
        ValueError: a space that does not exist, or ``together`` below 1.
    """

    space: str | None = None
    together: int | None = None
    eigenvalues: bool | None = None

    def __post_init__(self) -> None:
        if self.space not in (None, *SPACES):
            raise ValueError(f"space must be None or one of {', '.join(SPACES)}, got {self.space!r}")
        if self.together is not None:
            check_size("together, a number of steps,", self.together, UNBOUNDED)

    def at_once(self, matrices: Tensor) -> int:
        """How many steps to compute together, for memories like ``matrices`` ``[batch, heads, rows, columns]``."""
        fit = CACHED // max(1, matrices.numel() * matrices.element_size())
        return max(TOGETHER, fit) if self.together is None else self.together

    def eigenvalues_pay(self, matrix: Tensor) -> bool:
        """Whether symmetric matrices of ``matrix``'s rows, dtype and device go by their eigenvalues."""
        return eigenvalues_pay(matrix) if self.eigenvalues is None else self.eigenvalues

    def of(self, rule: Rule, rows: int, columns: int, taken: int, window: int, eigenvalues: bool = False) -> str:
        """The space for a matrix of ``rows`` and ``columns`` over a chunk with ``window`` window tokens and ``taken``
        steps. ``eigenvalues``: whether symmetric matrices may go by their eigenvalues."""
        if self.space is not None:
            return self.space
        m, f, n, b, muon = rows, columns, window, rule.window.chunk, muon_of(rule)
        of_matrix = (saturated_cost if muon.normalised else schulz_cost)(m, f, muon.steps)
        of_gram = min(gram_cost(m, muon.steps), eigenvalues_cost(m)) if eigenvalues else gram_cost(m, muon.steps)
        features, outputs = n * m * f, 2 * m * m * f + (3 * n + b) * m * f
        for group in step_groups(taken, n, b, rule.every, self.together or TOGETHER):
            seen, left = group.seen, b - group.first
            features += group.taken * (seen * m * f + of_matrix + left * m * f)
            outputs += group.taken * (m * (seen * seen + 2 * seen * m + left * seen + left * m) + of_gram)
        return "features" if features <= outputs else "outputs"


DEFAULT = MuonSpace()
"""Whatever is cheapest."""


def muon_of(rule: Rule) -> Muon:
    """The optimiser of a rule that has Muon."""
    return cast(Muon, rule.optimiser)


def step_groups(taken: int, tokens: int, chunk: int, every: int, together: int) -> list[StepGroup]:
    """The ``taken`` steps of a chunk in groups of ``together``. That saves work, since an early step is made of few of
    the ``tokens`` up to the chunk's end, and a late one is read by few queries."""
    groups = []
    for start in range(0, taken, together):
        stop = min(start + together, taken)
        groups.append(StepGroup(slice(start, stop), tokens - max(chunk - every * stop, 0), every * start))
    return groups
