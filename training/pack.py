"""Turns text into token streams: `python -m training.pack DIRECTORY`.

Reads DIRECTORY/prose.jsonl and WordNet (training/corpus.py), generates conversations, trains the
tokenizer, and writes to DIRECTORY/packed: the tokenizer, `tokens.npz`, `heldout.txt` (prose) and
`heldout-chat.txt` (conversations, rendered with the chat template).

tokens.npz has two arrays per stream (prose, lexicon, chat, fresh) and split (train, heldout): token
ids `<stream>.<split>` (uint16), and the positions where texts begin `<stream>.<split>.starts`
(int64). The stream fresh is the prose of fresh.jsonl, on which the tokenizer is not trained.
"""

import argparse
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
from tokenizers import Tokenizer

from afd_demo.tokenizer import BOS
from training import chat, lexicon, tokenizer
from training.corpus import unpack
from training.readers import Document
from training.sources import SOURCES, WORDNET
from training.stories import story
from training.wordnet import WordNet, familiar, read

STREAMS = ("prose", "lexicon", "chat")
SPLITS = ("train", "heldout")
VOCAB = 8192
CONTEXT = 1024
HELDOUT_SHARE = 100  # one document in so many is held out
HELDOUT_BYTES = {"heldout.txt": 400_000, "heldout-chat.txt": 120_000}
SEED = 20
STORIES = 15_000  # as plain text, in the lexicon stream


def is_heldout(text: str) -> bool:
    """Returns whether a text is held out, by its hash: independent of order and versions."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") % (
        HELDOUT_SHARE
    ) == 0  # fmt: skip


def read_prose(file: Path) -> Iterator[tuple[str, int, Document]]:
    """Yields (package, weight, document); splits documents every 20 paragraphs."""
    for line in file.open():
        record = json.loads(line)
        paragraphs = tuple(record["paragraphs"])
        for start in range(0, len(paragraphs), 20):
            part = Document(record["title"], paragraphs[start : start + 20])
            yield record["source"], record["weight"], part


def texts(
    prose: list[tuple[str, int, Document]], net: WordNet, count: int
) -> dict[str, list[list[str]]]:
    """Returns the texts of every `<stream>.<split>`. A text is a list of paragraphs."""
    random = Random(SEED)
    found: dict[str, list[list[str]]] = {f"{s}.{p}": [] for s in STREAMS for p in SPLITS}
    kept: dict[str, list[Document]] = {}
    for package, weight, document in prose:
        if is_heldout(document.paragraphs[0]):
            found["prose.heldout"].append(list(document.paragraphs))
        else:
            kept.setdefault(package, []).append(document)
            found["prose.train"] += [list(document.paragraphs)] * weight
    asked = {net.index[key][0] for key in familiar(net)}
    for sense in (net.senses[key] for key in sorted(asked)):
        text = lexicon.entry(net, random, sense)
        if text.isascii() and not sense.coarse:
            found[f"lexicon.{SPLITS[is_heldout(text)]}"].append([text])
    for split, number in (("train", STORIES), ("heldout", 100)):
        found[f"lexicon.{split}"] += [story(random)[1].split("\n\n") for _ in range(number)]
    render = tokenizer.ChatRenderer()
    for split, number, seed in (("train", count, SEED), ("heldout", 2000, SEED + 1)):
        for made in chat.conversations(net, kept, count=number, seed=seed):
            found[f"chat.{split}"].append([render(made.messages, made.tools)])
    for pieces in found.values():
        random.shuffle(pieces)
    return found


def fresh_texts(prose: list[tuple[str, int, Document]]) -> dict[str, list[list[str]]]:
    """Returns the texts of `fresh.<split>`, shuffled with a fixed seed."""
    found: dict[str, list[list[str]]] = {f"fresh.{split}": [] for split in SPLITS}
    for _, weight, document in prose:
        held = is_heldout(document.paragraphs[0])
        found[f"fresh.{SPLITS[held]}"] += [list(document.paragraphs)] * (1 if held else weight)
    for pieces in found.values():
        Random(SEED).shuffle(pieces)
    return found


def encode(found: list[list[str]], model: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Returns (ids uint16, starts int64); a blank line joins paragraphs, BOS ends a text."""
    bos = model.token_to_id(BOS)
    ids: list[np.ndarray] = []
    starts: list[int] = []
    at = 0
    for begin in range(0, len(found), 5000):
        part = found[begin : begin + 5000]
        flat = [p + ("\n\n" if i + 1 < len(t) else "") for t in part for i, p in enumerate(t)]
        encoded = iter(model.encode_batch_fast(flat))
        for text in part:
            for _ in text:
                row = np.asarray(next(encoded).ids, np.uint16)
                starts.append(at)
                ids.append(row)
                at += len(row)
            ids.append(np.asarray([bos], np.uint16))
            at += 1
    return np.concatenate(ids), np.asarray(starts, np.int64)


def heldout_text(found: list[list[str]], limit: int) -> str:
    """Returns texts of up to `limit` bytes, separated by lines of three dashes."""
    parts: list[str] = []
    size = 0
    for paragraphs in found:
        document = "\n\n".join(paragraphs).rstrip("\n")
        if size + len(document) > limit:
            break
        parts.append(document)
        size += len(document) + 6
    return "\n\n---\n\n".join(parts) + "\n"


def write_heldout(prose: list[tuple[str, int, Document]], net: WordNet, out: Path) -> None:
    """Writes the held-out texts that come with the model: prose and conversations.

    They use only sources in the public domain, so that the files carry no conditions except
    WordNet's notice. Conversations use a seed that training does not use.
    """
    free = {source.package for source in SOURCES if source.licence == "public domain"}
    held: list[list[str]] = []
    kept: dict[str, list[Document]] = {}
    for package, _, document in prose:
        if package in free and is_heldout(document.paragraphs[0]):
            held.append(list(document.paragraphs))
        elif package in free:
            kept.setdefault(package, []).append(document)
    Random(SEED).shuffle(held)
    render = tokenizer.ChatRenderer()
    made = chat.conversations(net, kept, count=1000, seed=SEED + 2)
    chats = [[render(one.messages, one.tools)] for one in made]
    for name, found in (("heldout.txt", held), ("heldout-chat.txt", chats)):
        (out / name).write_text(heldout_text(found, HELDOUT_BYTES[name]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the tokenizer and the token streams.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--conversations", type=int, default=400_000)
    parser.add_argument("--heldout-only", action="store_true", help="write only the held-out texts")
    args = parser.parse_args()
    out = args.directory / "packed"
    out.mkdir(exist_ok=True)
    net = read(unpack(WORDNET, args.directory) / WORDNET.root)
    prose = list(read_prose(args.directory / "prose.jsonl"))
    write_heldout(prose, net, out)
    if args.heldout_only:
        return
    found = texts(prose, net, args.conversations)
    sample = [p for name in ("prose.train", "lexicon.train", "chat.train")
              for text in found[name][:40_000] for p in text]  # fmt: skip
    model = tokenizer.train(sample, VOCAB)
    tokenizer.write(model, out, context=CONTEXT)
    found |= fresh_texts(list(read_prose(args.directory / "fresh.jsonl")))
    arrays: dict[str, np.ndarray] = {}
    for name, pieces in found.items():
        arrays[name], arrays[f"{name}.starts"] = encode(pieces, model)
        print(f"{name}: {len(pieces)} texts, {len(arrays[name]) / 1e6:.2f} M tokens", flush=True)
    np.savez(out / "tokens.npz", **arrays)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
