"""What an example is made of, and what it becomes: texts of turns first, then token ids with their targets."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class EncodedDocument:
    """One text that the model is fed. Both `[n]`; `targets` says of each token whether it is learned, as the one that
    is predicted."""

    ids: npt.NDArray[np.int64]
    targets: npt.NDArray[np.bool_]
