"""Speed and memory of H2O beside other caches, against the limit that memory traffic sets."""
