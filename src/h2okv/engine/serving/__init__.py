"""Continuous batching: many requests on a fixed number of cache rows."""
