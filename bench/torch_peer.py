"""Our PyTorch twin as fast as PyTorch makes it: what torch_step.py times and torch_train.py trains.

Sparse prediction (decoder on the masked positions only), autocast for bf16 with fp32 weights, fused AdamW, gradient
clipping, as the public trainer does it. On a GPU, compiled modes use CUDA graphs, and attention is PyTorch's fused one.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "reference"))
import crammed_bert as twin  # noqa: E402

MODES = ["eager-fp32", "eager-bf16", "compiled-fp32", "compiled-bf16"]
CLIP = 0.5


class FusedAttention(twin.SelfAttention):
    """The twin's attention (same weight, same layout) through PyTorch's fused kernel."""

    def forward(self, x, keep):
        batch, length, hidden = x.shape
        qkv = self.query_key_value(x).view(batch, length, self.heads, 3, hidden // self.heads)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # each [B,A,S,d]
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, hidden)


def synchronise(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


class Peer:
    """A model and its optimizer. `mode` is one of MODES; `attention` "twin" or "sdpa", by default what suits the device."""

    def __init__(self, config, mode, seed, device, attention=None):
        kind, precision = mode.split("-")
        attention = attention or ("sdpa" if device.type == "cuda" else "twin")
        plain = twin.SelfAttention
        twin.SelfAttention = FusedAttention if attention == "sdpa" else plain
        self.model = twin.CrammedBert(config, torch.Generator().manual_seed(seed)).to(device).train()
        twin.SelfAttention = plain
        self.config, self.device = config, device
        self.graphs = kind == "compiled" and device.type == "cuda"
        groups = [{"params": [p for n, p in self.model.named_parameters() if twin.decays(n) == decays],
                   "weight_decay": 0.01 if decays else 0.0} for decays in (True, False)]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), eps=1e-12, fused=True)
        # Gradients are added to tensors that are here already: else the first ones would be outputs of a CUDA graph, which
        # the next replay overwrites.
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

        def loss_of(ids, positions, labels):
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                hidden = self.model.encoder(ids).reshape(-1, config.hidden)[positions]
                logits = F.linear(hidden, self.model.encoder.embedding.word_embedding.weight)
            return F.cross_entropy(logits.float(), labels)

        if kind == "compiled":
            loss_of = torch.compile(loss_of, mode="reduce-overhead" if self.graphs else "default")
        self.loss_of = loss_of

    def micro_step(self, batch, accumulation=1):
        """Forward and backward of (ids, positions, labels), of the loss divided by the number of micro-steps."""
        if self.graphs:
            torch.compiler.cudagraph_mark_step_begin()
        loss = self.loss_of(*batch) / accumulation
        loss.backward()
        return loss

    def update(self, lr):
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)  # keeps the memory

    def rewind(self, seed):
        """Fresh weights and moments in the same tensors, so that compiled code stays valid."""
        fresh = twin.CrammedBert(self.config, torch.Generator().manual_seed(seed))
        with torch.no_grad():
            for mine, other in zip(self.model.parameters(), fresh.parameters()):
                mine.copy_(other)
            for state in self.optimizer.state.values():
                for value in state.values():
                    value.zero_()
