"""Container engines: where their configuration is, what it says of ocigpu, and how it is changed and changed back.

:mod:`~ocigpu.engines.status` reads; :mod:`~ocigpu.engines.configure` says which settings make an engine know ocigpu,
:mod:`~ocigpu.engines.document` changes texts and nothing else in them, :mod:`~ocigpu.engines.files` replaces files.
"""
