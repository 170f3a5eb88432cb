"""Datasets in object stores, read through a local cache that all processes of a node share.

- client: one version of an object, read by ranges
- checksums: ``<prefix>.checksums``, which tells that a range is right
- cache: what is here already, shared by the processes of a node
- reader: a dataset, opened; its .bin as an array
- copies: whole datasets, for what works on local files, and uploads
"""
