"""A drill: the user's own recipe, small, with every fault that a long run meets done to it on purpose."""
