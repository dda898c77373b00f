"""The viewer: what each policy keeps of a text, step by step, on a page in the browser."""
