"""Which cases of a large grid the default suite takes (marker `part`); `.ci/run` takes the others."""

import math
import re
from collections.abc import Sequence


def choose_part(names: Sequence[str], one_in: int) -> set[str]:
    """One in so many of these names (at least one), so that the words in them differ as much as they can: each time the name
    with the most words that no chosen one has; the first of several.

    A case is named after its parameters, so that nearly every value of each of them is in some case that is chosen.
    """
    words = {name: set(re.split(r"[-\[\] ]", name)) for name in names}
    chosen: set[str] = set()
    seen: set[str] = set()
    for _ in range(math.ceil(len(words) / one_in)):
        name = max((name for name in words if name not in chosen), key=lambda name: len(words[name] - seen))
        chosen.add(name)
        seen |= words[name]
    return chosen
