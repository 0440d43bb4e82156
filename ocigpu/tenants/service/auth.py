"""Authentication: by an API key of ours, or a token of the operator's identity provider (OpenID Connect).

The tenancy comes from the credential.  Sources: RFC 6750 (bearer), RFC 7519 and RFC 8725 (tokens, and their pitfalls),
OpenID Connect Discovery 1.0, RFC 7517 (keys).
"""

import asyncio
import http.client
import ipaddress
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import jwt

from ocigpu.core.errors import SettingsError, quoted
from ocigpu.tenants.service.models import SCOPES, TENANT_SCOPES, is_tenancy
from ocigpu.tenants.service.problems import Refusal
from ocigpu.tenants.service.store import CaasStore

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Signatures by public keys; a symmetric one or none would let anybody who has the public key sign."""
MAX_TOKEN = 16 << 10
KEYS_SECONDS, RETRY_SECONDS = 600.0, 30.0
"""How long keys of the provider are taken for its own; how soon it is asked again, at most."""
LAST = 253402300799.0
"""The end of the year 9999, which a time can have at most (RFC 3339)."""
LEEWAY = 30
"""Seconds by which clocks may differ."""


class Principal(NamedTuple):
    """The authenticated caller.

    ``tenancy``: None for an admin; ``expires``: seconds since 1970; ``issuer``: of a token.
    """

    actor: str
    tenancy: str | None
    scopes: tuple[str, ...]
    expires: float | None = None
    issuer: str = ""

    @property
    def payer(self) -> str:
        """Whose share of the service is used: the tenancy's, with all of its credentials, or the admin's own."""
        return self.tenancy or self.actor

    def may(self, scope: str) -> bool:
        """Whether this is permitted."""
        return scope in self.scopes or "admin" in self.scopes

    def require(self, scope: str) -> None:
        """Raise Refusal (scope_missing) unless this is permitted."""
        if not self.may(scope):
            raise Refusal("scope_missing", f"scope {scope} is needed: {SCOPES[scope]}")

    def choose_tenancy(self, named: str | None) -> str:
        """Return the tenancy of a request that names one, or none; raises Refusal."""
        if self.tenancy is None:
            if not named:
                raise Refusal("tenancy_missing")
            return named
        if named and named != self.tenancy:
            raise Refusal("tenancy_mismatch", f"the request names {quoted(named)}, the credential is of {self.tenancy}")
        return self.tenancy

    def narrow(self, named: str) -> str:
        """Return the tenancy whose items a list shows; "" for all tenancies, which only an admin may see."""
        return named if self.tenancy is None else self.choose_tenancy(named)


class OidcOptions(NamedTuple):
    """``claim``: which one names the tenancy."""

    issuer: str
    audience: str
    claim: str = "tenancy"
    algorithms: tuple[str, ...] = ("RS256", "ES256", "EdDSA")


Fetch = Callable[[str], Awaitable[bytes]]
_UNREADABLE = (
    OSError, http.client.HTTPException, jwt.PyJWTError, SettingsError, ValueError, KeyError, TypeError, AttributeError,
    RecursionError,
)  # fmt: skip
"""What reading keys can raise, whatever the provider answers."""


class TokenReader:
    """Reads tokens of one provider.  ``fetch``: gets a document; raises OSError.

    Raises SettingsError (OCIGPU-CAAS-1) for options that would accept unsigned tokens, or keys that a man in the middle
    could exchange.
    """

    def __init__(self, options: OidcOptions, fetch: Fetch, clock: Callable[[], float] = time.monotonic) -> None:
        self.options, self._fetch, self._clock = options, fetch, clock
        check_provider_url(options.issuer)
        if not options.audience:
            raise SettingsError("OCIGPU-CAAS-1", "--oidc-audience: needed with --oidc-issuer", "name this service's")
        if bad := [name for name in options.algorithms if name not in ALGORITHMS]:
            hint = f"any of {', '.join(ALGORITHMS)}"
            raise SettingsError("OCIGPU-CAAS-1", f"--oidc-algorithm {quoted(bad[0])}: not a signature", hint)
        self._keys: dict[str, jwt.PyJWK] = {}
        self.read_at = self.tried_at = -KEYS_SECONDS
        self._problem = ""
        self._reading = asyncio.Lock()

    async def read(self, token: str) -> Principal:
        """Return whose a token is; raises Refusal."""
        options = self.options
        try:
            header = jwt.get_unverified_header(token)
            if header.get("alg") not in options.algorithms:
                raise jwt.InvalidAlgorithmError("the signature's algorithm is not accepted")
            if header.get("crit"):
                raise jwt.InvalidTokenError("it has critical extensions")
            key = await self._find_key(str(header.get("kid") or ""))
            if key.algorithm_name != header["alg"]:  # a key is for one algorithm: RFC 8725 section 3.1
                raise jwt.InvalidAlgorithmError("the key is for another algorithm")
            claims = jwt.decode(
                token, key.key, algorithms=[header["alg"]], audience=options.audience, issuer=options.issuer,
                leeway=LEEWAY, options={"require": ["exp", "iss", "aud", "sub"]},
            )  # fmt: skip
        except (jwt.PyJWTError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise Refusal("credential_invalid", f"token: {error}") from error
        return self._principal(claims)

    def _principal(self, claims: Mapping[str, Any]) -> Principal:
        tenancy, subject = claims.get(self.options.claim), claims["sub"]
        if not isinstance(tenancy, str) or not is_tenancy(tenancy):
            raise Refusal("credential_invalid", f"token: claim {self.options.claim} is not the name of a tenancy")
        said = claims.get("scope") or ""  # words, by RFC 8693 section 4.2; some providers have a list
        if not isinstance(said, str | list):
            raise Refusal("credential_invalid", "token: claim scope is neither words nor a list")
        asked = said.split() if isinstance(said, str) else said
        ours = tuple(scope for scope in TENANT_SCOPES if scope in asked)
        # a provider without our scopes grants a tenant's; no token grants admin
        scopes = ours or (
            () if any(str(word).partition(":")[0] in ("containers", "logs") for word in asked) else TENANT_SCOPES
        )
        return Principal(
            f"oidc:{str(subject)[:200]}", tenancy, scopes, min(float(claims["exp"]), LAST), self.options.issuer
        )

    async def _find_key(self, number: str) -> jwt.PyJWK:
        """Return the provider's key with this id; an unknown id makes it read the keys again, at a limited rate."""
        # one request asks the provider, once in a while; those whose key is known do not wait for its answer
        if number not in self._keys if self._reading.locked() else self._is_due(number):
            async with self._reading:
                if self._is_due(number):
                    await self._refresh()
        if number not in self._keys and self._problem:  # the credential cannot be verified now
            raise Refusal("provider_unavailable", self._problem, retry_after=int(RETRY_SECONDS))
        if number not in self._keys:
            raise jwt.InvalidKeyError("its key is not one of the provider's")
        return self._keys[number]

    def _is_due(self, number: str) -> bool:
        now = self._clock()
        wanted = number not in self._keys or now - self.read_at >= KEYS_SECONDS
        return wanted and now - self.tried_at >= RETRY_SECONDS

    async def _refresh(self) -> None:
        now = self.tried_at = self._clock()
        try:
            self._keys = await self._read_keys()
            self.read_at, self._problem = now, ""
        except _UNREADABLE as error:
            self._problem = f"the provider's keys cannot be read: {error}"
            if now - self.read_at >= 10 * KEYS_SECONDS:
                self._keys = {}

    async def _read_keys(self) -> dict[str, jwt.PyJWK]:
        issuer = self.options.issuer
        document = json.loads(await self._fetch(f"{issuer.rstrip('/')}/.well-known/openid-configuration"))
        if document["issuer"] != issuer:
            raise ValueError(f"the provider calls itself {quoted(str(document['issuer']))}")
        check_provider_url(str(document["jwks_uri"]))
        found = {}
        for one in json.loads(await self._fetch(document["jwks_uri"]))["keys"]:
            if one.get("use", "sig") == "sig" and one.get("kty") in ("RSA", "EC", "OKP"):
                try:
                    found[str(one.get("kid") or "")] = jwt.PyJWK(one)
                except jwt.PyJWTError:  # an unknown future kind of key is not an error
                    continue
        return found


