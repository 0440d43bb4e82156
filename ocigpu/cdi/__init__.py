"""The Container Device Interface (CDI): specifications read, checked, resolved, injected, generated and kept fresh.

A specification is handled as plain JSON data with canonical field names ("spec" in names of variables).

* read: ``document`` (``yaml_child``), then ``check`` (``values``, ``names``, ``versions``);
* given to containers: ``request``, ``registry`` (``cache``), ``inject``;
* generated: ``sources`` make a ``draft`` with ``edits``, ``generate`` a specification of it, ``write`` a file;
  ``refresh`` keeps that up to date;
* for people: ``compare``, ``transform``;
* hooks of specifications: ``hook_words``, ``hook_plan``, ``hook_command``.
"""
