"""Writes a small random checkpoint: `python -m afd_demo.make_model qwen3_moe DIRECTORY`."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from afd.errors import AfdError, ConfigError
from afd_demo.sizes import FAMILIES, PRESETS, Sizes, resolve

MIN_VOCAB = 512  # 256 bytes, special tokens, and some merges


def make_model(
    family: str, directory: Path, sizes: Sizes, *, seed: int = 0, dtype: str = "bfloat16"
) -> int:
    """Writes config, weights and tokenizer to `directory`, and creates it if needed.

    Equal arguments give equal weights. Returns the size of the weights in bytes.

    Raises:
        ConfigError: the family or dtype is unknown, the vocabulary is below 512, or a package is
            missing.
    """
    try:
        from safetensors.numpy import save_file

        from afd_demo import tokenizer, weights
    except ImportError as error:
        raise ConfigError(
            f"making a model needs the package {error.name}; install it or afd[cpu]"
        ) from None
    if family not in weights.MAKERS:
        raise ConfigError(f"family {family!r} is unknown; use one of {', '.join(FAMILIES)}")
    if dtype not in weights.NUMPY_DTYPES:
        known = ", ".join(weights.NUMPY_DTYPES)
        raise ConfigError(f"dtype {dtype!r} is unknown; use one of {known}")
    if sizes.vocab < MIN_VOCAB:
        raise ConfigError(f"vocab {sizes.vocab} is too small; use {MIN_VOCAB} or more")
    drawn = weights.Drawn(seed, sizes.hidden, dtype)
    config = weights.MAKERS[family](drawn, sizes, dtype)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(drawn.tensors, directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer.write(directory, sizes.vocab)
    return sum(tensor.nbytes for tensor in drawn.tensors.values())


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m afd_demo.make_model", description="Write a small random checkpoint."
    )
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--preset", choices=tuple(PRESETS), default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    for name in ("hidden", "layers", "experts", "top-k", "intermediate", "vocab"):
        parser.add_argument(f"--{name}", type=int, help="replaces the preset's value")
    parser.add_argument(
        "--dense-last",
        action="store_true",
        default=None,
        help="make the last layer dense (step3 only)",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit code: 0, or 2 after an error message."""
    args = parse_arguments(sys.argv[1:] if argv is None else argv)
    try:
        sizes = resolve(
            args.family,
            args.preset,
            hidden=args.hidden,
            layers=args.layers,
            experts=args.experts,
            top_k=args.top_k,
            intermediate=args.intermediate,
            vocab=args.vocab,
            dense_last=args.dense_last,
        )
        nbytes = make_model(args.family, args.directory, sizes, seed=args.seed, dtype=args.dtype)
    except AfdError as error:
        print(f"afd: error: {error}", file=sys.stderr)
        return 2
    print(f"{args.directory}: {args.family}, {nbytes / 1e6:.1f} MB of weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
