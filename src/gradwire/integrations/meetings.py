"""Names of quorums and meetings. A number is not enough: a lighthouse that is started again counts from the beginning."""

import hashlib
from typing import Any

__all__ = ["meeting_name", "quorum_key"]


def quorum_key(quorum: Any) -> tuple[int, tuple[str, ...]]:
    """The number and the members of a quorum. As long as both stay, its members need not meet again."""
    return quorum.quorum_id, tuple(sorted(quorum.replica_ids))


def meeting_name(quorum: Any) -> str:
    """The name under which the members of a quorum meet in a store: the same on all of them. Other members have another one, as
    have those of another step."""
    members = hashlib.sha256("\n".join(sorted(quorum.replica_ids)).encode()).hexdigest()[:16]
    return f"quorum {quorum.quorum_id}/{quorum.max_step}/{members}"
