"""Readers of what is true of the host: they read, and change nothing."""
