"""Train, stop, and resume with the losses of a run that never stopped, from a checkpoint store.

    python examples/resume.py [FOLDER]

Every third step of a small network is stored: model, optimizer, scheduler and random numbers, each as what
changed since the step before. Run it twice with one folder: the second run goes on where the first was.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

from tpde import CheckpointStore


def train(folder: Path, steps: int) -> dict[int, float]:
    """Train up to a step, from the newest that the folder has; returns the losses by step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Dropout(0.1), torch.nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    losses = {}
    with CheckpointStore(folder, keyframe_every=8, keep=4) as store:
        begin = 0
        if store.steps:
            begin = store.steps[-1]
            state = store.load(begin)
            for name, it in parts.items():
                it.load_state_dict(state[name])
            torch.set_rng_state(state["random"])
        for step in range(begin + 1, steps + 1):
            x = torch.randn(32, 64)
            loss = torch.nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses[step] = loss.item()
            if step % 3 == 0:
                state = {name: it.state_dict() for name, it in parts.items()}
                store.save(step, state | {"random": torch.get_rng_state()}, background=True)
    return losses


def main() -> None:
    """Train twice as far as the folder has got."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else scratch) / "checkpoints"
        there = CheckpointStore(folder).steps
        for end in (there[-1] * 2,) if there else (6, 12):
            for step, loss in train(folder, end).items():
                print(f"step {step}: loss {loss:.6f}")
            steps = CheckpointStore(folder).describe()
            print(", ".join(f"step {it.step}: {it.state_bytes} bytes in {it.file_bytes}" for it in steps))


if __name__ == "__main__":
    main()
