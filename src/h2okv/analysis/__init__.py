"""The paper's observations and its theorem as measurements on any model and text."""
