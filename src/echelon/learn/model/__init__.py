"""Decoders from `transformers`: their parts, their construction on meta, their weights."""
