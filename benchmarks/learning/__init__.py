"""Whether memories learn: studies, by name, beside the benchmarks of speed."""

from .language import LANGUAGE
from .reach import REACH
from .recall import CAPACITY, RECALL
from .study import Study
from .writes import WRITES

STUDIES: dict[str, Study] = {s.name: s for s in (WRITES, REACH, RECALL, CAPACITY, LANGUAGE)}
