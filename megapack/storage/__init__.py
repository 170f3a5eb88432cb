"""Documents on disk: Megatron's .bin/.idx, written and read byte for byte. Stands on csrc/core."""
