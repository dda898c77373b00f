"""What people measure h2okv with: evaluation, analysis, benchmarks, and their commands.

It is part of the distribution h2okv and imports that package's public modules only, which
pyproject.toml lists.
"""
