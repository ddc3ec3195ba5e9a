"""Keep a replica's weights equal to a trainer's, by sending what each step changed.

    python examples/weight_sync.py

Two processes, over NCCL with a GPU each if there are two, else over gloo on the CPU: rank 0 trains a small
model, rank 1 applies a delta for each step. After each step both compare a hash of all weights.
"""

from __future__ import annotations

import hashlib
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import tpde

STEPS, TRAINER, REPLICA = 5, 0, 1
ON_GPUS = dist.is_nccl_available() and torch.cuda.device_count() > 1


def make_model(device: torch.device) -> torch.nn.Module:
    """Give both processes the same start."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)]
    return torch.nn.Sequential(*layers).to(torch.bfloat16).to(device)


def fingerprint(model: torch.nn.Module) -> str:
    """Hash every bit of the weights."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.view(torch.uint8).cpu().numpy())
    return digest.hexdigest()


def send(data: bytes, device: torch.device) -> None:
    """Send bytes to the replica."""
    dist.send(torch.tensor([len(data)], device=device), REPLICA)
    dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device), REPLICA)


def receive(device: torch.device) -> bytes:
    """Receive bytes from the trainer."""
    size = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(size, TRAINER)
    data = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.recv(data, TRAINER)
    return data.cpu().numpy().tobytes()


def train(model: torch.nn.Module, device: torch.device) -> None:
    """Train with fp32 masters, as is usual, so that a step of bf16 weights changes few of them."""
    masters = [weight.detach().float() for weight in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-5)
    plain = sum(weight.nbytes for weight in masters) // 2
    for step in range(STEPS):
        old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        x = torch.randn(64, 512, dtype=torch.bfloat16, device=device)
        model.zero_grad()
        torch.nn.functional.mse_loss(model(x), x).backward()
        with torch.no_grad():
            for master, weight in zip(masters, model.parameters(), strict=True):
                master.grad = weight.grad.float()
            optimizer.step()
            for master, weight in zip(masters, model.parameters(), strict=True):
                weight.copy_(master)
        delta = tpde.make_delta(old, model)
        send(delta, device)
        send(fingerprint(model).encode(), device)
        print(
            f"step {step}: {plain / 1e6:.1f} MB of weights, a delta of {len(delta) / 1e3:.1f} kB", flush=True
        )


def follow(model: torch.nn.Module, device: torch.device) -> None:
    """Apply what comes."""
    for step in range(STEPS):
        tpde.apply_delta(model, receive(device))
        if fingerprint(model) != receive(device).decode():
            raise SystemExit(f"step {step}: the replica differs")
    print(f"{STEPS} steps: the replica has the trainer's weights, bit for bit")


def run(rank: int, meeting: str) -> None:
    """Run one of the two processes."""
    device = torch.device("cuda", rank) if ON_GPUS else torch.device("cpu")
    if ON_GPUS:
        torch.cuda.set_device(device)
    backend = "nccl" if ON_GPUS else "gloo"
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=2)
    try:
        (train if rank == TRAINER else follow)(make_model(device), device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (os.path.join(folder, "meeting"),), nprocs=2)
