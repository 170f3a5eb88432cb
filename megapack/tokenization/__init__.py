"""Text in, documents out. Stands on storage.

Three wings, each of which imports only those before it: ``corpus`` reads, ``tokenizers`` turn what
was read into tokens, ``pipeline`` does both for every shard and makes one dataset of them.
"""
