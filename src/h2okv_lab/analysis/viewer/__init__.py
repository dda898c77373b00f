"""The viewer: the entries that each policy keeps of a text, step by step, in the browser."""
