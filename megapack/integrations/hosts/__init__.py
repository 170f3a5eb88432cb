"""One module per trainer: it passes megapack's rows to the trainer in the trainer's format."""
