"""The cache in other people's evaluation harnesses: lm-evaluation-harness, and what HELM shares."""
