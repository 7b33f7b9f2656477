"""From text to batches: sources are read and tokenized into shards once, then fed in a fixed order.

Read in this order: `readers` (what is a document, in each format), `source` (which files), `tokenizer`, `tokenize` (in
parallel processes), `writing` (into shards, resumable), `shards` (the files, the manifest, the windows cut from them),
`prepare` (all of that as one cached step), `order` (which sample when), `loader` (batches for one rank). Nothing here
uses torch.distributed, and only `loader` imports torch.
"""
