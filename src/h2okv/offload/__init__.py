"""Batch jobs with models larger than memory (`h2okv batch`): weights and caches are streamed."""