def check_provider_url(url: str) -> None:
    """Raise SettingsError (OCIGPU-CAAS-1) if a man in the middle could answer in the name of this place."""
    parts = urlsplit(url)
    if parts.scheme == "https" and parts.hostname:
        return
    try:
        if parts.scheme == "http" and ipaddress.ip_address(parts.hostname or "").is_loopback:
            return
    except ValueError:
        pass
    raise SettingsError("OCIGPU-CAAS-1", f"identity provider {quoted(url)}: not an https address", "use https")


async def read_credential(header: str, store: CaasStore, tokens: Sequence[TokenReader]) -> Principal:
    """Return the caller that this Authorization header identifies.

    Raises Refusal (credential_missing, credential_invalid, provider_unavailable).
    """
    scheme, _, text = header.partition(" ")
    text = text.strip()
    if not header:
        raise Refusal("credential_missing")
    if scheme.lower() != "bearer" or not text or len(text) > MAX_TOKEN or not text.isascii():
        raise Refusal("credential_invalid", "Authorization: not a bearer credential")
    if text.startswith("ocigpu_"):
        key = store.keys.check(text)
        if not key:
            raise Refusal("credential_invalid", "the API key is unknown, revoked or over")
        return Principal(f"key:{key.id}", key.tenancy, key.scopes, key.expires)
    if not tokens:
        raise Refusal("credential_invalid", "only API keys are accepted here")
    return await tokens[0].read(text)


def still_holds(principal: Principal, store: CaasStore) -> bool:
    """Tell whether a credential is still valid, for requests that take long."""
    if principal.expires is not None and principal.expires <= store.clock():
        return False
    kind, _, number = principal.actor.partition(":")
    return kind != "key" or store.keys.find(number) is not None
