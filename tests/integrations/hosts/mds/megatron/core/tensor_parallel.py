"""megatron.core.tensor_parallel of Megatron-DeepSpeed on one rank."""


def broadcast_data(keys, data, datatype):
    for key in keys:
        assert data[key].dtype == datatype, f"{key} is {data[key].dtype}"
    return {key: data[key].clone() for key in keys}
