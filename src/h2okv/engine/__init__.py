"""The serving engine: requests, scheduling, chunked prefill, sampling; never scores or policies."""
