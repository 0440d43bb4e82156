"""Fixtures of every test here."""

from support.left_behind import hook_log, machine_unchanged

__all__ = ["hook_log", "machine_unchanged"]
