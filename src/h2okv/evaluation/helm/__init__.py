"""The cache in HELM (crfm-helm), which an environment of its own has installed."""
