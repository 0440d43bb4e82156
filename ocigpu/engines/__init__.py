"""Container engines: the places of their configuration, their entries for ocigpu, changes and their removal.

Reading: :mod:`~ocigpu.engines.places` finds files, programs and daemons, :mod:`~ocigpu.engines.status` reads their
state.  Planning: :mod:`~ocigpu.engines.configure` and :mod:`~ocigpu.engines.remove` make a plan and write nothing;
:mod:`~ocigpu.engines.wanted` contains the settings of each engine, :mod:`~ocigpu.engines.record` the data for the
removal.  Texts: :mod:`~ocigpu.engines.document` changes only given values in a text, by
:mod:`~ocigpu.engines.json_text`, :mod:`~ocigpu.engines.toml_text` or :mod:`~ocigpu.engines.template`.  Doing:
:mod:`~ocigpu.engines.checker` lets the engine check, :mod:`~ocigpu.engines.carry_out` carries a plan out,
:mod:`~ocigpu.engines.files` replaces files.
"""
