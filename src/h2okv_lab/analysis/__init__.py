"""The paper's observations and its theorem as measurements on any model and text."""

from h2okv_lab.analysis.study import Study as Study
from h2okv_lab.analysis.study import make_sample as make_sample
