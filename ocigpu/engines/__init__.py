"""Container engines: where their configuration is, what it says of ocigpu, and how it is changed and changed back.

Reading: :mod:`~ocigpu.engines.places` knows files, programs and daemons, :mod:`~ocigpu.engines.status` what they say.
Planning: :mod:`~ocigpu.engines.configure` and :mod:`~ocigpu.engines.remove` make a plan and write nothing;
:mod:`~ocigpu.engines.wanted` has the settings of each engine, :mod:`~ocigpu.engines.record` what is kept for the
removal.
Texts: :mod:`~ocigpu.engines.document` changes values in a text and nothing else in it, by
:mod:`~ocigpu.engines.json_text`, :mod:`~ocigpu.engines.toml_text` or :mod:`~ocigpu.engines.template`.
Doing: :mod:`~ocigpu.engines.checker` asks the engine, :mod:`~ocigpu.engines.carry_out` carries a plan out,
:mod:`~ocigpu.engines.files` replaces files.
"""
