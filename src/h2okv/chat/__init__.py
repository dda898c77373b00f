"""A conversation on one cache."""
