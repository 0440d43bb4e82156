"""Measurements that a component's root of trust has signed: their form, and whose signature it is.

Sources: DMTF DSP0274 1.1 (GET_MEASUREMENTS, MEASUREMENTS; the signature is over all of both that comes before it, by
ECDSA with P-384 and SHA-384, two numbers of 48 bytes each); DSP0268 (Certificate: a chain in PEM).

What hardware has yet to confirm: that HGX boards answer in this form outside of confidential computing.

Needs the module cryptography: it is imported where a statement is verified.
"""

import hashlib
import itertools
from typing import Any

MEASUREMENT = "measurement "
ROOT = f"{MEASUREMENT}root"
"""The fact that names who vouches for the measurements: the public key at the end of the chain."""
SIGNATURE = 96
"""Bytes of a signature by ECDSA with the curve P-384, after another nonce and opaque data of a length."""
MAX_CHAIN = 8
_REQUEST = 37
"""Bytes of GET_MEASUREMENTS that asks for a signature: header, nonce, slot."""


def parse_measurements(data: bytes, nonce: bytes) -> dict[str, str]:
    """Return the values in a statement of SPDM 1.1 (request, then answer), by index; the signature is not looked at.

    Raises ValueError for another form, or another nonce.
    """
    request, answer = data[:_REQUEST], data[_REQUEST:]
    count, length = answer[4:5], int.from_bytes(answer[5:8], "little")
    record, rest = answer[8 : 8 + length], answer[8 + length :]
    rest_length = 34 + int.from_bytes(rest[32:34], "little") + SIGNATURE
    if request[1:2] != b"\xe0" or answer[1:2] != b"\x60" or len(record) < length or len(rest) != rest_length:
        raise ValueError("measurements of an unknown form")
    if request[4:36] != nonce:
        raise ValueError("measurements of another or an earlier request")
    found: dict[str, str] = {}
    while record:
        if len(record) < 4:
            raise ValueError("measurements that are cut off")
        size = int.from_bytes(record[2:4], "little")
        block, index = record[4 : 4 + size], record[0]
        value = block[3:]
        if record[1] != 1 or len(block) < max(size, 4) or len(value) != int.from_bytes(block[1:3], "little"):
            raise ValueError(f"measurement {index} of an unknown form")
        if f"{MEASUREMENT}{index}" in found:
            raise ValueError(f"measurement {index} twice")
        found[f"{MEASUREMENT}{index}"] = value.hex() if len(value) <= 64 else hashlib.sha384(value).hexdigest()
        record = record[4 + size :]
    if len(found) != count[0]:
        raise ValueError(f"{len(found)} measurements of {count[0]}")
    return found


def verify_measurements(data: bytes, chain: str) -> tuple[str, str]:
    """Return the SHA-256 of two public keys: of the component, and of who vouches for it at the end of its chain.

    The component's certificate comes first in ``chain`` (PEM), or last; each other one is an authority's.  Whether the
    end is to be trusted is not known here.  Raises ValueError for a chain that is none and a signature of another, and
    ImportError without the module cryptography.
    """
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

    # what the library raises for certificates has no class of its own
    refusals = (
        ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm, x509.DuplicateExtension, x509.ExtensionNotFound,
        x509.InvalidVersion, x509.UnsupportedGeneralNameType,
    )  # fmt: skip
    try:
        if chain.count("-----BEGIN") > MAX_CHAIN:
            raise ValueError(f"more than {MAX_CHAIN}")  # before any of them is read
        found = x509.load_pem_x509_certificates(chain.encode())
        if len(found) > 1 and found[0].subject == found[1].issuer:
            found.reverse()
        for one, issuer in itertools.pairwise(found):
            one.verify_directly_issued_by(issuer)
            if not issuer.extensions.get_extension_for_class(x509.BasicConstraints).value.ca:
                raise ValueError("a certificate whose issuer is not an authority")
        key: Any = found[0].public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
            raise ValueError("the key is none of P-384")
        fingerprints = _fingerprint(key), _fingerprint(found[-1].public_key())
    except refusals as error:
        why = str(error) or "a certificate that its issuer has not signed"
        raise ValueError(f"measurements whose certificates form no chain: {why}") from error
    numbers = (int.from_bytes(data[-SIGNATURE:-48]), int.from_bytes(data[-48:]))
    try:
        key.verify(encode_dss_signature(*numbers), data[:-SIGNATURE], ec.ECDSA(hashes.SHA384()))
    except InvalidSignature as error:
        raise ValueError("measurements with a signature that is not the component's") from error
    return fingerprints


def _fingerprint(key: Any) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()
