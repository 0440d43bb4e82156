"""Simulated hosts and the demo."""
