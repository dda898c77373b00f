"""One file for each evaluation task."""
