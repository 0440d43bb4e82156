"""The commands of ``ocigpu``, a module each; :mod:`ocigpu.cli` puts them together."""
