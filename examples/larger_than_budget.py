"""Train a byte-level transformer whose model data is six times its device budget, and print the memory it used.

With `device="cpu"` the device is a part of RAM; on a GPU leave it out.
"""

import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import patrickstar as ps

WIDTH, LAYERS, LENGTH, BATCH, MIB = 384, 12, 64, 4, 1 << 20


class TextModel(nn.Module):
    """Predict the next byte; return the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 6, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).layers
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.bytes(ids[:, :-1]) + self.positions.weight
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=hidden.dtype)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, mask, use_reentrant=False)
        return nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), ids[:, 1:].flatten())


def main(steps: int = 30) -> tuple[float, int, int]:
    """Train, print memory figures, and return the last loss, the bytes of model data and their peak on the device."""
    torch.manual_seed(0)
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
    samples = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, LENGTH + 1, LENGTH)
    config = ps.Config(device="cpu", device_memory="48MiB", optimizer=ps.AdamW(lr=3e-4))
    with ps.initialize(TextModel, config) as (engine, optimizer):
        for step in range(steps):
            loss = engine(samples[torch.randint(len(samples), (BATCH,))].long())
            engine.backward(loss)
            engine.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step + 1}: loss {loss.item():.3f}")
        model_bytes = sum(chunk.nbytes for chunk in engine.inspect().chunks)
        budget_bytes, total = engine.device_budget_bytes, engine.stats.total
        model_peak_bytes, other_peak_bytes = total.device_peak_model_bytes, total.device_peak_non_model_bytes
        print(f"model data {model_bytes / MIB:.1f} MiB, device budget {budget_bytes / MIB:.1f} MiB, peak", end=" ")
        print(f"{model_peak_bytes / MIB:.1f} MiB of model data, {other_peak_bytes / MIB:.1f} MiB of activations")
    return loss.item(), model_bytes, model_peak_bytes


if __name__ == "__main__":
    main()
