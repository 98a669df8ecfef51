"""What the one switch derives from a recipe: `exactrl plan`."""

from __future__ import annotations

from typing import Any

from exactrl.config import Config
from exactrl.config.algorithms import aggregation_of
from exactrl.launch.build import contract_of
from exactrl.model.config import find_model, read_config
from exactrl.model.qwen3 import require_leaves_divide
from exactrl.rl.environment import environment


def _kernels(device: str, exact: bool) -> str:
    if device == "cuda" and not exact:
        return "plain: cuBLAS as it comes, Flash Attention 3 where installed, exact-v1 kernels for the rest"
    if device == "cuda":
        return "exact-v1 kernel, linears and attention as certified on this machine"
    return "exact-v1 numba kernel" if exact else "plain torch"


def plan(config: Config) -> dict[str, Any]:
    """What the one switch derives from a recipe; JSON-ready. Reads the model's config.json, loads no weights."""
    contract, exact = contract_of(config), config.contract.true_on_policy
    model = read_config(find_model(config.model.path))
    ops = ("embedding", "linear", "rms_norm", "qkv (QK-norm, RoPE)", "attention", "swiglu", "head, logprob, sampling")
    require_leaves_divide(model, contract.k_leaves)
    samples = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    return {
        "true_on_policy": exact,
        "contract": {
            "name": contract.name, "digest": contract.digest, "k_leaves": contract.k_leaves,
            "residual_dtype": contract.residual_dtype,
            "kv_split": contract.kv_split, "kv_block": contract.kv_block, "vocab_block": contract.vocab_block,
        },
        "device": config.run.device,
        "kernels": dict.fromkeys(ops, _kernels(config.run.device, exact)),
        "rollout": {"backend": config.rollout.backend, "model_dtype": config.model.dtype, "logprobs": "while decoding"},
        "train": {
            "backend": config.train.backend, "master_dtype": "float32", "compute_dtype": config.model.dtype,
            "old_logprobs": "the rollout's own (no extra pass)" if exact else "recomputed before each update",
            "algorithm": config.train.algorithm,
            "reference": (config.train.reference or config.model.path) if config.train.kl_coef else "none",
            "loss_aggregation": aggregation_of(config.train.algorithm, config.train.loss_aggregation),
            "samples_per_step": samples, "minibatch_size": samples // config.train.minibatches,
        },
        "check": {
            "on_mismatch": "stop, exit 3" if exact else "report only",
            "audited_steps": f"1 and every {config.run.audit_every}th" if config.run.audit_every else "none",
        },
        "environment": environment()["variables"],
        "layout": {"tensor_parallel": 1, "context_parallel": 1, "pipeline_parallel": 1, "data_parallel": 1},
    }  # fmt: skip
