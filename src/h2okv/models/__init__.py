"""A model's name to a folder and a loaded model: Hub ids, GGUF files, packed weights."""
