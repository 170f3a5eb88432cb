"""Other people's trainers: one adapter per host, which maps its names. Stands on data."""
