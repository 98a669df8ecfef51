"""Assembles concrete engines, trainers and tasks from settings: what the command line and the Python API call."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from exactrl.algo.algorithm import get_algorithm
from exactrl.config import Config, SftConfig, load_recipe, to_toml
from exactrl.config.algorithms import aggregation_of
from exactrl.contract import CONTRACTS, Contract, get_contract, noise_key
from exactrl.engine.engine import Engine as NativeEngine
from exactrl.errors import ConfigError, EnvironmentProblem, ExactRLError, Interrupted, ModelError, UsageError
from exactrl.model.config import find_model, read_config
from exactrl.model.folder import load_model
from exactrl.model.qwen3 import Qwen3, require_leaves_divide
from exactrl.model.weights import compute_digest
from exactrl.ops import Ops
from exactrl.ops.cpu.jit import require_denormals
from exactrl.parity import check as ladder
from exactrl.parity.oracle import Oracle
from exactrl.parity.subject import Subject
from exactrl.report import write_report
from exactrl.rl import loop
from exactrl.rl.collect import Collecting
from exactrl.rl.environment import environment
from exactrl.rl.interrupt import StopRequest
from exactrl.rl.resume import Checkpoint, checkpoints, newest_complete, read_rows, require_same_run
from exactrl.rl.run_folder import RunFolder
from exactrl.rl.shaping import Shaping
from exactrl.sync.memory import sync
from exactrl.tasks.chat import Message, load_chat_template
from exactrl.tasks.data import load_prompts
from exactrl.tasks.files import resolve_path, split_slice
from exactrl.tasks.rewards import resolve_reward
from exactrl.tasks.task import DataTask
from exactrl.tasks.tokenizer import Tokenizer, eos_ids, load_tokenizer
from exactrl.train.checkpoint import STATE, export_model, file_digest, load_checkpoint, read_state, save_checkpoint
from exactrl.train.schedule import learning_rate
from exactrl.train.trainer import Trainer
from exactrl.types import Completion, Request, SamplingParams

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
Progress = Callable[[str, int, int], None]
# Below this many parameters torch's part of an exact step (optimizer, gathers) is faster on one thread than on several
# that compete with the kernels' own pool.
SMALL_MODEL = 50_000_000


class Events(Protocol):
    """Who watches a run: see cli/progress.py."""

    def on_start(self, info: dict[str, Any]) -> None: ...
    def on_progress(self, phase: str, done: int, total: int) -> None: ...
    def on_step(self, metrics: dict[str, Any]) -> None: ...
    def on_end(self, summary: dict[str, Any]) -> None: ...
    def on_note(self, text: str) -> None: ...


class Silent:
    """Events that nobody watches."""

    def on_start(self, info: dict[str, Any]) -> None:
        pass

    def on_progress(self, phase: str, done: int, total: int) -> None:
        pass

    def on_step(self, metrics: dict[str, Any]) -> None:
        pass

    def on_end(self, summary: dict[str, Any]) -> None:
        pass

    def on_note(self, text: str) -> None:
        pass


def contract_of(config: Config | SftConfig) -> Contract:
    c = config.contract
    residual = "float32" if config.model.dtype == "float32" else c.residual_dtype
    return get_contract(c.name, k_leaves=c.k_leaves, residual_dtype=residual)


def build_task(config: Config, folder: Path) -> tuple[DataTask, Tokenizer, dict[str, Any]]:
    """Prompts and rewards, tokenizer, and counts per set: rows, unique (different prompts), prompts, and the rows left
    out: filtered, repeated (dedupe).

    Raises DataError, ConfigError, ModelError.
    """
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise ModelError(f"{folder}: training needs the model's tokenizer.json")
    data = config.data
    keys: dict[str, Any] = {
        "prompt_key": data.prompt_key, "label_key": data.label_key, "label_pattern": data.label_pattern,
        "id_key": data.id_key, "max_prompt_tokens": data.max_prompt_tokens, "overlong_prompts": data.overlong_prompts,
        "dedupe": data.dedupe, "render": chat_renderer(config, folder) if data.apply_chat_template else None,
    }  # fmt: skip
    loaded = {name: load_prompts(path, tokenizer, **keys) for name, path in [("", data.train), *data.eval.items()]}
    evals = {name: found.prompts for name, found in loaded.items() if name}
    counts = {
        name or "train": {
            "rows": found.num_rows, "unique": found.num_unique, "prompts": len(found.prompts),
            "filtered": found.num_filtered, "repeated": found.num_repeated,
        }
        for name, found in loaded.items()
    }  # fmt: skip
    reward = resolve_reward(config.reward.name, config.reward.timeout_s, config.reward.key)
    stop = tuple(config.rollout.stop_token_ids) or tokenizer.eos_ids
    task = DataTask(
        loaded[""].prompts, evals, tokenizer, reward, seed=config.rollout.seed, shuffle=data.shuffle,
        stop_token_ids=stop,
    )  # fmt: skip
    return task, tokenizer, counts


def chat_renderer(config: Config, folder: Path) -> Callable[[Sequence[Message]], str]:
    """Messages to text with the model's own chat template. Raises ModelError where it has none."""
    template = load_chat_template(folder)
    if template is None:
        raise ModelError(
            f"{folder}: data.apply_chat_template needs a chat template, and there is neither a chat_template.jinja nor "
            "a chat_template in tokenizer_config.json; add one, or use prompts that are plain text"
        )
    return partial(template.render, enable_thinking=config.data.enable_thinking)


