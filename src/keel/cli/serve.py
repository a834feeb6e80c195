"""`keel serve`: a sampling server for remote training."""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import typer

from keel.base.errors import KeelError, unknown
from keel.cli.app import app

SERVE_HELP = """Start a vLLM sampling server for keel train on another device or machine, or a model's HTTP endpoint.

--engine vllm: the trainer sends weights and requests completions. --engine native, or a user's module:attr: POST
/inference/v1/generate takes token ids and returns token ids and log-probabilities (docs/environments.md). Both listen
on 127.0.0.1 unless --host is given. Requests need a secret: KEEL_SERVE_SECRET, or a random one that is printed.

Examples:

  keel serve Qwen/Qwen2.5-1.5B --port 8000

  KEEL_SERVE_SECRET=... keel serve ./my-model --host 0.0.0.0 --tensor-parallel-size 4

  keel serve tiny --max-lora-rank 16

  keel serve runs/my-run --engine native --max-batch 16

On the training machine:

  KEEL_SERVE_SECRET=... keel train CONFIG rollout.engine=vllm rollout.vllm.mode=server rollout.vllm.url=http://HOST:8000
"""


@app.command(help=SERVE_HELP)
def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL|RUN|CONFIG", help="The model to train.")],
    engine: Annotated[str, typer.Option(help="The engine: vllm, native, or a user's module:attr.")] = "vllm",
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every interface.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 picks a free one.", min=0, max=65535)] = 8000,
    dtype: Annotated[str, typer.Option(help="dtype of the weights; auto is the model's own.")] = "auto",
    tensor_parallel_size: Annotated[int, typer.Option(help="Number of GPUs that share the model.", min=1)] = 1,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Fraction of the GPU's memory.", min=0.01, max=1)] = 0.9,
    max_model_len: Annotated[
        int | None, typer.Option(help="Maximum length of prompt plus completion in tokens.")
    ] = None,
    transfer: Annotated[
        Literal["http", "nccl"],
        typer.Option(help="Transfer of full weights: http, or nccl from other GPUs (experimental)."),
    ] = "http",
    cuda_graphs: Annotated[
        bool, typer.Option(help="Compile and decode with CUDA graphs; start-up takes longer.")
    ] = True,
    max_lora_rank: Annotated[int, typer.Option(help="Maximum LoRA rank; 0 disables adapters.", min=0)] = 0,
    max_batch: Annotated[
        int | None,
        typer.Option(help="Maximum number of requests sampled at a time, without vllm (default: 16).", min=1),
    ] = None,
) -> None:
    from keel.envs.endpoint import SECRET
    from keel.models.head import causal_lm, is_lora
    from keel.models.precision import DTYPES
    from keel.rollout.options import RolloutOptions, VllmOptions
    from keel.rollout.registry import build_engine, check_rollout
    from keel.rollout.vllm.transfer import checkpoint_weights, save_shards
    from keel.run.model_ref import resolve_model
    from keel.trainer.checkpoint import save_weights

    try:
        from keel.rollout.serving import serve as serve_engine
        from keel.rollout.vllm.serve import serve as serve_model
    except ModuleNotFoundError as error:
        raise KeelError(f"keel serve needs {error.name}: pip install 'keel-rl[serve]'") from error
    given = os.environ.get(SECRET)
    secret = given or secrets.token_urlsafe(24)
    if given is not None and len(given) < 8:
        raise KeelError(f"{SECRET} has {len(given)} characters: use at least 8")
    options = VllmOptions(
        tensor_parallel_size=tensor_parallel_size,
        gpu_memory_utilization=gpu_memory_utilization,
        max_model_len=max_model_len,
        transfer=transfer,
        cuda_graphs=cuda_graphs,
    )

    if dtype not in ("auto", *DTYPES):
        raise unknown("--dtype", dtype, ("auto", *DTYPES))
    shown = "" if given else f"{SECRET}={secret} "
    if engine != "vllm":
        of_vllm = {
            "--max-lora-rank": max_lora_rank,
            "--transfer": transfer != "http",
            "--max-model-len": max_model_len,
            "--tensor-parallel-size": tensor_parallel_size != 1,
            "--gpu-memory-utilization": gpu_memory_utilization != 0.9,
        }
        for flag, is_set in of_vllm.items():
            if is_set:
                raise KeelError(f"{flag} needs --engine vllm: leave it out with --engine {engine}")
        rollout = RolloutOptions(engine=engine, dtype=dtype, cuda_graphs=cuda_graphs)  # type: ignore[arg-type]
        check_rollout(rollout)
        loaded = resolve_model(model).load()
        serve_engine(
            build_engine(rollout, loaded.model, loaded.tokenizer),
            name=model,
            vocabulary=causal_lm(loaded.model).get_output_embeddings().weight.shape[0],
            max_batch=max_batch or 16,
            host=host,
            port=port,
            secret=secret,
            ready=lambda url: typer.echo(f"{shown}serving {model}: POST {url}/inference/v1/generate"),
        )
        return
    if max_batch is not None:
        raise KeelError("--max-batch has no effect with --engine vllm: use --gpu-memory-utilization instead")

    def ready(url: str) -> None:
        settings = f"rollout.engine=vllm rollout.vllm.mode=server rollout.vllm.url={url}"
        settings += "" if transfer == "http" else f" rollout.vllm.transfer={transfer}"
        typer.echo(f"serving {model}; train with: {shown}keel train CONFIG {settings}")

    loaded = resolve_model(model, ["model.device=cpu"]).load()  # leave the GPU to vLLM
    with tempfile.TemporaryDirectory(prefix="keel-serve-model-") as folder:
        base = causal_lm(loaded.model)
        if is_lora(loaded.model):  # save only the base: the trainer sends the adapter
            base.config.save_pretrained(folder)
            loaded.tokenizer.save_pretrained(folder)
            save_shards(checkpoint_weights(loaded.model, loaded.dtype), Path(folder))
        else:
            save_weights(Path(folder), base, loaded.tokenizer)
        kind = str(DTYPES.get(dtype, loaded.dtype)).removeprefix("torch.")
        tokenizer = loaded.tokenizer
        del loaded, base
        serve_model(
            folder,
            tokenizer,
            options,
            host=host,
            port=port,
            secret=secret,
            dtype=kind,
            max_lora_rank=max_lora_rank,
            ready=ready,
        )
