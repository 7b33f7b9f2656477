"""Training data that is prepared while the run trains (`data.stream`), from this machine or an object store.

The text is cut into chunks, each of which is tokenized by itself. `addresses` finds and fetches their files, `chunks`
prepares and keeps chunks, `dataset` reads samples from them, and `window_order` shuffles the samples.
"""
