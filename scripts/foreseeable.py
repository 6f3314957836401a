"""Change a synthetic checkpoint so that each token follows from the last, and its DSpark draft knows how.

    python3 scripts/foreseeable.py CHECKPOINT

The drafts of random weights are never right, so that a server which verifies and counts wrongly looks like
one that does it well. Here embeddings are so large that what layers add to them does not matter: token t is
followed by the token whose row of the head is t's embedding. The Markov head of the draft holds the same
successor for every token, far above what the draft's stages say. `dsv4convert probe --draft` then counts
six tokens a step, and so has a server to. Nothing else is changed; the stages of the draft are judged
elsewhere. Only a checkpoint that `dsv4convert synth` made is touched: real weights would be lost.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

#: Standard deviation of embeddings (layers add a few units); logit of a successor; what the draft adds to it.
_LOUD, _LOGIT, _BIAS = 64.0, 16.0, 48.0
#: How the card of a synthetic checkpoint begins; a conversion and a download have another one.
_CARD = "Made by `dsv4convert synth`"


def successors(vocabulary: int) -> Tensor:
    """Return the token after every token: one cycle through all of them, int64 [V]."""
    order = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(5))
    after = torch.empty_like(order)
    after[order] = order.roll(-1)
    return after


def foreseeable(vocabulary: int, hidden: int, rank: int) -> dict[str, Tensor]:
    """Return the four tensors, BF16: embedding and head [V, H], Markov factors [V, R]."""
    draw = torch.Generator().manual_seed(6)
    after = successors(vocabulary)
    directions = torch.nn.functional.normalize(torch.randn(vocabulary, hidden, generator=draw), dim=1)
    # The head's input is normalized to length sqrt(H); its product with a row of this length is the logit.
    head = torch.empty_like(directions)
    head[after] = directions * _LOGIT / hidden**0.5
    known = torch.nn.functional.normalize(torch.randn(vocabulary, rank, generator=draw), dim=1)
    tensors = {
        "embed.weight": directions * _LOUD * hidden**0.5,
        "head.weight": head,
        "markov_w1.weight": known[after] * _BIAS,
        "markov_w2.weight": known,
    }
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        what = f"holds no {file.name}" if file.parent.is_dir() else "is no directory"
        raise SystemExit(
            f"error: {file.parent}: {what}: expected a checkpoint that `dsv4convert synth` made"
        ) from None
    except OSError as error:
        raise SystemExit(f"error: {file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SystemExit(f"error: {file}: is not UTF-8") from None


def _sizes(root: Path) -> tuple[int, int, int]:
    """Return the arguments of `foreseeable`, if the checkpoint is one to be changed."""
    card, text = (_text(root / name) for name in ("README.md", "config.json"))
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SystemExit(f"error: {root / 'config.json'}: is not JSON: {error}") from None
    if not card.startswith(_CARD):
        raise SystemExit(f"error: {root}: its README.md does not begin with {_CARD!r}; nothing was changed")
    if "dspark_markov_rank" not in config:
        raise SystemExit(f"error: {root}: config.json has no DSpark draft; make a release that has one")
    return config["vocab_size"], config["hidden_size"], config["dspark_markov_rank"]


def main() -> None:
    """Rewrite the shards that hold the tensors."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    root = parser.parse_args().checkpoint
    made = foreseeable(*_sizes(root))
    for shard in sorted(root.glob("model-*.safetensors")):
        tensors = load_file(shard)
        mine = {name: new for name in tensors for end, new in made.items() if name.endswith(end)}
        if mine:
            save_file(tensors | mine, shard)
            print(f"{shard.name}: {', '.join(sorted(mine))}")


if __name__ == "__main__":
    main()
