"""Jobs and servers on a Ray cluster."""
