"""Reading: what the user named -> files -> shards of pieces -> blocks of documents.

- inputs: paths, globs and folders -> input files, in one order
- shards: input files -> shards of pieces, each piece ``[begin, end)`` of one file
- readers: a document becomes part of a piece here: pieces -> blocks of documents, by jsonl (with
  lines) and tables (parquet, Arrow); streams decompress
- blocks: many documents as one flat buffer; faults: those that may not pass, counted
- split: which documents are for training, validation and test
"""
