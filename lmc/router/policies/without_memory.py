"""What policies have in common that note nothing about requests or engines."""

from lmc.router.policy import PromptRequest


class WithoutMemory:
    """The notes of a policy that takes none."""

    def sent(self, request: PromptRequest, engine: str) -> None:
        """Nothing depends on what was sent."""

    def forget(self, engine: str) -> None:
        """Nothing is known of engines."""
