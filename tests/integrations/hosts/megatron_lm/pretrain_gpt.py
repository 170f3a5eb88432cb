"""The wiring of Megatron-LM 0.16's pretrain_gpt.py: names from modules, functions by globals."""

from functools import partial

from beside_the_script import Tokenizer
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import get_blend_from_list
from megatron.training import get_args, pretrain


def get_batch(data_iterator, vp_stage=None):
    batch = next(data_iterator)
    return batch["tokens"], None, None, None, None, None


def is_dataset_built_on_rank(vp_stage=None):
    return True


def forward_step(data_iterator, model):
    tokens, _, _, _, _, packed_seq_params = get_batch(data_iterator)
    bounds = None if packed_seq_params is None else packed_seq_params.cu_seqlens_q.tolist()
    return tokens, bounds


def train_valid_test_datasets_provider(train_val_test_num_samples, vp_stage=None):
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=args.seq_length,
        blend=get_blend_from_list(args.data_path),
        split="100,0,0",
        path_to_cache=args.data_cache_path,
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    built_here = partial(is_dataset_built_on_rank, vp_stage=vp_stage)
    return BlendedMegatronDatasetBuilder(
        GPTDataset, train_val_test_num_samples, built_here, config
    ).build()


if __name__ == "__main__":
    train_valid_test_datasets_provider.is_distributed = True
    pretrain(train_valid_test_datasets_provider, lambda: None, "gpt", forward_step)
