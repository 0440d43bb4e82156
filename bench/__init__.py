"""Measurements: bare runc against ocigpu, and optionally another shim beside them. Run with ``make bench``."""
