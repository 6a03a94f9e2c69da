"""Seeds of requests, derived from their names, so that equal states sample equal tokens."""

import hashlib


def derived_seed(seed: int, *names: str | int) -> int:
    """Return a seed of 62 bits, which depends only on `seed` and `names`."""
    key = "/".join(str(part) for part in (seed, *names))
    # Two bits less than the digest, because servers take the seed as a signed number.
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) >> 2
