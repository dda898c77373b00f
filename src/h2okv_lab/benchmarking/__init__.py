"""Speed and memory of H2O and other caches, against the limit of memory traffic."""