def _require_servable(engine: NativeEngine, task: DataTask, settings: loop.Plan) -> None:
    """Raises RequestError, before a run folder exists, when the longest prompt could never be served."""
    longest = task.longest_prompt()
    engine.require_servable(Request(longest.id, longest.token_ids, settings.collecting.sampling))


def check_command(config: Config) -> str:
    """The ladder on a run's model, under the run's own contract."""
    c = config.contract
    extra = f" --k-leaves {c.k_leaves}" if c.k_leaves != 1 else ""
    extra += f" --residual-dtype {c.residual_dtype}" if c.residual_dtype != "bfloat16" else ""
    return f"exactrl check {config.model.path} --dtype {config.model.dtype}{extra}"


def build_engine(config: Config, folder: Path) -> NativeEngine:
    r = config.rollout
    ops = Ops(contract_of(config), config.contract.true_on_policy)
    model = load_model(folder, ops, DTYPES[config.model.dtype], trainable=False)
    return NativeEngine(
        model, max_concurrent=r.max_concurrent, kv_tokens=r.kv_tokens, chunk_tokens=r.chunk_tokens,
        max_model_tokens=min(model.config.max_positions, config.data.max_prompt_tokens + r.max_new_tokens),
    )  # fmt: skip


def build_trainer(config: Config, folder: Path) -> Trainer:
    t = config.train
    ops = Ops(contract_of(config), config.contract.true_on_policy)
    model = load_model(folder, ops, DTYPES[config.model.dtype], trainable=True)
    lr_at = partial(
        learning_rate, peak=t.lr, total_steps=config.run.steps, schedule=t.lr_schedule, warmup_steps=t.warmup_steps,
        min_ratio=t.min_lr_ratio,
    )  # fmt: skip
    return Trainer(
        model, get_algorithm(t.algorithm, t.dual_clip), lr=t.lr, betas=t.betas, weight_decay=t.weight_decay,
        grad_clip=t.grad_clip, minibatches=t.minibatches, max_tokens_per_microbatch=t.max_tokens_per_microbatch,
        loss_aggregation=aggregation_of(t.algorithm, t.loss_aggregation), clip_low=t.clip_low, clip_high=t.clip_high,
        kl_coef=t.kl_coef if t.kl_in == "loss" else 0.0, kl_estimator=t.kl_estimator,
        reference=build_reference(config, model) if t.kl_coef else None,
        entropy_coef=t.entropy_coef, max_new_tokens=config.rollout.max_new_tokens, lr_at=lr_at,
        recompute_old_logprobs=not config.contract.true_on_policy,
    )  # fmt: skip


def build_reference(config: Config, policy: Qwen3) -> Qwen3:
    """The frozen reference policy, under the same contract. Raises ModelError for one of another vocabulary."""
    folder = find_model(config.train.reference or config.model.path)
    reference = load_model(folder, policy.ops, policy.dtype, trainable=False)
    if reference.config.vocab_size != policy.config.vocab_size:
        raise ModelError(
            f"{folder}: the reference policy has {reference.config.vocab_size} vocabulary entries, the policy "
            f"{policy.config.vocab_size}; their logprobs cannot be compared"
        )
    return reference


