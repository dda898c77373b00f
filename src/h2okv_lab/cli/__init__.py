"""The commands eval, lm-eval, stream, bench, analyze and view, which `h2okv.cli` finds by name."""
