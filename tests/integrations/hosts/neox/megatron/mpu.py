"""megatron.mpu of GPT-NeoX on one rank."""


def broadcast_data(keys, data, datatype):
    for key in keys:
        assert data[key].dtype == datatype, f"{key} is {data[key].dtype}"
    return {key: data[key].clone() for key in keys}
