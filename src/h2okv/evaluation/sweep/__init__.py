"""Policies by budgets by tasks, from one file."""
