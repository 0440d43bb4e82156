"""The Container Device Interface (CDI): specifications read, checked, resolved, injected, generated and kept fresh.

A specification is handled as plain JSON data with canonical field names ("spec" in names of variables).

* read: ``document`` (``yaml_child``), then ``check`` (``values``, ``versions``);
* resolved for containers: ``registry`` (``cache``), ``conditions``; :mod:`ocigpu.bundle.inject` gives them;
* generated: ``edits`` of what a vendor's folder offers, ``generate`` a specification of it, ``write`` a file;
  ``refresh`` and ``watch`` keep that up to date;
* for people: ``compare``, ``transform``, ``loader_links``;
* hooks of specifications: ``hook_words``; :mod:`ocigpu.entry` carries them out.
"""
