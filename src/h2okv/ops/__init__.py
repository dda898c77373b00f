"""Attention that also returns what each key received. Tensors in, tensors out."""
