"""Names from the user -> input files -> shards of pieces -> blocks of documents.

- inputs: paths, globs and folders -> input files in one order; decompression
- documents: many documents as one flat buffer; counts of faulty documents; dataset splits
- tables, readers: parquet and Arrow (tables), JSON Lines and text (readers)
"""
