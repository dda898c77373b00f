"""What a cache does to a model's text: endless streams, and scores on tasks by cache size."""
