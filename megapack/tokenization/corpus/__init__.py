"""Reading: what the user named -> files -> shards of pieces -> blocks of documents.

- inputs: paths, globs and folders -> input files, in one order; their bytes, decompressed
- documents: many documents as one flat buffer; faults, counted; training, validation and test
- tables, readers: a document becomes part of a piece here: files -> shards of pieces -> blocks of
  documents, of parquet and Arrow (tables), JSON Lines and text
"""
