"""Models and caches larger than memory, and jobs over files of prompts."""
