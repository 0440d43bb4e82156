"""Whom a client of TLS trusts."""

import ssl


def client_context(cafile: str = "", cadata: str = "") -> ssl.SSLContext:
    """Return what checks a server by the authorities in a file or a text of PEM; by the system's where both are "".

    Raises OSError, also as ssl.SSLError.
    """
    return lenient(ssl.create_default_context(cafile=cafile or None, cadata=cadata or None))


def lenient(context: ssl.SSLContext) -> ssl.SSLContext:
    """Check as Python up to 3.12, Go and curl do: names, dates and signatures, not the presence of extensions.

    From 3.13 on a new context has VERIFY_X509_STRICT (docs.python.org, ssl.create_default_context).  It refuses
    authorities without a key usage or key identifier, which clusters, board controllers and companies often have.
    """
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context
