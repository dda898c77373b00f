"""How transformers models reach the H2O cache."""
