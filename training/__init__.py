"""Training of the bundled model: tokenizer, data, training, export and model card."""
