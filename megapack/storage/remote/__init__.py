"""Datasets in object stores, read through a local cache that all processes of a node share.

- client: one version of an object, read by ranges
- checksums: ``<prefix>.checksums``, to check each range
- cache: copies of files and blocks on this node
- reader: an open dataset; its .bin as an array
- copies: whole datasets for code that needs local files, and uploads
"""