def loop_plan(config: Config, stop_token_ids: tuple[int, ...]) -> loop.Plan:
    r, t, run = config.rollout, config.train, config.run
    return loop.Plan(
        steps=run.steps, audit_every=run.audit_every, eval_every=run.eval_every, kl=t.kl_coef > 0,
        collecting=Collecting(
            prompts_per_step=r.prompts_per_step, samples_per_prompt=r.samples_per_prompt,
            sampling=SamplingParams(r.max_new_tokens, r.temperature, stop_token_ids), seed=r.seed,
            on_reward_error=config.reward.on_error,
            max_rounds=t.max_sampling_rounds if t.dynamic_sampling else 1,
        ),
        shaping=Shaping(
            max_length=r.max_new_tokens, overlong_cache=t.overlong_cache, overlong_filter=t.overlong_filter,
            kl_in_reward=t.kl_coef if t.kl_in == "reward" else 0.0, kl_estimator=t.kl_estimator,
        ),
    )  # fmt: skip


def train(config: Config, events: Events | None = None, *, resume: bool = False) -> dict[str, Any]:
    """Runs a recipe; returns a summary with `out`, `report` and totals. Raises ExactRLError.

    The run folder is created only when model, data and reward are all in order. `resume` goes on from the newest
    complete checkpoint of run.out, bit for bit as if the run had never stopped; without one it starts anew.
    """
    events = events or Silent()
    begin = time.perf_counter()
    require_denormals()
    folder = find_model(config.model.path)
    path = Path(config.run.out)
    checkpoint = find_checkpoint(config, path, events.on_note) if resume else None
    if checkpoint and checkpoint.step == config.run.steps:
        return _already_complete(config, path, events, begin)
    task, tokenizer, counts = build_task(config, folder)
    engine, trainer = build_engine(config, folder), build_trainer(config, folder)
    stop = tuple(config.rollout.stop_token_ids) or tokenizer.eos_ids
    settings = loop_plan(config, stop)
    _require_servable(engine, task, settings)
    identity = run_identity(config, trainer)
    if checkpoint:
        checkpoint.require(identity)
        load_checkpoint(trainer, checkpoint.path, checkpoint.state)
    start = loop.Start(checkpoint.step, checkpoint.cursor) if checkpoint else loop.FROM_SCRATCH
    out = RunFolder(path, go_on_after=start.step if resume else None)
    rows = out.rows
    info = plan(config)
    out.write_text("config.toml", to_toml(config))
    out.write_json("plan.json", info)
    out.write_environment({**environment(), "seed": config.rollout.seed, "data": counts}, start.step)
    oracle = Oracle(strict=config.contract.true_on_policy, bisect_command=check_command(config))
    events.on_start({**info, "data": counts, "resumed_after_step": start.step})

    def on_step(result: loop.StepResult) -> None:
        out.append_metrics(result.metrics)
        out.write_samples(result.step, result.groups)
        rows.append(result.metrics)
        events.on_step(result.metrics)
        every = config.run.checkpoint_every
        if result.step == config.run.steps or (every and result.step % every == 0) or request.requested:
            out.sync_metrics()
            state = {"step": result.step, "cursor": result.cursor, **identity}
            save_checkpoint(trainer, out.checkpoint_path(result.step), state, folder)
            for problem in out.prune_checkpoints(config.run.keep_checkpoints):
                events.on_note(problem)
        if request.requested and result.step < config.run.steps:
            raise KeyboardInterrupt

    threads = torch.get_num_threads()
    if config.contract.true_on_policy and sum(p.numel() for p in trainer.parameters) < SMALL_MODEL:
        torch.set_num_threads(1)
    request = StopRequest(events.on_note)
    try:
        algorithm = get_algorithm(config.train.algorithm)
        with request:
            loop.run(settings, engine, trainer, task, algorithm, oracle, sync, on_step, events.on_progress, start)
    except BaseException as error:
        with suppress(ExactRLError):  # a full disk must not hide why the run ended
            out.write_failure(error, after_step=len(rows))
            write_report(out.path)  # a run that parity stopped says so on its page
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted(
                f"interrupted after step {len(rows)} of {config.run.steps}; go on with --resume; see {out.path}"
            ) from error
        raise
    finally:
        torch.set_num_threads(threads)
        out.close()
    write_report(out.path)
    summary = summary_of(path, rows, begin)
    events.on_end(summary)
    return summary


