"""Checks the PyTorch peers of bench/: a peer that is wrong would make us look better than we are.

Plain Python; every check_* function runs, the exit code is the number of failures.
"""

import sys
import traceback
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "bench"))
import crammed_bert as twin  # noqa: E402
import torch_peer  # noqa: E402
import torch_train  # noqa: E402

TINY = twin.Config(layers=2, hidden=16, heads=2, ffn=24, vocab_size=50, seq_length=40)


def rows(count, seed=0):
    return torch.randint(5, TINY.vocab_size, (count, TINY.seq_length), generator=torch.Generator().manual_seed(seed))


def check_masks_follow_the_recipe():
    original = rows(300)
    before = original.clone()
    ids, positions, labels = torch_train.mask(original, TINY.vocab_size, torch.Generator().manual_seed(1))
    assert torch.equal(original, before), "the rows themselves must stay"
    assert positions.numel() == 300 * 10 and positions.unique().numel() == positions.numel()
    assert torch.equal(positions.view(300, 10), positions.view(300, 10).sort(1).values)
    assert torch.equal(labels, original.view(-1)[positions])
    chosen = torch.zeros(original.numel(), dtype=torch.bool)
    chosen[positions] = True
    assert torch.equal(ids.view(-1)[~chosen], original.view(-1)[~chosen]), "only chosen positions change"
    masked = (ids.view(-1)[positions] == twin.MASK_ID).view(300, 10).sum(1)
    assert (masked == 8).all(), "80 % of a quarter of each row"
    changed = ids.view(-1)[positions] != labels
    others = (changed & (ids.view(-1)[positions] != twin.MASK_ID)).sum().item()
    assert 0.9 * 300 <= others <= 300, f"{others} of 300 random tokens differ from the original"
    assert (ids >= twin.MASK_ID).all(), "no other special token is drawn"


def check_schedule_is_ours():
    for line in (HERE / "golden" / "schedules.txt").read_text().splitlines():
        name, *numbers = line.split()
        if name == "triangle2":
            warmup, _, t, factor = map(float, numbers)
            if warmup == 0 and t <= 1:
                assert abs(torch_train.triangle2(t) - factor) < 1e-12, (t, factor)


def check_a_rewound_peer_trains_like_a_fresh_one():
    device = torch.device("cpu")
    batches = [torch_train.mask(rows(4, s), TINY.vocab_size, torch.Generator().manual_seed(s)) for s in range(3)]

    def train(peer):
        for batch in batches:
            torch_train.step(peer, batch, 1e-3)
        return [p.detach().clone() for p in peer.model.parameters()]

    used = torch_peer.Peer(TINY, "eager-fp32", 5, device)
    first = train(used)
    used.rewind(5)
    again = train(used)
    fresh = train(torch_peer.Peer(TINY, "eager-fp32", 5, device))
    for a, b, c in zip(first, again, fresh):
        assert torch.equal(a, c) and torch.equal(b, c)


def check_the_peer_steps_like_the_twin():
    """Fused AdamW with two groups and clipping against the twin's written-out optimizer."""
    peer = torch_peer.Peer(TINY, "eager-fp32", 3, torch.device("cpu"))
    model = twin.CrammedBert(TINY, torch.Generator().manual_seed(3))
    optimizer = twin.AdamW(model.named_parameters())
    for step in range(4):
        ids, positions, labels = torch_train.mask(rows(4, step), TINY.vocab_size, torch.Generator().manual_seed(step))
        torch_train.step(peer, (ids, positions, labels), 2e-3)
        twin.train_step(model, optimizer, ids, positions, labels, 2e-3)
    for (name, mine), other in zip(peer.model.named_parameters(), model.parameters()):
        error = (mine - other).abs().max().item()
        assert error < 2e-5, f"{name}: {error}"


def check_the_judge_sees_better_weights():
    held_out = rows(64)
    held_out[:] = held_out[0]  # one sentence over and over: easy to learn
    peer = torch_peer.Peer(TINY, "eager-fp32", 0, torch.device("cpu"))
    before = torch_train.held_out_loss(peer.model, held_out, torch.device("cpu"))
    assert before == torch_train.held_out_loss(peer.model, held_out, torch.device("cpu")), "always the same masks"
    for step in range(30):
        torch_train.step(peer, torch_train.mask(held_out[:16], TINY.vocab_size, torch.Generator().manual_seed(step)), 1e-2)
    assert torch_train.held_out_loss(peer.model, held_out, torch.device("cpu")) < before - 0.5


def main():
    failures = 0
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            try:
                check()
                print("ok", name)
            except Exception:
                failures += 1
                print("FAILED", name)
                traceback.print_exc()
    return failures


if __name__ == "__main__":
    sys.exit(main())
