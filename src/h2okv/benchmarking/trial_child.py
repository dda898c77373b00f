"""The process that `h2okv.benchmarking.trial` starts: a trial on stdin, its peak on stdout."""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import asdict

from transformers.utils import logging as transformers_logging

from h2okv.benchmarking.trial import Trial, peak_in_this_process


def main() -> None:
    """Reads one trial, runs it, and prints one JSON object."""
    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    print(json.dumps(asdict(peak_in_this_process(Trial.from_json(sys.stdin.read())))))


if __name__ == "__main__":
    main()
