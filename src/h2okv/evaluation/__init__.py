"""What a cache does to a model's text: streams far beyond the trained window, scored as they go."""
