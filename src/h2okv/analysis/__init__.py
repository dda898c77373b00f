"""The paper's observations and its theorem as measurements on any model and text."""

from h2okv.analysis.measurements import MEASUREMENTS, Measurement
from h2okv.analysis.sample import Sample, make_sample
from h2okv.analysis.study import Study
from h2okv.analysis.theory.bound import measure_theory
from h2okv.analysis.trace import Trace, follow

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
