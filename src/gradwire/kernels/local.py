"""What a local update is made of."""

from typing import NamedTuple


class LocalUpdate(NamedTuple):
    """out = weight - rate * (own * gradient + momentum * mean) / (sqrt(kept * squares + taken * gradient^2) + eps), the
    quotient only where there are squares, and the mean's term where there is one."""

    rate: float
    own: float = 1.0
    momentum: float = 0.0
    kept: float = 0.0
    taken: float = 0.0
    eps: float = 0.0
