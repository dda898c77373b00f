"""The paper's observations and its theorem as measurements on any model and text."""

from h2okv.analysis.eviction_trace import Trace as Trace
from h2okv.analysis.eviction_trace import follow as follow
from h2okv.analysis.measurements import MEASUREMENTS as MEASUREMENTS
from h2okv.analysis.measurements import Measurement as Measurement
from h2okv.analysis.study import Sample as Sample
from h2okv.analysis.study import Study as Study
from h2okv.analysis.study import make_sample as make_sample
from h2okv.analysis.theory import measure_theory as measure_theory
