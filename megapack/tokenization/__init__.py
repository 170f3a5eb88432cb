"""Text in, tokenized documents out. Imports storage.

Three packages; each imports only those before it: ``corpus`` reads files, ``tokenizers`` turn text
into tokens, ``pipeline`` does both for every shard and joins the shards to one dataset.
"""
