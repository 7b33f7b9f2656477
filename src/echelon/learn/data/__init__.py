"""From text to batches: sources are read and tokenized into shards once, then fed in a fixed order.

Read in this order: `readers` (what is a document, in each format), `source` (which files), `tokenizer`, `instruction`
(what examples become), `tokenize` (in parallel processes), `writing` and `sinks` (into shards, resumable), `shards`
(the files, and the windows cut from them), `packing` (samples that share a sequence), `catalog` (the manifest),
`prepare` (all of that as one cached step), `prepared` (what it made, opened), `order` (which sample when), `loader`
(batches for one rank), `feed` (those of a run, read ahead), `own_batches` (batches from lists of token ids). Nothing
here calls torch.distributed, and only these last three import torch.
"""
