"""The key of a group's connections: random bytes that only its ranks know, and what they prove with it.

Rank 0 draws the key and sends it over the caller's own process group, never through the rendezvous store: whoever reaches the
store can read and write there.
"""

import hashlib
import hmac

PROOF_BYTES = 32
KEY_BYTES = 32


class JobKey:
    """Makes and checks proofs (HMAC-SHA256).

    >>> key = JobKey(bytes(32))
    >>> key.unseal("failed/1", key.seal("failed/1", "out of memory"))
    'out of memory'
    >>> key.unseal("failed/1", b"out of memory") is None
    True
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def proof(self, *parts: bytes) -> bytes:
        """The proof that whoever sent these parts knows the key."""
        made = hmac.new(self._secret, digestmod=hashlib.sha256)
        for part in parts:
            made.update(len(part).to_bytes(8, "little") + part)
        return made.digest()

    def proves(self, proof: bytes, *parts: bytes) -> bool:
        """Whether the proof is that of these parts."""
        return hmac.compare_digest(proof, self.proof(*parts))

    def derived(self, name: str) -> "JobKey":
        """The key of another meeting of the same ranks."""
        return JobKey(self.proof(name.encode()))

    def seal(self, place: str, words: str) -> bytes:
        """The words with a proof that a rank wrote them for this place of the store."""
        return self.proof(place.encode(), words.encode()) + words.encode()

    def unseal(self, place: str, raw: bytes) -> str | None:
        """The words that a rank sealed for this place; None for anything else."""
        proof, words = raw[:PROOF_BYTES], raw[PROOF_BYTES:]
        return words.decode() if self.proves(proof, place.encode(), words) else None
