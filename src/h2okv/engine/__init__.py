"""Jobs of many prompts: batches, memory, and where weights and caches lie; never scores."""
