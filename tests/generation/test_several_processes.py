"""generate() in two connected CPU processes: each is served in T0 as long as its weights are plain tensors."""

import gc
import os
import socket
import tempfile

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

import fuseopt
from fuseopt.generation.tiers import Tier
from tests import tiny
from tests.two_processes import start_two

GENERATION = {"generation": {"enable": True}}
SHARDED = "FSDP or DeepSpeed ZeRO-3 shards the model over several processes"
SYNCHRONISED = "synced_gpus synchronises several processes"


def _connect(rank, port):
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)


def _serve_in_process(rank, serve, port):
    _connect(rank, port)
    serve(rank, port)
    # A group that DDP's Reducer outlives is freed with the GIL held, and may wait for a thread that waits for the GIL.
    gc.collect()
    distributed.destroy_process_group()


def _generate(model, rank, **arguments):
    """Tokens of prompts that no other process has; with no EOS token, so that processes take different steps."""
    inputs = tiny.inputs(model, batch=1 + rank, length=5 + rank, seed=rank)["input_ids"]
    given = {"attention_mask": torch.ones_like(inputs), "max_new_tokens": 4 + 3 * rank, "eos_token_id": None}
    torch.manual_seed(rank)
    return model.generate(inputs, pad_token_id=0, **given | arguments)


def _serve_plain_weights(rank, port):
    for family in ("gpt2", "t5"):
        stock, fused = tiny.FAMILIES[family](), fuseopt.initialize(tiny.FAMILIES[family](), GENERATION)
        wrapped = DistributedDataParallel(fused)
        for arguments in ({}, {"synced_gpus": False}, {"do_sample": True}, {"num_beams": 2}):
            tokens = _generate(wrapped.module, rank, **arguments)
            assert torch.equal(tokens, _generate(stock, rank, **arguments))
            assert fused.generate.calls[-1].tier is Tier.DEVICE_LOOP, fused.generate.calls[-1]
        # Steps read the weights where DDP's gradients update them.
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=1.0)
        wrapped.train()
        wrapped(**tiny.inputs(fused, seed=rank)).logits.square().mean().backward()
        optimizer.step()
        wrapped.eval()
        stock.load_state_dict(fused.state_dict())
        assert torch.equal(_generate(fused, rank), _generate(stock, rank))
        assert fused.generate.calls[-1].tier is Tier.DEVICE_LOOP
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("transformers.generation.utils.is_deepspeed_zero3_enabled", lambda: True)
            assert torch.equal(_generate(fused, rank), _generate(stock, rank))
            assert fused.generate.calls[-1].reason == SHARDED
        assert torch.equal(_generate(fused, rank, synced_gpus=True), _generate(stock, rank, synced_gpus=True))
        assert fused.generate.calls[-1].reason == SYNCHRONISED


def _serve_sharded_weights(rank, port):
    stock, mesh = tiny.gpt2(), init_device_mesh("cpu", (2,))
    for whole in (True, False):
        fused = fuseopt.initialize(tiny.gpt2(), GENERATION)
        fully_shard(fused if whole else fused.transformer.h[0], mesh=mesh)
        for synced in (None, True):
            # accelerate marks such models, and transformers synchronises those with the mark.
            fused._is_fsdp_managed_module = synced is None
            tokens = _generate(fused, rank, synced_gpus=synced)
            assert torch.equal(tokens, _generate(stock, rank, synced_gpus=True))
            assert fused.generate.calls[-1].tier is Tier.STOCK
            assert fused.generate.calls[-1].reason == (SHARDED if synced is None else SYNCHRONISED)
        # Processes that take equally many steps need not be synchronised.
        same = {"synced_gpus": False, "max_new_tokens": 4}
        assert torch.equal(_generate(fused, rank, **same), _generate(stock, rank, **same))
        wanted = "FSDPGPT2LMHeadModel is not exactly" if whole else "transformer.h.0 is a FSDPGPT2Block"
        assert wanted in fused.generate.calls[-1].reason
    for is_flat in (False, True):
        fused = fuseopt.initialize(tiny.gpt2(), GENERATION)
        wrapped = FullyShardedDataParallel(fused, use_orig_params=not is_flat, device_id=torch.device("cpu"))
        for arguments in ({}, {"synced_gpus": False}):
            with FullyShardedDataParallel.summon_full_params(wrapped):
                assert torch.equal(_generate(fused, rank, **arguments), _generate(stock, rank, **arguments))
            assert fused.generate.calls[-1].reason == SHARDED


def _predict_with_a_trainer(rank, port):
    """Prompts of eight rows, of which the Trainer gives each process four."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in ranks.items()}
    generator = torch.Generator().manual_seed(0)
    rows = [{"input_ids": torch.randint(3, tiny.VOCAB, (6,), generator=generator)} for _ in range(8)]
    rows = [{**row, "attention_mask": torch.ones(6, dtype=torch.long), "labels": row["input_ids"]} for row in rows]
    stock, fused = tiny.t5(), fuseopt.initialize(tiny.t5(), GENERATION)
    predicted = []
    with tempfile.TemporaryDirectory() as folder:
        options = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "per_device_eval_batch_size": 4}
        arguments = Seq2SeqTrainingArguments(folder, predict_with_generate=True, **options)
        assert arguments.world_size == 2
        for model in (stock, fused):
            trainer = Seq2SeqTrainer(model, arguments)
            predicted.append(trainer.predict(rows, max_new_tokens=7).predictions)
    assert predicted[0].shape[0] == 8 and (predicted[0] == predicted[1]).all()
    assert fused.generate.calls[-1].tier is Tier.DEVICE_LOOP, fused.generate.calls[-1]


@pytest.mark.parametrize("serve", [_serve_plain_weights, _serve_sharded_weights, _predict_with_a_trainer])
def test_two_processes_are_served_as_one_is(serve):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start_two(_serve_in_process, (serve, port))
