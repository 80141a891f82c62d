"""Whether memories learn: studies, by name, beside the benchmarks of speed."""

from .alarms import ALARMS
from .needle import NEEDLE
from .orders import ORDERS_STUDY
from .reach import REACH
from .recall import RECALL
from .recipe import RECIPE
from .rewriting import REWRITING
from .study import Study
from .writes import WRITES

OF_MEMORIES = (WRITES, REACH, RECALL, NEEDLE, REWRITING)
OF_TEXT = (ORDERS_STUDY, RECIPE, ALARMS)
STUDIES: dict[str, Study] = {s.name: s for s in (*OF_MEMORIES, *OF_TEXT)}
