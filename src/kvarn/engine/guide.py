"""What a constrained answer needs of the engine: which tokens may come next, and when nothing more may."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Guide(Protocol):
    """Follows one answer. Its methods never raise: what goes wrong stands in `error`, and ends that answer only."""

    @property
    def done(self) -> bool:
        """Nothing but the end may follow."""
        ...

    @property
    def error(self) -> str | None:
        """Why it cannot go on; None while it can."""
        ...

    def fork(self) -> Guide:
        """An independent copy in the same state."""
        ...

    def allowed(self) -> Tensor | None:
        """Mask [V] bool of the tokens that may come next; None for all."""
        ...

    def accept(self, token_id: int) -> None:
        """The answer goes on with this token."""
        ...
