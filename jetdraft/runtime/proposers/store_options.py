"""Options of methods that draft from the responses in a store."""

from __future__ import annotations

from dataclasses import dataclass

from jetdraft.errors import OptionError
from jetdraft.runtime.history.store import ResponseStore
from jetdraft.runtime.proposers.method import MethodOptions
from jetdraft.runtime.proposers.parts import Parts


@dataclass(frozen=True)
class StoreOptions(MethodOptions):
    """`user` names whose responses are drafted from, and who keeps the new response.

    StoreOptions(user="ann")
    """

    user: str = ""

    def store(self, parts: Parts) -> ResponseStore | None:
        """The user's responses; None without a store.

        Raises `OptionError` for a user without a store.
        """
        if parts.store is not None:
            return parts.store.of(self.user)
        if self.user:
            raise OptionError(
                f"user {self.user!r} needs a store; give --store FILE (store=) too",
                "drafting",
            )
        return None
