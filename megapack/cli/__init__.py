"""megapack-build: parse, call, report. Stands on storage, tokenization and packing; no torch."""
