"""megatron.data.gpt_dataset of Megatron-DeepSpeed."""


def build_train_valid_test_datasets(*args, **kwargs):
    raise AssertionError("Megatron-DeepSpeed's own datasets were built")
