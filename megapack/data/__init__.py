"""SampleIndex and documents in, batches out: schedule, gather, loader. Torch begins here."""
