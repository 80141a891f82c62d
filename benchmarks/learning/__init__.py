"""Whether memories learn: studies, by name, beside the benchmarks of speed."""

from .alarms import ALARMS
from .collapse import COLLAPSE
from .copying import COPYING
from .holds import HOLDS
from .language import LANGUAGE
from .narrow import NARROW
from .needle import NEEDLE
from .orders import ORDERS_STUDY
from .reach import REACH
from .recall import CAPACITY, RECALL
from .recipe import RECIPE
from .regression import REGRESSION
from .rewriting import REWRITING
from .study import Study
from .writes import WRITES

OF_MEMORIES = (WRITES, HOLDS, REACH, RECALL, NARROW, NEEDLE, CAPACITY, REWRITING, REGRESSION, COPYING)
OF_TEXT = (LANGUAGE, ORDERS_STUDY, RECIPE, ALARMS, COLLAPSE)
STUDIES: dict[str, Study] = {s.name: s for s in (*OF_MEMORIES, *OF_TEXT)}
