"""Whether memories learn: studies, by name, beside the benchmarks of speed."""

from .alarms import ALARMS
from .collapse import COLLAPSE
from .copying import COPYING
from .holds import HOLDS
from .language import LANGUAGE
from .needle import NEEDLE
from .orders import ORDERS_STUDY
from .reach import REACH
from .recall import CAPACITY, RECALL
from .recipe import RECIPE
from .study import Study
from .writes import WRITES

STUDIES: dict[str, Study] = {
    s.name: s
    for s in (WRITES, HOLDS, REACH, RECALL, NEEDLE, CAPACITY, COPYING, LANGUAGE, ORDERS_STUDY, RECIPE, ALARMS, COLLAPSE)
}
