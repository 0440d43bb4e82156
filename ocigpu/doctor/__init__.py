"""``ocigpu doctor``: finds the problems of a host's GPU containers, with evidence and the commands that fix them.

:mod:`~ocigpu.doctor.host` reads (below a root, so that a simulated host shows every fault), the modules ``driver``,
``nodes``, ``specs``, ``engines``, ``system`` and ``settings`` judge, :mod:`~ocigpu.doctor.findings` names every check.
Nothing here writes, except for a requested archive.
"""
