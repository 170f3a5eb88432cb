"""Other people's trainers: one file per host, names translated at the border. Stands on data."""
