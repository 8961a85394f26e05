"""Trains a few steps, exports, and reads the result as somebody else would: the official safetensors package, the
PyTorch twin, TensorBoard. Usage: export_test.py PROGRAM_DIR"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

PROGRAMS = Path(sys.argv[1]).resolve()
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "reference"))
from crammed_bert import Config, CrammedBert  # noqa: E402

torch.set_num_threads(1)


def run(*arguments, code=0, cwd):
    argv = [str(PROGRAMS / arguments[0]), *arguments[1:]]
    result = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=100)
    assert result.returncode == code, f"{argv}: {result.returncode}, expected {code}\n{result.stdout}{result.stderr}"
    return result.stdout + result.stderr


def main():
    with tempfile.TemporaryDirectory(prefix="cram-test-") as where:
        corpus = "".join(f"row {i} the quick brown fox {i % 97} jumps over dog {i % 31}\n\n" for i in range(1, 3001))
        Path(where, "c.txt").write_text(corpus)
        run("cram_data", "tokenizer", "--input", "c.txt", "--output", "t", "--vocab-size", "300", cwd=where)
        run("cram_data", "pack", "--input", "c.txt", "--tokenizer", "t", "--output", "s", "--seq-length", "32", cwd=where)
        run("cram_train", "model.layers=2", "model.hidden=48", "model.heads=4", "model.ffn=96", "data.shards=s",
            "train.batch_size=64", "train.micro_batch_size=32", "train.batch_ramp=0", "train.budget=30steps",
            "train.precision=fp32", "run.threads=1", "run.output=r", "eval.every=10steps", "eval.rows=8", cwd=where)
        run("cram_export", "--checkpoint", "r", "--output", "out", "--format", "cramming", "--sample", "4", cwd=where)

        weights = load_file(f"{where}/out/model.safetensors")
        assert "decoder.weight" not in weights, "the tied matrix is there twice"
        twin = CrammedBert(Config(2, 48, 4, 96, 300, 32)).eval()
        missing, unexpected = twin.load_state_dict(weights, strict=False)
        assert not unexpected, unexpected
        assert set(missing) <= {"decoder.weight"}, missing

        sample = load_file(f"{where}/out/sample.safetensors")
        ids, ours = sample["input_ids"], sample["logits"]
        assert ids.shape == (4, 32) and ours.shape == (4, 32, 300), (ids.shape, ours.shape)
        with torch.no_grad():
            theirs = twin.logits(ids, torch.arange(4 * 32)).view(4, 32, 300)
        worst = (ours - theirs).abs().max().item()
        assert worst < 1e-5, f"logits differ by {worst}"
        assert theirs.abs().max().item() > 0.5, "too flat to compare"

        # Negative control: the same comparison must see two swapped halves of the gate.
        with torch.no_grad():
            w = twin.state_dict()["encoder.layers.0.ffn.dense_in.weight"]
            w.copy_(torch.cat(w.chunk(2)[::-1]))
            assert (ours - twin.logits(ids, torch.arange(4 * 32)).view(4, 32, 300)).abs().max().item() > 1e-4

        # Exported files are a checkpoint again, and the same bytes come out.
        run("cram_export", "--checkpoint", "out/model.safetensors", "--output", "again", cwd=where)
        assert Path(where, "again/model.safetensors").read_bytes() == Path(where, "out/model.safetensors").read_bytes()
        run("cram_export", "--checkpoint", "nowhere", "--output", "x", code=20, cwd=where)
        run("cram_export", "--checkpoint", "r", "--output", "x", "--format", "onnx", code=2, cwd=where)
        assert not Path(where, "x").exists()

        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        events = EventAccumulator(f"{where}/r/tb")
        events.Reload()
        lines = [json.loads(line) for line in Path(where, "r/metrics.jsonl").read_text().splitlines()]
        train = [line for line in lines if line["kind"] == "train"]
        scalars = events.Scalars("train/loss")
        assert [s.step for s in scalars] == [line["step"] for line in train] == list(range(1, 31))
        assert all(abs(s.value - line["loss"]) < 1e-6 * abs(line["loss"]) for s, line in zip(scalars, train))
        assert [s.step for s in events.Scalars("eval/loss")] == [10, 20, 30]
        for key in ("step", "loss", "lr", "grad_norm", "batch_size", "tokens", "tokens_per_s", "mfu", "elapsed_s",
                    "budget_fraction", "data_wait", "skipped", "left_s", "attempt"):
            assert key in train[0], key
        summary = [line for line in lines if line["kind"] == "summary"]
        assert len(summary) == 1 and summary[0]["reason"] == "budget" and summary[0]["steps"] == 30, summary
        assert summary[0]["tokens"] == 30 * 64 * 32 and summary[0]["eval_loss"] is not None
    print(f"ok: largest logit difference {worst:.2e}")


main()
