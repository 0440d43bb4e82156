"""Whom a client of TLS trusts."""

import ssl


def client_context(cafile: str = "", cadata: str = "") -> ssl.SSLContext:
    """Return what checks a server by the authorities in a file or a text of PEM; by the system's where both are "".

    Raises OSError, also as ssl.SSLError.
    """
    return lenient(ssl.create_default_context(cafile=cafile or None, cadata=cadata or None))


def lenient(context: ssl.SSLContext) -> ssl.SSLContext:
    """Check as up to Python 3.12, and as Go and curl do: names, dates and signatures, not which extensions there are.

    From 3.13 on a new context has VERIFY_X509_STRICT (docs.python.org, ssl.create_default_context): it refuses
    authorities without a key usage or key identifier, as those of clusters, board controllers and companies often are.
    """
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context
