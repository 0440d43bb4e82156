"""The Container Device Interface (CDI): specifications read, checked, resolved, injected, generated and kept fresh.

A specification is handled as plain JSON data with canonical field names ("spec" in names of variables).
"""
