"""Megatron-DeepSpeed's package: global arguments."""

ARGS = None


def get_args():
    return ARGS
