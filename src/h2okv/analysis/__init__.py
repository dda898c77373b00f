"""The paper's observations and its theorem as measurements on any model and text."""

from h2okv.analysis.eviction_trace import Trace, follow
from h2okv.analysis.measurements import MEASUREMENTS, Measurement
from h2okv.analysis.study import Sample, Study, make_sample
from h2okv.analysis.theory import measure_theory

__all__ = [
    "MEASUREMENTS",
    "Measurement",
    "Sample",
    "Study",
    "Trace",
    "follow",
    "make_sample",
    "measure_theory",
]
