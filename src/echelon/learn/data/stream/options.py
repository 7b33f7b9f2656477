"""How much of a stream a machine keeps, by the recipe."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from echelon.recipe.document import Recipe


@dataclass(frozen=True)
class StreamOptions:
    """What a machine keeps of a stream: at most `cache_bytes` of tokens. `remote`: `data.prepared_remote`."""

    cache_bytes: int = 20 * 10**9
    remote: str | None = None


def stream_options(recipe: "Recipe") -> StreamOptions | None:
    """What a machine keeps of the text that is prepared while the run trains; None if all is prepared before."""
    if (stream := recipe.data.stream) is None:
        return None
    return StreamOptions(int(stream.cache_gb * 1e9), recipe.data.prepared_remote)
