"""Variable-length attention behind one function; the backend is chosen once, at start."""

from __future__ import annotations

from megapack.attention.experts import LoadBalancing, token_mask
from megapack.attention.flex import tree_mask
from megapack.attention.model_check import check_architecture, check_positions
from megapack.attention.problem import AttentionNeeds, ScoreRule, TreeSegments, alibi_slopes
from megapack.attention.routes import check_replay, record_routes, replay_routes, routes_shape
from megapack.attention.sequence_parallel import check_sequence_parallel, over_ranks
from megapack.attention.transformers_interface import (
    ATTENTION_NAME,
    register,
    tree_arguments,
    varlen_arguments,
)
from megapack.attention.varlen import (
    BACKENDS,
    Choice,
    choose_backend,
    refusals,
    tree_attention,
    varlen_attention,
)

__all__ = [
    "ATTENTION_NAME",
    "BACKENDS",
    "AttentionNeeds",
    "Choice",
    "LoadBalancing",
    "ScoreRule",
    "TreeSegments",
    "alibi_slopes",
    "check_architecture",
    "check_positions",
    "check_replay",
    "check_sequence_parallel",
    "choose_backend",
    "over_ranks",
    "record_routes",
    "refusals",
    "register",
    "replay_routes",
    "routes_shape",
    "token_mask",
    "tree_arguments",
    "tree_attention",
    "tree_mask",
    "varlen_arguments",
    "varlen_attention",
]
