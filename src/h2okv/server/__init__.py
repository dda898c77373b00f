"""The OpenAI-compatible HTTP server: requests and texts, never tensors."""
