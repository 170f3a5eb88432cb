"""Text in, documents out: corpus readers, tokenizers, the parallel build. Stands on storage."""