def find_checkpoint(config: Config, path: Path, note: Callable[[str], None]) -> Checkpoint | None:
    """The checkpoint that a run goes on from, None where it starts anew. Raises CheckpointError for another run's
    folder, UsageError for one that is beyond run.steps already."""
    if not (path / "config.toml").is_file():
        return None
    require_same_run(path, config)
    found = newest_complete(path, read_state, note)
    if found is None:
        note(f"{path} holds no complete checkpoint; the run starts anew")
    elif found.step > config.run.steps:
        raise UsageError(f"{path} is at step {found.step} already, beyond run.steps = {config.run.steps}")
    return found


def run_identity(config: Config, trainer: Trainer) -> dict[str, Any]:
    """What a continued run must share with the one it goes on from, besides its settings."""
    return {
        "contract_digest": trainer.model.ops.contract.digest,
        "data_digest": file_digest(resolve_path(split_slice(config.data.train)[0])),
        "reference_digest": compute_digest(trainer.reference) if trainer.reference else None,
    }


def _already_complete(config: Config, path: Path, events: Events, begin: float) -> dict[str, Any]:
    events.on_note(f"{path} is complete: all {config.run.steps} steps are done")
    if not (path / "report.html").is_file():
        write_report(path)
    summary = summary_of(path, read_rows(path), begin)
    events.on_end(summary)
    return summary


def summary_of(path: Path, rows: Sequence[Mapping[str, Any]], begin: float) -> dict[str, Any]:
    """What a run came to, earlier parts of a resumed one included; seconds are of this process."""
    return {
        "out": str(path),
        "steps": len(rows),
        "compared_tokens": sum(row["train/logprob_compared_tokens"] for row in rows),
        "mismatch_tokens": sum(row["train/logprob_mismatch_tokens"] for row in rows),
        "seconds": time.perf_counter() - begin,
        "report": str(path / "report.html"),
    }


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
        "device": "cpu",
        "kernels": {op: "exact-v1 numba kernel" if exact else "plain torch" for op in ops},
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


