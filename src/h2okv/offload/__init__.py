"""Batch jobs with models larger than memory (`h2okv batch`): weights are streamed."""
