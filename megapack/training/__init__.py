"""Models, loss, engine, checkpoints and evaluation. Stands on data and attention."""
