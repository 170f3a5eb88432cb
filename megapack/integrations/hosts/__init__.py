"""One module per trainer: it passes megapack's rows to that trainer under the trainer's names."""
