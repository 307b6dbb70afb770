"""Fairness between tenants by tokens served: the virtual token counter of Sheng et al. 2024, "Fairness in Serving Large
Language Models", algorithm 2. The tenant with the smallest counter goes first; who was away gets no credit for it."""

from __future__ import annotations

MANY_ABSENT = 1024


class FairShare:
    """Counters of tokens computed. A tenant is present while it has a sequence."""

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._present: dict[str, int] = {}
        self._floor = 0

    def served_tokens(self, tenant: str) -> int:
        return self._served[tenant]

    def enter(self, tenant: str) -> None:
        """One more sequence of the tenant. One that was absent starts no lower than the least served of the others."""
        if tenant not in self._present:
            if self._present:
                self._floor = max(self._floor, min(self._served[t] for t in self._present))
            self._served[tenant] = max(self._served.get(tenant, 0), self._floor)
        self._present[tenant] = self._present.get(tenant, 0) + 1

    def leave(self, tenant: str) -> None:
        """One sequence less. An absent tenant's debt is kept while it means anything and not too many are kept."""
        self._present[tenant] -= 1
        if self._present[tenant]:
            return
        del self._present[tenant]
        if len(self._served) > len(self._present) + MANY_ABSENT:
            self._served = {t: n for t, n in self._served.items() if t in self._present}

    def charge(self, tenant: str, tokens: int) -> None:
        self._served[tenant] += tokens
