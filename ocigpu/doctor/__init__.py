"""``ocigpu doctor``: what is wrong with a host's GPU containers, with the evidence and the commands that put it right.

:mod:`~ocigpu.doctor.host` reads (below a root, so that a simulated host shows every fault), the modules ``driver``,
``nodes``, ``specs``, ``engines``, ``system`` and ``settings`` judge, :mod:`~ocigpu.doctor.findings` names every check.
Nothing here writes, but for the archive that was asked for.
"""
