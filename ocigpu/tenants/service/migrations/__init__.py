"""Alembic's scripts for the store: what makes its tables, and brings older ones forward.

A service of the version before may still run beside a new one (a rolling update), so a revision only adds: what is no
longer used goes a version later.
"""
