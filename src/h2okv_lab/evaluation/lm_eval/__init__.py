"""lm-evaluation-harness with H2O caches."""