class Engine(NativeEngine):
    """The rollout engine on a model folder or bundled name, with text prompts.

        engine = exactrl.Engine("tiny")
        engine.generate(["1+2"], SamplingParams(max_new_tokens=32))

    Without stop_token_ids the model's own end tokens are used. See engine.engine.Engine for the other arguments.
    """

    def __init__(self, model: str, *, dtype: str = "bfloat16", true_on_policy: bool = True, **limits: Any) -> None:
        folder = find_model(model)
        self.tokenizer, self.eos_ids = load_tokenizer(folder), eos_ids(folder)
        ops = Ops(get_contract("exact-v1"), true_on_policy)
        super().__init__(load_model(folder, ops, DTYPES[dtype], trainable=False), **limits)

    def encode(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """Token ids of a prompt; ids pass through. Raises ModelError for text without a tokenizer."""
        if not isinstance(prompt, str):
            return tuple(prompt)
        if self.tokenizer is None:
            raise ModelError("this model folder has no tokenizer.json; give prompts as token ids")
        return tuple(self.tokenizer.encode(prompt))

    def generate(  # type: ignore[override]
        self,
        prompts: Sequence[Request | str | Sequence[int]],
        params: SamplingParams | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        *,
        seed: int = 0,
    ) -> list[Completion]:
        """Completions in order. Prompts are text, token ids (both need `params`), or whole Requests."""
        requests = []
        for i, prompt in enumerate(prompts):
            if isinstance(prompt, Request):
                requests.append(prompt)
                continue
            if params is None:
                raise ConfigError("Engine.generate needs SamplingParams for prompts given as text or ids")
            stop = params.stop_token_ids or self.eos_ids
            sampling = SamplingParams(params.max_new_tokens, params.temperature, stop)
            key = noise_key(seed, "generate", 0, 0, str(i), 0)
            requests.append(Request(str(i), self.encode(prompt), sampling, key))
        return super().generate(requests, on_progress)


def export(run: Path, out: Path, *, step: int | None = None, dtype: str | None = None) -> dict[str, Any]:
    """A run's model as a Hugging Face folder: the newest complete checkpoint, or that of `step`, in the run's dtype
    unless another is asked for. `run` may also be a checkpoint itself. Returns checkpoint, step, dtype, digest.

    Raises UsageError where there is no such checkpoint; CheckpointError, ModelError as export_model.
    """
    config = load_recipe(run / "config.toml") if (run / "config.toml").is_file() else None
    problems: list[str] = []
    if (run / STATE).is_file():
        found: Checkpoint | None = Checkpoint(run, read_state(run))
    elif step is not None:
        path = dict(checkpoints(run)).get(step)
        found = Checkpoint(path, read_state(path)) if path else None
    else:
        found = newest_complete(run, read_state, problems.append)
    if found is None:
        have = ", ".join(str(n) for n, _ in checkpoints(run)) or "none"
        what = f"checkpoint of step {step}" if step is not None else "complete checkpoint"
        raise UsageError("\n".join([f"{run}: no {what} to export; checkpoints there: {have}", *problems]))
    dtype = dtype or (config.model.dtype if config else "bfloat16")
    digest = export_model(found.path, out, Ops(get_contract("exact-v1")), DTYPES[dtype])
    return {"checkpoint": str(found.path), "step": found.step, "dtype": dtype, "compute_digest": digest}


def generate(
    model: str,
    prompts: Sequence[tuple[str, str | list[int]]],
    *,
    samples: int,
    seed: int,
    temperature: float,
    max_new_tokens: int,
    max_concurrent: int,
    kv_tokens: int,
    chunk_tokens: int,
    dtype: str,
    true_on_policy: bool,
    on_progress: Progress,
) -> list[dict[str, Any]]:
    """Rows of `exactrl generate`, prompt-major: id, sample, token_ids, text (None without tokenizer), logprobs
    (float32 array), finish_reason. max_concurrent, kv_tokens and chunk_tokens change no bit."""
    engine = Engine(
        model, dtype=dtype, true_on_policy=true_on_policy, max_concurrent=max_concurrent, kv_tokens=kv_tokens,
        chunk_tokens=chunk_tokens,
    )  # fmt: skip
    params = SamplingParams(max_new_tokens, temperature, engine.eos_ids)
    order = [(name, i, engine.encode(prompt)) for name, prompt in prompts for i in range(samples)]
    requests = [
        Request(f"{name}#{i}", ids, params, noise_key(seed, "generate", 0, 0, name, i)) for name, i, ids in order
    ]
    completions = engine.generate(requests, None, lambda done, total: on_progress("generate", done, total))
    tokenizer = engine.tokenizer
    return [
        {
            "id": name, "sample": i, "token_ids": c.token_ids,
            "text": tokenizer.decode_response(c.token_ids) if tokenizer else None,
            "logprobs": c.logprobs, "finish_reason": c.finish_reason,
        }
        for (name, i, _), c in zip(order, completions, strict=True)
    ]  # fmt: skip


def check(
    model: str,
    *,
    dtypes: Sequence[str] = ("bfloat16", "float32"),
    device: str = "cpu",
    true_on_policy: bool = True,
    seed: int = 0,
    k_leaves: int = 1,
    residual_dtype: str = "bfloat16",
    rungs: Sequence[str] | None = None,
    on_rung: Callable[[ladder.RungResult], None] = lambda result: None,
) -> list[ladder.RungResult]:
    """The parity ladder on a model folder or bundled name; `on_rung` is called after each rung.

    Raises EnvironmentProblem for a device that this version has no kernels for.
    """
    if device != "cpu":
        raise EnvironmentProblem(f"no kernels for device {device!r} yet; use --device cpu")
    require_denormals()
    folder = find_model(model)
    contract = get_contract("exact-v1", k_leaves=k_leaves, residual_dtype=residual_dtype)
    subjects = [subject_of(folder, d, true_on_policy, seed, contract) for d in dtypes]
    return ladder.check(subjects, rungs, on_rung)


def subject_of(
    folder: Path, dtype: str, true_on_policy: bool, seed: int, contract: Contract = CONTRACTS["exact-v1"]
) -> Subject:
    """A model folder in one dtype under one contract, as the ladder wants it."""
    ops = Ops(contract, true_on_policy)

    def load(trainable: bool) -> Qwen3:
        return load_model(folder, ops, DTYPES[dtype], trainable=trainable)

    def make_trainer(max_tokens: int = 8192) -> Trainer:
        return Trainer(load(True), get_algorithm("grpo"), lr=1e-2, max_tokens_per_microbatch=max_tokens)

    def make_engine(**limits: Any) -> NativeEngine:
        return NativeEngine(rollout_model, **{"kv_tokens": 8192, **limits})

    rollout_model = load(False)
    return Subject(
        rollout_model, make_engine, make_trainer, lambda: (NativeEngine(load(False), kv_tokens=8192), make_trainer()),
        dtype, seed,
    )  # fmt: skip
