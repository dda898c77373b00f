"""Everything that runs on a Ray cluster."""
