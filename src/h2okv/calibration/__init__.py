"""What is measured of a model, once: budgets by layer and head, and how keys are packed."""
